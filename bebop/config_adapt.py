"""What can be configured about an adaptation: the dataclasses behind ``conf/adapt.yaml``."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from bebop.config import (
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    HeadConfig,
    ModelConfig,
    ObjectiveName,
    SamplingConfig,
    TaskConfig,
)
from bebop.options import parsed
from bebop.parsing import (
    MOST,
    NOT_EMPTY,
    Limit,
    at_least,
    check,
    check_settings,
    choice,
    readable_rows,
    setting,
    within,
)
from bebop.systems import PARTS

T = TypeVar("T")
PART = Limit(lambda name: name in PARTS, "choose one of " + ", ".join(PARTS))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataConfig:
    """Sequences to train on: sampled by the model itself (default), or read from a file."""

    source: Literal["sample", "file"] = setting("sample", "where sequences come from")
    sequences: int = setting(1200, "sampled answers; from a file: the most that are read, 0 for all", NOT_NEGATIVE)
    path: str | None = setting(None, "an existing .jsonl or .parquet file, for data.source=file")
    prompt_key: str = setting("prompt", "a text or a list of messages in a row of the file", NOT_EMPTY)
    answer_key: str = setting("answer", "the text that follows it", NOT_EMPTY)
    slots: int = setting(64, "answers decoded side by side", POSITIVE)
    max_length: int = setting(512, "prompt + answer, tokens; more than data.sampling.max_new_tokens")
    sampling: SamplingConfig = field(default_factory=SamplingConfig)

    def __post_init__(self) -> None:
        check_settings(self, "data.")
        readable_rows("data.path", self.path, needed=self.source == "file")
        some = self.source == "file" or self.sequences > 0
        check(some, "data.sequences", self.sequences, "give 1 or more")
        fits = self.sampling.max_new_tokens < self.max_length
        check(fits, "data.max_length", self.max_length, "it must exceed data.sampling.max_new_tokens")
        plain = self.sampling.min_p == 0 and self.sampling.repetition_penalty == 1
        both = {name: getattr(self.sampling, name) for name in ("min_p", "repetition_penalty")}
        check(plain, "data.sampling", both, "the losses know temperature, top_p and top_k; leave these at 0 and 1")
        hot = self.sampling.temperature > 0
        check(hot, "data.sampling.temperature", self.sampling.temperature, "adaptation learns from samples: > 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """How long, on how much at a time, and from what."""

    steps: int = setting(160, "updates of the head", POSITIVE)
    rows_per_step: int = setting(32, "sequences in one update", POSITIVE)
    warm_objective: str = setting(
        "ce",
        "of the first steps: a draft that shares no token with the target has no TV gradient",
        choice(ObjectiveName),
    )
    warm_steps: int | None = setting(
        None, "null: none for a head that came with the checkpoint, a third of train.steps for a fresh one"
    )
    eval_every: int = setting(40, "steps between evaluations on held-out text", at_least(0, "at the end"))
    save_every: int = setting(80, "steps between checkpoints for resuming", at_least(0, "at the end"))
    keep: int = setting(2, "checkpoints kept; older ones are removed", POSITIVE)
    threads: int = setting(2, "CPU threads", within(1, MOST))
    cache_mb: int = setting(
        1024,
        "the backbone's hidden states of the training text are computed once if they fit",
        at_least(0, "never"),
    )

    def __post_init__(self) -> None:
        check_settings(self, "train.")
        warm = self.warm_steps
        fits = warm is None or 0 <= warm <= self.steps
        check(fits, "train.warm_steps", warm, f"give a number from 0 to train.steps={self.steps}, or null")

    def warm(self, fresh: bool) -> int:
        """Steps of the warm-up objective, for a fresh head or for one that came with the checkpoint."""
        return (self.steps // 3 if fresh else 0) if self.warm_steps is None else self.warm_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig:
    """Held-out prompts, on which acceptance is measured before and after."""

    prompts: int = setting(192, "questions", Limit(lambda number: number >= 2, "intervals need 2 or more"))
    draft_tokens: int = setting(3, "K, drafts per cycle", within(1, 16))

    def __post_init__(self) -> None:
        check_settings(self, "evaluation.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptConfig:
    """A whole adaptation."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    data: DataConfig = field(default_factory=DataConfig)
    head: HeadConfig = field(default_factory=HeadConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    part: str = setting("head", "what is trained: the MTP head, or a part of a decoding system", PART)
    options: dict[str, Any] = setting(dict, "NAME=VALUE: what the training of that part has alone")
    dir: str | None = setting(None, "the run folder; null: runs/adapt-<date and time>", NOT_EMPTY)
    out: str | None = setting(None, "the adapted checkpoint, or the part; null: in dir", NOT_EMPTY)
    resume: bool = setting(False, "go on from the newest checkpoint in dir")
    trust: bool = setting(False, "with resume: use code that a run folder of somebody else names; --trust")
    seed: int = setting(0, "of the sampled answers", SEED)
    tensorboard: bool = setting(True, "write TensorBoard events")
    progress: bool = setting(True, "show a progress bar")

    def __post_init__(self) -> None:
        check_settings(self)
        check(not self.resume or bool(self.dir), "resume", self.resume, "give the run's folder as dir")
        same = self.out is None or Path(self.out).resolve() != Path(self.model.path).resolve()
        check(same, "out", self.out, "it is model.path: give another folder, the original is kept")
        word = "only the MTP head is trained on turns: leave task.source as it is, or train part=head"
        check(not self.task.turns or self.part == "head", "task.source", self.task.source, word)
        parsed(PARTS[self.part].options, self.options, "options.", f"part={self.part}")

    def of(self, cls: type[T]) -> T:
        """The part's own options, as the dataclass that its row names."""
        options = parsed(cls, self.options, "options.", f"part={self.part}")
        assert isinstance(options, cls)
        return options
