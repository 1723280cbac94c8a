"""What stands in for workers, trainer and sink at the loop's seams, and a loop over them."""

import asyncio
import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.driver.loop import Loop
from bebop.driver.protocols import Assignment, PartialGroup, WorkerDied, WorkerReport
from bebop.metrics.metrics import Mean, Metrics
from bebop.monitor.certified import Certified
from bebop.trajectory import Batch, Completion, DecodeStats, Group, Prompt, Trajectory
from bebop.trajectory_db.writer import TrajectoryLog
from tests.builders import oldest_version

GROUPS, SIZE = 3, 2


@dataclass(kw_only=True)
class FakeWorker:
    """Answers prompts, newest first, with the weights it has. Dies at the calls listed in ``deaths``."""

    deaths: set[tuple[str, int]] = field(default_factory=set)  # (method, which call of it, from 1)
    raises: dict[int, Exception] = field(default_factory=dict)  # which collect raises what
    stuck: bool = False  # never finishes anything
    version: int = -1
    queue: list[Assignment] = field(default_factory=list)
    submitted: list[tuple[int, int]] = field(default_factory=list)  # (weight version, prompt) as queued
    asked: list[tuple[int, int]] = field(default_factory=list)  # (prompt, member)
    weights: list[tuple[str, int]] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    reports: int = 0
    alive: bool = True
    starting: bool = False

    def _call(self, method: str) -> None:
        assert not self.starting, f"{method} on a worker that is not there yet"
        self.calls[method] += 1
        if (method, self.calls[method]) in self.deaths:
            self.alive = False
        if not self.alive:
            raise WorkerDied(f"in {method}")

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        await asyncio.sleep(0)
        self._call("submit")
        self.queue += assignments
        self.submitted += [(self.version, a.prompt.index) for a in assignments]
        self.asked += [(a.prompt.index, member) for a in assignments for member in a.members]

    async def collect(self, seen: int) -> WorkerReport:
        for _ in range(5):
            await asyncio.sleep(0)
        self._call("collect")
        if self.calls["collect"] in self.raises:
            raise self.raises[self.calls["collect"]]
        assert seen == self.reports, "no report gets lost here"
        self.reports += 1
        if not self.queue or self.stuck:
            return self._report((), 0.0)
        return self._report((self.part(self.queue.pop()),), 0.01)

    def part(self, assignment: Assignment) -> PartialGroup:
        return part(assignment, self.version)

    def _report(self, parts: tuple[PartialGroup, ...], busy: float) -> WorkerReport:
        return WorkerReport(number=self.reports, parts=parts, busy=busy, swap=busy / 10, version=self.version, head="")

    async def set_weights(self, weights: Any, version: int) -> None:
        await asyncio.sleep(0)
        self._call("set_weights")
        self.weights.append((weights, version))
        self.version = version

    async def restart(self) -> None:
        self.starting = True
        for _ in range(20):
            await asyncio.sleep(0)
        self.starting, self.alive, self.queue, self.version = False, True, [], -1
        self.reports = 0


def part(assignment: Assignment, version: int) -> PartialGroup:
    """What becomes of an assignment."""
    group = answer(assignment.prompt, version)
    trajectories = tuple(group.trajectories[member] for member in assignment.members)
    return PartialGroup(prompt=assignment.prompt, members=assignment.members, trajectories=trajectories)


def answer(prompt: Prompt, version: int) -> Group:
    """A group that depends on the prompt alone."""
    ones = np.ones(2)
    stats = DecodeStats(cycles=2, tokens=3, target_forwards=2, draft_forwards=2, reached=np.array([2.0, 1.0]))
    stats.accepted, stats.overlap, stats.draft_entropy = ones * 1.0, ones * 0.9, ones * 0.5
    stats.target_only, stats.target_entropy = ones * 0.5, ones * 0.5
    completion = Completion(
        token_ids=np.array([prompt.index, 1, 2]),
        logprobs=np.zeros(3, dtype=np.float32),
        versions=np.full(3, version),
        stats=stats,
    )
    return Group(prompt=prompt, trajectories=(Trajectory.single(completion=completion, reward=1.0),) * SIZE)


@dataclass(kw_only=True)
class FakeTrainer:
    """Counts updates; keeps batches and checkpoints."""

    version: int = 0
    seen: list[Batch] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    lags: list[int] = field(default_factory=list)
    saved: dict[int, dict[str, Any]] = field(default_factory=dict)
    slow: int = 0  # turns of the event loop that an update takes
    fetch: int = 7  # and that getting at the weights takes
    endless: int = -1  # the version whose update ends when it is abandoned
    abandoned: asyncio.Event = field(default_factory=asyncio.Event)

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        for _ in range(self.slow):
            await asyncio.sleep(0)
        if self.version == self.endless:
            await self.abandoned.wait()
            return {}, self.version
        self.seen.append(batch)
        self.batches.append([g.prompt.index for g in batch.groups])
        self.lags += [self.version - oldest_version(g) for g in batch.groups if g.trajectories]
        self.version += 1
        learned: Metrics = {"policy/entropy": Mean(1.0, 1), "train/kl": Mean(2.0, 4)}
        return learned, self.version

    async def abandon(self) -> None:
        self.abandoned.set()

    async def logprobs(self) -> Mapping[int, NDArray[np.float32]]:
        return {0: np.full(3, -self.version, dtype=np.float32)}  # after the update

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        return None

    async def weights(self, head: bool) -> str:
        version = self.version
        for _ in range(self.fetch):
            await asyncio.sleep(0)
        return f"weights {version}"

    async def save(self, step: int, loop_state: dict[str, Any], best: int | None = None) -> None:
        assert step == self.version and step not in self.saved, "a step is saved once"
        self.saved[step] = copy.deepcopy(loop_state)


@dataclass(kw_only=True)
class FakeSink:
    rows: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, values))

    def close(self) -> None:
        pass


def prompt(index: int) -> Prompt:
    return Prompt(index=index, task="test", text=str(index), token_ids=(index,), item={})


def job(
    steps: int = 5, staleness: int = 1, save_every: int = 0, max_restarts: int = 3, **sections: dict[str, Any]
) -> JobConfig:
    trainer = {"steps": steps, "groups_per_step": GROUPS, "group_size": SIZE, "save_every": save_every}
    rollout = {"staleness": staleness, **sections.pop("rollout", {})}
    whole = {"rollout": rollout, "trainer": trainer, "runtime": {"max_restarts": max_restarts}, **sections}
    return from_dict(JobConfig, whole)


def make(
    config: JobConfig, *workers: FakeWorker, kept: TrajectoryLog | None = None, **trainer: Any
) -> tuple[Loop, FakeTrainer, FakeSink]:
    taught, sink = FakeTrainer(**trainer), FakeSink()
    return Loop(config, prompt, workers, taught, [sink], trajectories=kept), taught, sink


def go(loop: Loop, seconds: float = 10) -> bool:
    return asyncio.run(asyncio.wait_for(loop.run(), seconds))


def in_order(steps: int, first: int = 0) -> list[list[int]]:
    return [list(range(j * GROUPS, (j + 1) * GROUPS)) for j in range(first, steps)]
