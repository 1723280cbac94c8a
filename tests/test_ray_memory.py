"""An actor that Ray ends because the machine is short of memory: a death like any other, and so replaced."""

import asyncio
import time
from collections.abc import Awaitable, Sequence
from typing import Any

import pytest

from bebop.config import JobConfig
from bebop.events import EventLog
from bebop.protocols import WorkerDied
from bebop.remote.part import ActorGroup
from bebop.remote.session import ray_session


class Sleeper:
    """A part that is at work for longer than Ray takes to look at the memory."""

    def sleep(self) -> None:
        time.sleep(60)


@pytest.mark.slow
def test_an_actor_that_is_killed_for_want_of_memory_counts_as_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray is told that one percent of the memory is too much, so it kills whoever does something."""
    monkeypatch.setenv("RAY_memory_usage_threshold", "0.01")
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "100")
    group = ActorGroup("sleeper", WorkerDied, [{}], 60.0, EventLog(None))

    async def make(actors: Sequence[Any]) -> list[Awaitable[Any]]:
        await group.ask(0, "start", actors[0].make.remote(Sleeper))
        return [actors[0].call.remote("sleep")]

    with ray_session(JobConfig(), EventLog(None)), pytest.raises(WorkerDied, match="memory"):
        asyncio.run(group.start(make))
