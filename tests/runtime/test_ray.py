"""Ray that does not come up is tried again, ranks meet, and an actor that Ray ends to free memory counts as dead."""

import asyncio
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.driver.protocols import WorkerDied
from bebop.errors import UserError
from bebop.runtime import session
from bebop.runtime.actor_group import ActorGroup
from bebop.runtime.actors import RayTrainer, make_rank
from bebop.runtime.events import EventLog
from bebop.runtime.session import ray_session


@pytest.mark.parametrize("failures", [0, 1, session.STARTS - 1, session.STARTS])
def test_a_start_that_fails_is_tried_again(failures: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ports: list[int] = []
    given = iter([40001] * 3 + [40002, 40003] * 2 + [40004, 40005, 40006])  # as the system may, the same one again

    def init(_metrics_export_port: int, **_: Any) -> None:
        ports.extend((int(session.os.environ["RAY_GCS_SERVER_PORT"]), _metrics_export_port))
        if len(ports) <= 2 * failures:
            raise Exception("The current node timed out during startup.\nmore")

    monkeypatch.setattr(session, "_some_port", lambda: next(given))
    monkeypatch.setattr(session.ray, "init", init)
    monkeypatch.setenv("RAY_GCS_SERVER_PORT", "0")
    if failures < session.STARTS:
        session._start_ray(JobConfig(), tmp_path, "BEBOP_SESSION=nobody")
    else:
        with pytest.raises(UserError, match=r"^Ray did not start: .* timed out during startup\. \(3 times\)$"):
            session._start_ray(JobConfig(), tmp_path, "BEBOP_SESSION=nobody")
    assert ports == [40001, 40002, 40003, 40004, 40005, 40006][: 2 * min(failures + 1, session.STARTS)]


class Remote:
    """An actor of which each call is awaited at once: ``actor.method.remote(...)``."""

    def __init__(self, number: int) -> None:
        self.number, self.given = number, list[Any]()

    def __getattr__(self, method: str) -> Any:
        async def call(*arguments: Any) -> str:
            self.given += [(method, arguments)]
            return f"file:///made-by-{self.number}"

        return SimpleNamespace(remote=call)


async def test_the_first_rank_makes_the_file_by_which_ranks_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may be on another machine."""
    actors = [Remote(number) for number in range(3)]

    async def start(make: Any) -> None:
        await asyncio.gather(*await make(actors))

    async def ask(number: int, kind: str, result: Awaitable[Any]) -> Any:
        assert (number, kind) == (0, "start")
        return await result

    monkeypatch.setenv("TMPDIR", str(tmp_path))
    trainer = RayTrainer(config := JobConfig(), tmp_path, [{}] * 3)
    monkeypatch.setattr(trainer.group, "start", start)
    monkeypatch.setattr(trainer.group, "ask", ask)
    await trainer.restart()
    assert [actor.given.pop() for actor in actors] == [
        ("make", (make_rank, config, rank, 3, "file:///made-by-0")) for rank in range(3)
    ]
    assert [actor.given for actor in actors] == [[("meeting", ())], [], []] and not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_the_file_by_which_ranks_meet_has_no_name_and_ends_with_its_process() -> None:
    code = "from bebop.runtime.actor_group import _Process\n"
    code += "print((made := _Process('Trainer(0)', 'BEBOP_PART=0')).meeting(), flush=True); input()\n"
    first = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    file = Path(first.stdout.readline().strip().removeprefix("file://"))
    assert str(file.readlink()).endswith(" (deleted)") and str(first.pid) in file.parts
    one, other = dist.FileStore(str(file), 2), dist.FileStore(str(file), 2)
    one.set("rank 0", "is here")
    assert other.get("rank 0") == b"is here"
    first.kill()
    first.communicate()
    assert not file.exists()


class Idle:
    """A part that does nothing."""


@pytest.mark.slow
def test_the_dashboard_shows_parts_by_their_names_to_who_has_the_token(tmp_path: Path) -> None:
    config = from_dict(JobConfig, {"runtime": {"dashboard": True, "dashboard_port": session.free_port()}})
    workers = [ActorGroup(f"rollout worker {i}", WorkerDied, [{"num_cpus": 0}], 60.0, EventLog(None)) for i in (0, 1)]

    async def make(actors: Sequence[Any]) -> list[Awaitable[Any]]:
        return [actor.make.remote(Idle) for actor in actors]

    async def start() -> None:
        await asyncio.gather(*(worker.start(make) for worker in workers))

    def get(path: str, token: str) -> Any:
        request = urllib.request.Request(f"{dashboard.url}{path}", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request, timeout=30) as reply:
            return json.loads(reply.read())

    with ray_session(config, EventLog(None)) as running:
        asyncio.run(start())
        dashboard = running.dashboard
        assert dashboard is not None and dashboard.url.endswith(f":{config.runtime.dashboard_port}")
        ray = [sys.executable, "-m", "ray.scripts.scripts", "get-auth-token"]
        token = subprocess.run(ray, capture_output=True, text=True, check=True).stdout.strip()
        listed = get("/api/v0/actors?detail=1", token)["data"]["result"]["result"]
        assert {(one["class_name"], one["repr_name"]) for one in listed if one["state"] == "ALIVE"} == {
            ("RolloutWorker", "RolloutWorker(0)"),
            ("RolloutWorker", "RolloutWorker(1)"),
        }
        if dashboard.token:
            with pytest.raises(urllib.error.HTTPError, match=r"40[13]"):
                get("/api/v0/actors", "wrong")
        for worker in workers:
            worker.close()


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
