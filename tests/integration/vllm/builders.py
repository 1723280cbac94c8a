"""Real vLLM on a small model, with the model runner that ``BEBOP_VLLM_RUNNER`` names: v1, or v2.

They cannot be in one process: the second takes Triton's interpreter, which vLLM looks for as it is imported. Since its
kernels are interpreted, it decodes some 40 tokens a second, and its tests take ``fewer`` of them.
"""

import dataclasses
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event
from typing import Any, TypeVar

from bebop.config.engines import VllmConfig
from bebop.config.job import JobConfig
from bebop.rollout.served_engine import OutputChunk, ServedEngine
from bebop.rollout.vllm.builder import make
from bebop.rollout.vllm.core import Core
from bebop.rollout.vllm.engine import VllmServer

Number = TypeVar("Number", int, float)
SLOTS = 256
RUNNER = os.environ.get("BEBOP_VLLM_RUNNER", "v1")


def fewer(many: Number, few: Number) -> Number:
    """Tokens, completions or rounds of a test with the first runner, and with the second."""
    return many if RUNNER == "v1" else few


def with_vllm(config: JobConfig, on_update: str = "keep", **own: Any) -> JobConfig:
    settings = VllmConfig(**{"monitor_every": 1, "model_runner": RUNNER, **own})
    rollout = dataclasses.replace(
        config.rollout, engine="vllm", vllm=settings, slots=SLOTS, on_update=on_update
    )  # fmt: skip
    return dataclasses.replace(config, rollout=rollout)


@contextmanager
def engine(config: JobConfig, on_update: str = "keep", **own: Any) -> Iterator[ServedEngine]:
    """A real vLLM, always ended."""
    found, _ = make(with_vllm(config, on_update, **own))
    try:
        yield found
    finally:
        found.close()


def core(engine: ServedEngine) -> Core:
    """What touches vLLM; its thread rests while no request is open."""
    assert isinstance(engine.server, VllmServer)
    return engine.server.core


def with_update(engine: ServedEngine, recompute: bool) -> None:
    """What becomes of running answers while weights change, on an engine that is there."""
    assert isinstance(engine.server, VllmServer)
    engine.server.recompute = recompute


@contextmanager
def held(engine: ServedEngine, tokens: int) -> Iterator[None]:
    """Once an answer has so many tokens, or more, nothing is decoded until the block ends."""
    one, reached = core(engine), Event()
    step = one.step

    def hold() -> list[tuple[str, OutputChunk]]:
        longest = max((len(answer.token_ids) for answer in one._open.values()), default=0)
        if longest < tokens and not reached.is_set():
            return step()
        reached.set()
        time.sleep(0.005)
        return []

    one.step = hold  # type: ignore[method-assign]
    try:
        assert reached.wait(60)
        yield
    finally:
        one.step = step  # type: ignore[method-assign]


def verification() -> Any:
    """The module whose ``rejection_sample`` the runner calls."""
    if RUNNER == "v2":
        from vllm.v1.worker.gpu.spec_decode import rejection_sampler as second

        return second
    from vllm.v1.sample import rejection_sampler as first

    return first
