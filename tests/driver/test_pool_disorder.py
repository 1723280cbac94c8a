"""Workers that answer in any order, in pieces, die anywhere, and whose reports get lost or come twice.

Whatever they do, each answer is trained on once and in order, none is of a process that was replaced before it was
told, no prompt comes before the weights that admit it, nobody owes more than its bound, no second is counted twice.
"""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.driver.loop import Loop
from bebop.driver.pool import in_flight
from bebop.driver.protocols import Assignment, DamagedWeights, PartialGroup, WorkerDied, WorkerReport
from bebop.trajectory import Completion, DecodeStats, Prompt, Trajectory
from tests.fakes import FakeSink, FakeTrainer, go, prompt

GROUPS, SIZE, STEPS = 3, 4, 5


@dataclass(kw_only=True)
class Fleet:
    """What the workers of a job have in common: chance, and who is alive."""

    chance: random.Random
    trouble: float  # chance that a call meets some
    config: JobConfig
    alive: set[int] = field(default_factory=set)  # processes
    replaced: set[int] = field(default_factory=set)
    started: int = 0
    deaths: int = 0
    told: dict[tuple[int, int], float] = field(default_factory=dict)  # process, report -> its busy seconds

    def bad(self, of: float = 1.0) -> bool:
        return self.chance.random() < self.trouble * of


class Unruly:
    """A worker with whom anything happens that the protocol allows for."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._begin()

    def _begin(self) -> None:
        self.fleet.started += 1
        self.process, self.version, self.number = self.fleet.started, -1, 0
        self.queue: list[tuple[Prompt, int]] = []
        self.reports: list[WorkerReport] = []
        self.fleet.alive.add(self.process)

    async def _reach(self) -> None:
        """A call takes a while, and may find the process dead, or end it."""
        asked = self.process
        for _ in range(self.fleet.chance.randrange(4)):
            await asyncio.sleep(0)
        assert asked == self.process, "a call that was made to a process before this one is still waited for"
        if self.fleet.bad(0.3) and self.fleet.deaths < 20:
            self.fleet.deaths += 1
            self.fleet.alive.discard(self.process)
        if self.process not in self.fleet.alive:
            raise WorkerDied("by chance")

    async def restart(self) -> None:
        self.fleet.alive.discard(self.process)
        self.fleet.replaced.add(self.process)
        await asyncio.sleep(0)
        self._begin()

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        await self._reach()
        for asked in assignments:
            due = asked.prompt.index // GROUPS - self.fleet.config.rollout.staleness
            assert self.version >= max(0, due), "a prompt came before the weights that admit it"
            self.queue += [(asked.prompt, member) for member in asked.members]
        pulled = self.fleet.config.rollout.dealing == "pull"
        assert not pulled or len(self.queue) <= in_flight(self.fleet.config), "more than its bound"

    async def set_weights(self, weights: str, version: int) -> None:
        await self._reach()
        if self.fleet.bad(0.2):
            raise DamagedWeights("by chance")
        assert weights == f"weights {version}" and version >= self.version
        self.version = version

    async def collect(self, seen: int) -> WorkerReport:
        await self._reach()
        await asyncio.sleep(0)
        if self.reports and self.fleet.bad():  # one comes again, which arrived or not
            return self.fleet.chance.choice(self.reports[-2:])
        if self.reports and self.reports[-1].number > seen:
            return self.reports[-1]
        self.reports.append(self._report())
        if self.fleet.bad():  # lost on its way
            return await self.collect(seen)
        return self.reports[-1]

    def _report(self) -> WorkerReport:
        self.fleet.chance.shuffle(self.queue)
        ended = [self.queue.pop() for _ in range(self.fleet.chance.randint(0, len(self.queue)))]
        prompts = {one.index: one for one, _ in ended}
        parts = []
        for index, asked in prompts.items():
            members = tuple(member for one, member in ended if one.index == index)
            answers = tuple(self._answer(index, member) for member in members)
            parts.append(PartialGroup(prompt=asked, members=members, trajectories=answers))
        self.number += 1
        self.fleet.told[self.process, self.number] = busy = self.fleet.chance.random()
        return WorkerReport(
            number=self.number, parts=tuple(parts), busy=busy, swap=0.0, version=self.version, head=str(self.process)
        )

    def _answer(self, index: int, member: int) -> Trajectory:
        stats = DecodeStats(cycles=1, tokens=3, target_forwards=1, draft_forwards=1, reached=np.array([1.0]))
        stats.accepted = stats.overlap = stats.draft_entropy = stats.target_only = stats.target_entropy = np.ones(1)
        versions = np.full(3, max(self.version, 0))
        ids, logprobs = np.array([index, member, self.process]), np.zeros(3, dtype=np.float32)
        answer = Completion(token_ids=ids, logprobs=logprobs, versions=versions, stats=stats)
        return Trajectory.single(completion=answer, reward=1.0)


def run(seed: int, trouble: float, staleness: int, dispatch: str, workers: int, bound: int | None) -> None:
    """A job to its end, and all that has to be true of it."""
    sections: dict[str, Any] = {
        "rollout": {"staleness": staleness, "dispatch": dispatch, "slots": 5, "in_flight": bound},
        "trainer": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "save_every": 0},
        "runtime": {"max_restarts": 100},
    }
    config = from_dict(JobConfig, sections)
    fleet = Fleet(chance=random.Random(seed), trouble=trouble, config=config)
    trainer = FakeTrainer(slow=fleet.chance.randrange(60))
    loop = Loop(config, prompt, [Unruly(fleet) for _ in range(workers)], trainer, [FakeSink()])
    counted: dict[tuple[str, int], float] = {}
    arrived, add = set(), loop.timer.add

    def count(report: WorkerReport) -> None:
        assert (report.head, report.number) not in counted, "its seconds were counted already"
        assert int(report.head) not in fleet.replaced, "of a process whose answers are being decoded again"
        counted[report.head, report.number] = report.busy
        for part in report.parts:
            arrived.update((part.prompt.index, member, int(report.head)) for member in part.members)
        add(report)

    loop.timer.add = count  # type: ignore[method-assign]
    assert go(loop, 30)
    # [step][group][member] -> (prompt, member, process)
    learned = [
        [[tuple(t.completion.token_ids) for t in g.trajectories] for g in batch.groups] for batch in trainer.seen
    ]
    found = [[[answer[:2] for answer in group] for group in step] for step in learned]
    wanted = [
        [[(index, member) for member in range(SIZE)] for index in range(step * GROUPS, (step + 1) * GROUPS)]
        for step in range(STEPS)
    ]
    assert found == wanted
    assert max(trainer.lags) <= staleness
    assert all(answer in arrived for step in learned for group in step for answer in group)
    assert all(fleet.told[int(process), number] == busy for (process, number), busy in counted.items())


@given(
    seed=st.integers(0, 2**32),
    trouble=st.sampled_from([0.0, 0.1, 0.4]),
    staleness=st.integers(0, 2),
    dispatch=st.sampled_from(["auto", "static", "pull"]),
    workers=st.integers(1, 4),
    bound=st.sampled_from([None, 1, 3, 7]),
)
# A machine may be slow, and a find belongs to the change that made it.
@settings(deadline=None, derandomize=True, max_examples=30)
def test_each_answer_counts_once_and_in_order(
    seed: int, trouble: float, staleness: int, dispatch: str, workers: int, bound: int | None
) -> None:
    run(seed, trouble, staleness, dispatch, workers, bound)


@pytest.mark.parametrize("seed", range(12))
def test_each_answer_counts_once_and_in_order_of_these(seed: int) -> None:
    """The same for some that are always tried, and that broken pools do not survive."""
    run(seed, 0.4, seed % 3, ("pull", "static")[seed % 2], 3, None if seed < 6 else 7)
