"""The loop asks for the certificate of answers that nobody chose: not around deaths of workers, nor after a resume."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from bebop.driver.evaluation import Evaluation
from bebop.driver.loop import Loop
from bebop.driver.pool import WorkerChannel
from bebop.driver.protocols import WorkerDied
from bebop.monitor.certified import Certified
from bebop.trajectory import Group
from tests.driver.test_evaluation import Answering, Asked
from tests.fakes import GROUPS, SIZE, FakeSink, FakeTrainer, FakeWorker, go, job, prompt


@dataclass(kw_only=True)
class Certifying(FakeTrainer):
    """Notes the versions at which it was asked, and of which prompts."""

    asked: dict[int, list[int]] = field(default_factory=dict)

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        assert since == 1 and all(len(group.trajectories) == min(2, SIZE) for group in groups)
        self.asked[self.version] = [group.prompt.index for group in groups]
        return Certified(tokens=self.version + 1, log_e=0.5, highest=0.5, limit=9.2, tv=0.5)


def make(
    staleness: int, *workers: FakeWorker, steps: int = 8, version: int = 0, endless: int = -1, **other: Any
) -> tuple[Loop, Certifying, FakeSink]:
    trainer, sink = Certifying(version=version, slow=50, endless=endless), FakeSink()
    config = job(steps, staleness, monitor={"certify_every": 1}, **other)
    evaluation = Evaluation(config, Asked()) if config.evaluation.every else None
    loop = Loop(config, prompt, workers, trainer, [sink], evaluation=evaluation)
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
    older = {name: value for name, value in before.saved[3].items() if name != "disturbed"}  # of an older version
    for state in (before.saved[3], older):
        second, after, _ = make(staleness, FakeWorker(), version=3)
        second.restore(state)
        assert go(second)
        assert sorted(after.asked) == list(range(3 + staleness, 8))


def stopped(loop: Loop, ready: Callable[[], bool]) -> None:
    """Run a loop and stop it once it is ``ready`` and has come to rest."""

    async def stop_midway() -> bool:
        running = asyncio.create_task(loop.run())
        while not ready():
            await asyncio.sleep(0)
        await asyncio.sleep(0.05)
        assert not running.done()
        loop.stopping.set()
        return await asyncio.wait_for(running, 5)

    assert asyncio.run(stop_midway()) is False


def resumed(before: Certifying, staleness: int, version: int, **other: Any) -> Certifying:
    """Go on from the checkpoint of a version to the end."""
    loop, after, _ = make(staleness, Answering(), version=version, **other)
    loop.restore(before.saved[version])
    assert go(loop)
    return after


@pytest.mark.parametrize("staleness", [0, 1])
def test_nor_those_that_were_out_when_it_was_stopped_while_it_waited(staleness: int) -> None:
    """Short completions of the next prompts had ended, and were kept."""
    worker = FakeWorker()
    loop, before, _ = make(staleness, worker)

    def ready() -> bool:
        worker.stuck = before.version >= 3
        return worker.stuck and loop.buffer.admitted == (before.version + 1 + staleness) * GROUPS

    stopped(loop, ready)
    [version] = before.saved  # of staleness 1: 4 if the next batch was there before the worker was stuck
    assert version <= 3 + staleness and sorted(before.asked) == list(range(version))
    assert sorted(resumed(before, staleness, version).asked) == list(range(version + 1 + staleness, 8))


@pytest.mark.parametrize("staleness", [0, 1])
def test_no_batch_counts_twice_where_its_update_was_dropped(staleness: int) -> None:
    loop, before, _ = make(staleness, FakeWorker(), endless=3)
    stopped(loop, lambda: 3 in before.asked)
    assert sorted(before.asked) == [0, 1, 2, 3] and list(before.saved) == [3]
    assert sorted(resumed(before, staleness, 3).asked) == list(range(4 + staleness, 8))


EVERY = {"every": 3, "samples": 1, "size": 4}


@pytest.mark.parametrize("staleness", [0, 1])
def test_nor_those_that_went_out_beside_an_evaluation_before_the_checkpoint(staleness: int) -> None:
    first, before, _ = make(staleness, Answering(), save_every=3, evaluation=EVERY)
    assert go(first)
    asked = resumed(before, staleness, 3, evaluation=EVERY).asked
    assert sorted(asked) == list(range(5 if staleness else 3, 8))


def test_nor_those_of_an_earlier_stop_where_a_checkpoint_followed_before_they_went_out_again() -> None:
    """The evaluation of the last step was made up for, and the job got more steps later."""
    worker = Answering()
    loop, before, _ = make(1, worker, steps=3, evaluation=EVERY)

    def ready() -> bool:
        worker.stuck = before.version == 3
        return (3, -1) in worker.held

    stopped(loop, ready)
    between = resumed(before, 1, 3, steps=3, evaluation=EVERY)
    assert between.asked == {} and list(between.saved) == [3]
    assert sorted(resumed(between, 1, 3, evaluation=EVERY).asked) == list(range(4, 8))
