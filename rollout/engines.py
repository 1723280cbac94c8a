"""The engines, by the names of ``rollout.engine``: a module each, imported when it is chosen."""

from importlib import import_module
from typing import Protocol, cast

from bebop.config.job import JobConfig
from bebop.rollout.engine import Engine


class EngineModule(Protocol):
    """What an engine's module offers. What it needs beyond Bebop's own dependencies it imports in ``make``."""

    EMBEDDED: bool  # whether it decodes with the parts in ``rollout.decoding``

    def check(self, config: JobConfig) -> None:
        """Raise ``UserError`` for what it cannot do for a job, before anything is started."""

    def gpus(self, config: JobConfig) -> float:
        """Return the GPUs that a worker's engine takes: below 1 means a share like any other process's, 0 none."""

    def make(self, config: JobConfig) -> tuple[Engine, tuple[int, ...]]:
        """Start the engine; return it and the tokens that end a completion."""


ENGINES = {
    "torch": "bebop.rollout.torch_builder",
    "sglang": "bebop.rollout.sglang.builder",
    "vllm": "bebop.rollout.vllm.builder",
}


def engine_module(config: JobConfig) -> EngineModule:
    """Return the module of the engine that a job asks for."""
    return cast(EngineModule, import_module(ENGINES[config.rollout.engine]))
