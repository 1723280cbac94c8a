"""Settings in the ``bebop`` block of a verl job's configuration, checked once in the driver.

The driver passes them to every process of the job in one environment variable, since verl gives a worker only its own
part of the configuration.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bebop.config.engines import ModelRunner
from bebop.config.fields import check, from_dict
from bebop.config.job import HeadConfig
from bebop.systems import SYSTEMS

VARIABLE = "BEBOP_VERL"
SELECTOR = "BEBOP_VERL_SELECTOR"  # which of SGLang's models are sent weights: target, or all
MODULE = "bebop.verl_job.plugin"
EXTERNAL = "VERL_USE_EXTERNAL_MODULES"  # verl's own: modules that it imports first, and loudly
# By the actor's strategy: the hook that trains the head in a worker.
HEADS = {"fsdp2": "head.train_beside", "megatron": "megatron_engine.train_beside"}


@dataclass(frozen=True, slots=True, kw_only=True)
class VerlConfig:
    """Parts of the plug-in. Each has its own switch; with all of them off the job is the stock job."""

    metrics: bool = False  # acceptance of drafts in verl's logger, for every engine and mode
    monitor: bool = False  # why it moved (drift/*); needs metrics
    prometheus: bool = False  # the same numbers as gauges that Ray exports
    verify_every: int = 8  # SGLang: verification steps of which one is measured (overlap, entropies); 0: counts alone
    model_runner: ModelRunner | None = None  # vLLM's, where it drafts: v1, v2; null: v1 on a CPU, v2 elsewhere
    sessions: bool = False  # SGLang: weight updates in sessions, which newer versions demand; a frozen draft left alone
    train_head: bool = False  # train the MTP head beside the policy (FSDP2)
    init_head: bool = False  # start from a fresh head where the checkpoint has none
    head: HeadConfig = field(default_factory=lambda: HeadConfig(depth=3, lr=1e-4))
    # Truncation of rollouts, which the head learns; the driver copies it from actor_rollout_ref.rollout.
    rollout_top_p: float = 1.0
    rollout_top_k: int = 0  # 0: all
    rollout_rule: str = "rejection"  # acceptance rule of rollouts, copied as well

    def __post_init__(self) -> None:
        check(self.metrics or not self.monitor, "bebop.monitor", self.monitor, "it takes bebop.metrics=true")
        check(
            self.metrics or not self.prometheus,
            "bebop.prometheus",
            self.prometheus,
            "it takes bebop.metrics=true",
        )
        known = self.model_runner in (None, "v1", "v2")
        check(known, "bebop.model_runner", self.model_runner, "choose v1, v2 or null")
        check(self.verify_every >= 0, "bebop.verify_every", self.verify_every, "give 0 (never) or more")

    @property
    def parts(self) -> tuple[str, ...]:
        """Return the names of the parts that are on."""
        names = ("metrics", "monitor", "prometheus", "sessions", "train_head")
        return tuple(name for name in names if getattr(self, name))


def parse(block: Any) -> VerlConfig:
    """Parse the ``bebop`` block; raise ``UserError`` for unknown or impossible settings."""
    return from_dict(VerlConfig, plain(block), "bebop.")


def to_variable(config: VerlConfig) -> str:
    """Return the settings as the text of the environment variable."""
    return json.dumps(dataclasses.asdict(config))


def current(environment: Mapping[str, str] = os.environ) -> VerlConfig | None:
    """Return the settings of this process's job; None outside of such a job."""
    text = environment.get(VARIABLE)
    return from_dict(VerlConfig, json.loads(text), "bebop.") if text else None


def plain(node: Any) -> Any:
    """Return nested mappings and lists of any kind (OmegaConf's too) as dictionaries and lists."""
    if isinstance(node, Mapping):
        return {str(key): plain(value) for key, value in node.items()}
    if isinstance(node, Sequence) and not isinstance(node, str | bytes):
        return [plain(value) for value in node]
    return node


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of the embedded engine behind verl: ``actor_rollout_ref.rollout.engine_kwargs.bebop``."""

    system: str = "bebop"  # see bebop/systems
    draft_tokens: int = 3
    slots: int = 32  # requests decoded side by side
    threads: int = 1  # CPU threads
    on_update: str = "keep"  # keys and values of older weights, when weights change in flight
    init_head: bool = False  # a fresh head where the checkpoint has none

    def __post_init__(self) -> None:
        for name in ("slots", "threads"):
            check(getattr(self, name) >= 1, f"engine_kwargs.bebop.{name}", getattr(self, name), "give 1 or more")
        hosted = [name for name, system in SYSTEMS.items() if system.exact and not (system.needs or system.separate)]
        chosen = SYSTEMS.get(self.system)
        needs = "a job of verl brings no trained part" if chosen is not None and chosen.needs else ""
        if chosen is not None and chosen.separate:
            needs = "a job of verl brings no draft model"
        refused = (chosen.train_error if chosen is not None else "") or needs
        words = f"{refused}{'; ' * bool(refused)}choose one of {', '.join(hosted)}"
        check(self.system in hosted, "engine_kwargs.bebop.system", self.system, words)
        known = self.on_update in ("keep", "recompute")
        check(known, "engine_kwargs.bebop.on_update", self.on_update, "choose keep or recompute")


def parse_engine(block: Any) -> EngineConfig:
    """Parse ``engine_kwargs.bebop``; raise ``UserError`` for unknown or impossible settings."""
    return from_dict(EngineConfig, plain(block or {}), "engine_kwargs.bebop.")
