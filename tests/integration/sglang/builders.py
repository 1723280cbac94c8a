"""Real SGLang on a small model."""

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bebop.config.engines import SglangConfig
from bebop.config.job import JobConfig
from bebop.rollout.engine import Request
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.sglang.builder import make
from bebop.rollout.sglang.engine import SglangServer


def with_sglang(config: JobConfig, **own: Any) -> JobConfig:
    settings = SglangConfig(**{"monitor_every": 1, "cache_tokens": 8192, **own})
    return dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, engine="sglang", sglang=settings))


@contextmanager
def engine(config: JobConfig, **own: Any) -> Iterator[ServedEngine]:
    """A real SGLang, always shut down."""
    found, _ = make(with_sglang(config, **own))
    try:
        yield found
    finally:
        found.close()


def raw(engine: ServedEngine, request: Request) -> dict[str, Any]:
    """SGLang's own output for a request."""
    server = engine.server
    assert isinstance(server, SglangServer)
    return engine.run(server.backend.generate(server.payload(request, ())))


def with_pause(engine: ServedEngine, pause: str) -> None:
    """Another pause mode, on an engine that is there."""
    server = engine.server
    assert isinstance(server, SglangServer)
    server.own = dataclasses.replace(server.own, pause=pause)  # type: ignore[arg-type]
