"""Members of groups whose environments were lost: counted, never rows with a reward of 0; groups passed over."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest

from bebop.config.job import JobConfig
from bebop.driver.loop import Loop
from bebop.driver.protocols import PartialGroup, WorkerReport
from bebop.errors import UserError
from tests.fakes import GROUPS, SIZE, FakeSink, FakeTrainer, FakeWorker, go, job, prompt


@dataclass(kw_only=True)
class LosingWorker(FakeWorker):
    """Loses the members listed in ``lost``; its environments begin with token ``first``."""

    lost: frozenset[tuple[int, int]] = frozenset()
    first: int = 5
    rewards: dict[int, Sequence[float]] = field(default_factory=dict)  # of the members of a prompt

    async def collect(self, seen: int) -> WorkerReport:
        report = await super().collect(seen)
        return replace(report, parts=tuple(self._played(part) for part in report.parts))

    def _played(self, part: PartialGroup) -> PartialGroup:
        index = part.prompt.index
        given = self.rewards.get(index, (0.0, 1.0))
        trajectories = tuple(
            None if (index, member) in self.lost or t is None else replace(t, reward=given[member])
            for member, t in zip(part.members, part.trajectories, strict=True)
        )
        begun = any(t is not None for t in trajectories)
        asked = replace(part.prompt, token_ids=(self.first, index) if begun else ())
        return PartialGroup(prompt=asked, members=part.members, trajectories=trajectories)


def play(config: JobConfig, *workers: FakeWorker) -> tuple[FakeTrainer, FakeSink]:
    trainer, sink = FakeTrainer(), FakeSink()
    assert go(Loop(config, lambda i: replace(prompt(i), token_ids=()), workers, trainer, [sink]))
    return trainer, sink


def test_a_lost_member_is_counted_and_trained_on_nowhere() -> None:
    lost = frozenset({(1, 0), (4, 1), (5, 0), (5, 1)})
    trainer, sink = play(job(steps=3), LosingWorker(lost=lost), LosingWorker(lost=lost))
    groups = {g.prompt.index: g for batch in trainer.seen for g in batch.groups}
    assert sorted(groups) == list(range(3 * GROUPS))  # no prompt is lost
    for index, group in groups.items():
        gone = sum((index, member) in lost for member in range(SIZE))
        assert (group.lost, len(group.trajectories)) == (gone, SIZE - gone)
        assert group.prompt.token_ids == ((5, index) if group.trajectories else ())
        assert [t.reward for t in group.trajectories] == [float(m) for m in range(SIZE) if (index, m) not in lost]
    assert sink.rows[-1][1]["samples/trained"] == 3 * GROUPS * SIZE


def test_a_step_without_any_trajectory_ends_the_job() -> None:
    everything = frozenset((index, member) for index in range(100) for member in range(SIZE))
    with pytest.raises(UserError, match=rf"^environment .*: all {GROUPS * SIZE} trajectories of a step were lost$"):
        play(job(steps=2), LosingWorker(lost=everything))


def test_members_that_begin_differently_are_refused() -> None:
    """The group of prompt 0 is split between workers whose environments are not the same."""
    config = job(steps=2, rollout={"in_flight": 1, "slots": 1})
    with pytest.raises(UserError, match=r"group of prompt \d+ begin differently \(token 0: 5 and 6\)"):
        play(config, LosingWorker(first=5), LosingWorker(first=6))


def test_groups_without_spread_are_replaced_by_the_next_in_order() -> None:
    flat = {1: (1.0, 1.0), 2: (0.0, 0.0), 7: (0.5, 0.5)}
    config = job(steps=3, algorithm={"dynamic_sampling": True}, monitor={"certify_every": 0})
    trainer, sink = play(config, LosingWorker(rewards=flat), LosingWorker(rewards=flat))
    assert trainer.batches == [[0, 3, 4], [5, 6, 8], [9, 10, 11]]
    assert [row["rollout/filtered_groups"] for _, row in sink.rows] == [2.0, 1.0, 0.0]
    assert max(trainer.lags) <= 1


def test_without_it_they_are_trained_on() -> None:
    trainer, sink = play(job(steps=2), LosingWorker(rewards={1: (1.0, 1.0)}))
    assert trainer.batches == [[0, 1, 2], [3, 4, 5]] and "rollout/filtered_groups" not in sink.rows[0][1]
