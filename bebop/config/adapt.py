"""Define the settings of an adaptation: the dataclasses behind ``conf/adapt.yaml``."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from bebop.config.decoding import DecodingConfig
from bebop.config.engines import SglangConfig, VllmConfig
from bebop.config.fields import (
    MAX_PROCESSES,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    Settings,
    at_least,
    check,
    choice,
    parse_options,
    readable_rows,
    section,
    setting,
    within,
)
from bebop.config.job import (
    OTHER_ALGORITHM,
    OTHER_QUESTIONS,
    SEED,
    AlgorithmConfig,
    HeadConfig,
    JobConfig,
    ModelConfig,
    MonitorConfig,
    ObjectiveName,
    RolloutConfig,
    RuntimeConfig,
    SamplingConfig,
    TaskConfig,
    check_objective,
)
from bebop.systems import PARTS

T = TypeVar("T")
# Why a resume must not change a setting.
OTHER_TEXT = "the text that the head was trained on so far would be another"
SERVED: dict[str, type[SglangConfig | VllmConfig]] = {"sglang": SglangConfig, "vllm": VllmConfig}
UNUSED = (  # settings of these engines for drafts, weight updates, or servers with unknown weights
    "urls", "api_key_env", "data_parallel", "block_verification", "adaptive_steps", "draft", "pause", "transfer",
    "folder", "address", "colocated", "monitor_every",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig(Settings):
    """Sequences to train on: sampled by the model itself (default), or read from a file."""

    SECTION = "data."
    source: Literal["sample", "file"] = setting("sample", "where sequences come from")
    sequences: int = setting(1200, "sampled completions; from a file: the most that are read, 0 for all", NOT_NEGATIVE)
    path: str | None = setting(None, "an existing .jsonl or .parquet file, for data.source=file", fixed="")
    prompt_key: str = setting("prompt", "a text or a list of messages in a row of the file", NOT_EMPTY)
    answer_key: str = setting("answer", "the text that follows it", NOT_EMPTY)
    slots: int = setting(64, "requests decoded side by side", POSITIVE, fixed="")
    max_length: int = setting(512, "prompt + completion, tokens; more than data.sampling.max_new_tokens")
    engine: Literal["torch", "transformers", "sglang", "vllm"] | None = setting(
        None,
        "what samples completions: the embedded engine, transformers' generate, SGLang or vLLM; null: the embedded "
        "engine, or transformers for a model that it cannot decode",
    )
    engine_options: dict[str, Any] = setting(
        dict, "NAME=VALUE: of SGLang or vLLM, named as in rollout.sglang and rollout.vllm", fixed=""
    )
    sampling: SamplingConfig = section(SamplingConfig)

    def _validate(self) -> None:
        for name, value in self.engine_options.items():
            check(
                name not in UNUSED, f"data.engine_options.{name}", value, "a corpus is sampled without it: leave it out"
            )
        _ = self.served  # raises UserError for wrong options
        readable_rows("data.path", self.path, needed=self.source == "file")
        self.require(self.source == "file" or self.sequences > 0, "sequences", "give 1 or more")
        fits = self.sampling.max_new_tokens < self.max_length
        self.require(fits, "max_length", "it must exceed data.sampling.max_new_tokens")
        plain = self.sampling.min_p == 0 and self.sampling.repetition_penalty == 1
        both = {name: getattr(self.sampling, name) for name in ("min_p", "repetition_penalty")}
        check(plain, "data.sampling", both, "the losses know temperature, top_p and top_k; leave these at 0 and 1")
        self.require(self.sampling.temperature > 0, "sampling.temperature", "adaptation learns from samples: > 0")

    @property
    def served(self) -> SglangConfig | VllmConfig | None:
        """Return the settings of SGLang or vLLM if one of them samples; raise ``UserError`` for wrong ones."""
        options: SglangConfig | VllmConfig | None = parse_options(
            SERVED.get(self.engine or ""),
            self.engine_options,
            "data.engine_options.",
            f"data.engine={self.engine or 'null'}",
        )
        return options


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig(Settings):
    """Length, batches and objectives of the training."""

    SECTION = "train."
    steps: int = setting(160, "updates of the head", POSITIVE)
    rows_per_step: int = setting(
        32,
        "sequences in one update",
        POSITIVE,
        fixed="rows are dealt out by the number of the step, and some would be seen too often",
    )
    warm_objective: ObjectiveName = setting(
        "ce",
        "of the first steps: a draft that shares no token with the target has no TV gradient",
        fixed=OTHER_ALGORITHM,
    )
    warm_steps: int | None = setting(
        None,
        "null: none for a head that came with the checkpoint, a third of train.steps for a fresh one",
        fixed=OTHER_ALGORITHM,
    )
    eval_every: int = setting(40, "steps between evaluations on held-out text", at_least(0, "at the end"))
    save_every: int = setting(80, "steps between checkpoints for resuming", at_least(0, "at the end"))
    keep: int = setting(2, "checkpoints kept; older ones are removed", POSITIVE)
    threads: int = setting(2, "CPU threads", within(1, MAX_PROCESSES))
    cache_mb: int = setting(
        1024,
        "the backbone's hidden states of the training text are computed once if they fit",
        at_least(0, "never"),
    )

    def _validate(self) -> None:
        fits = self.warm_steps is None or 0 <= self.warm_steps <= self.steps
        self.require(fits, "warm_steps", f"give a number from 0 to train.steps={self.steps}, or null")

    def warm(self, fresh: bool) -> int:
        """Return the number of warm-up steps, for a fresh head or for one that came with the checkpoint."""
        return (self.steps // 3 if fresh else 0) if self.warm_steps is None else self.warm_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig(Settings):
    """Held-out prompts, on which acceptance is measured before and after."""

    SECTION = "evaluation."
    prompts: int = setting(192, "questions", Limit(lambda number: number >= 2, "intervals need 2 or more"))
    draft_tokens: int = setting(3, "K, drafts per cycle", within(1, 16))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptConfig(Settings):
    """Configuration of a whole adaptation."""

    model: ModelConfig = section(ModelConfig)
    task: TaskConfig = section(TaskConfig, fixed=OTHER_QUESTIONS)
    data: DataConfig = section(DataConfig, fixed=OTHER_TEXT)
    head: HeadConfig = section(HeadConfig)
    train: TrainConfig = section(TrainConfig)
    evaluation: EvaluationConfig = section(
        EvaluationConfig, fixed="numbers before and after would be measured on different text"
    )
    part: str = setting(
        "head",
        "what is trained: the MTP head, or a part of a decoding system",
        choice(PARTS),
        fixed="checkpoints of the run hold the other one",
    )
    options: dict[str, Any] = setting(
        dict, "NAME=VALUE: what the training of that part has alone", fixed=OTHER_ALGORITHM
    )
    dir: str | None = setting(None, "the run folder; null: runs/adapt-<date and time>", NOT_EMPTY)
    out: str | None = setting(None, "the adapted checkpoint, or the part; null: in dir", NOT_EMPTY)
    resume: bool = setting(False, "go on from the newest checkpoint in dir")
    trust: bool = setting(False, "with resume: use code that a run folder of somebody else names; --trust")
    seed: int = setting(0, "of the sampled completions", SEED, fixed=OTHER_TEXT)
    tensorboard: bool = setting(True, "write TensorBoard events")
    progress: bool = setting(True, "show a progress bar")

    def _validate(self) -> None:
        self.require(not self.resume or bool(self.dir), "resume", "give the run's folder as dir")
        other = self.out is None or Path(self.out).resolve() != Path(self.model.path).resolve()
        self.require(other, "out", "it is model.path: give another folder, the original is kept")
        word = "only the MTP head is trained on turns: leave task.source as it is, or train part=head"
        self.require(not self.task.turns or self.part == "head", "task.source", word)
        options = parse_options(PARTS[self.part].options, self.options, "options.", f"part={self.part}")
        objectives = {"options.objective": getattr(options, "objective", "")}
        if self.part == "head":
            objectives = {"head.objective": self.head.objective, "train.warm_objective": self.train.warm_objective}
        for name, objective in objectives.items():
            check_objective(name, objective, self.data.sampling)

    def engine_job(self, seed: int = 0, **own: Any) -> JobConfig:
        """Return a job without drafts whose rollout engine samples completions, for ``data.engine=sglang|vllm``.

        Args:
            seed: seed of the engine's own generator.
            own: settings of the engine that override the given ones.
        """
        data, served = self.data, self.data.served
        assert served is not None and data.engine in SERVED
        engines: dict[str, Any] = {"engine": data.engine, data.engine: replace(served, **own)}
        return JobConfig(
            model=replace(self.model, draft=None, init_mtp=False),
            rollout=RolloutConfig(
                slots=data.slots,
                max_length=data.max_length,
                threads=self.train.threads,
                sampling=data.sampling,
                **engines,
            ),
            decoding=DecodingConfig(system="autoregressive", draft_tokens=0),
            algorithm=AlgorithmConfig(rescore=True),  # log-probs of a corpus are not used
            monitor=MonitorConfig(decode_stats=False),
            runtime=RuntimeConfig(seed=seed),
        )

    def of(self, cls: type[T]) -> T:
        """Return the part's own options, as the dataclass that its row names."""
        options = parse_options(cls, self.options, "options.", f"part={self.part}")
        assert isinstance(options, cls)
        return options
