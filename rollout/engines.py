"""The engines by the names of ``rollout.engine``, one module each, imported when it is chosen."""

import secrets
from importlib import import_module
from typing import Protocol, cast

from bebop.config.job import JobConfig
from bebop.rollout.engine import Engine


class EngineModule(Protocol):
    """Interface of an engine's module. It imports packages beyond Bebop's own dependencies only in ``make``."""

    EMBEDDED: bool  # whether it decodes with the parts in ``rollout.decoding``

    def check(self, config: JobConfig) -> None:
        """Raise ``UserError`` for settings of a job that the engine cannot serve, before anything is started."""

    def gpus(self, config: JobConfig) -> float:
        """Return the number of GPUs for a worker's engine: below 1 means a share like any other process's, 0 none."""

    def make(self, config: JobConfig) -> tuple[Engine, tuple[int, ...]]:
        """Start the engine; return it and the tokens that end a completion."""


ENGINES = {
    "torch": "bebop.rollout.torch_builder",
    "sglang": "bebop.rollout.sglang.builder",
    "vllm": "bebop.rollout.vllm.builder",
}


def fresh_seed() -> int:
    """Return a new seed for a server whose requests share one random generator.

    Two servers with one seed would give the n-th request of each the same random numbers. Completions of one prompt
    that are split between them would repeat each other.
    """
    return secrets.randbits(31)


def engine_module(config: JobConfig) -> EngineModule:
    """Return the module of the engine in a job's configuration."""
    return cast(EngineModule, import_module(ENGINES[config.rollout.engine]))
