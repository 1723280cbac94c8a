"""The loop asks for the certificate of answers that nobody chose: not around deaths of workers, nor after a resume."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from bebop.driver.loop import Loop
from bebop.driver.pool import WorkerChannel
from bebop.driver.protocols import WorkerDied
from bebop.monitor.certified import Certified
from bebop.trajectory import Group
from tests.fakes import GROUPS, SIZE, FakeSink, FakeTrainer, FakeWorker, go, job, prompt


@dataclass(kw_only=True)
class Certifying(FakeTrainer):
    """Notes the versions at which it was asked, and of which prompts."""

    asked: dict[int, list[int]] = field(default_factory=dict)

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        assert since == 1 and all(len(group.trajectories) == min(2, SIZE) for group in groups)
        self.asked[self.version] = [group.prompt.index for group in groups]
        return Certified(tokens=self.version + 1, log_e=0.5, highest=0.5, limit=9.2, tv=0.5)


def make(staleness: int, *workers: FakeWorker, steps: int = 8, version: int = 0) -> tuple[Loop, Certifying, FakeSink]:
    trainer, sink = Certifying(version=version, slow=50), FakeSink()
    loop = Loop(job(steps, staleness, monitor={"certify_every": 1}), prompt, workers, trainer, [sink])
    return loop, trainer, sink


@pytest.mark.parametrize("staleness", [0, 2])
def test_each_batch_is_looked_at_before_the_update_on_it(staleness: int) -> None:
    loop, trainer, sink = make(staleness, FakeWorker(), FakeWorker())
    assert go(loop)
    assert trainer.asked == {v: list(range(v * GROUPS, (v + 1) * GROUPS)) for v in range(8)}
    assert [row["certify/tokens"] for _, row in sink.rows] == list(range(1, 9))


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("death", [("collect", 4), ("set_weights", 4)])
def test_prompts_that_were_out_when_a_worker_died_are_not(staleness: int, death: tuple[str, int]) -> None:
    loop, trainer, _ = make(staleness, FakeWorker(deaths={death}), FakeWorker(), steps=10)
    lost, seen = loop.pool._lose, []

    def lose(channel: WorkerChannel, died: WorkerDied) -> None:
        seen.append((set(range(trainer.version, 10)) - set(trainer.asked), loop.buffer.admitted))
        lost(channel, died)

    loop.pool._lose = lose  # type: ignore[method-assign]
    assert go(loop)
    [(coming, admitted)] = seen
    skipped = set(range(10)) - set(trainer.asked)
    assert skipped == {v for v in coming if v * GROUPS < admitted}
    # A worker that dies while it takes in the weights of a synchronous step has been asked for nothing yet.
    assert bool(skipped) == (staleness > 0 or death[0] == "collect")


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_nor_those_that_were_out_when_the_checkpoint_was_written(staleness: int) -> None:
    first, before, _ = make(staleness, FakeWorker(), steps=3)
    assert go(first)
    assert first.buffer.admitted == (3 + staleness) * GROUPS
    second, after, _ = make(staleness, FakeWorker(), version=3)
    second.restore(before.saved[3])
    assert go(second)
    assert sorted(after.asked) == list(range(3 + staleness, 8))
