"""Workers that die: replaced, given their weights and their prompts again, and not for ever."""

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

from bebop.driver.protocols import WorkerReport
from bebop.errors import UserError
from tests.fakes import GROUPS, SIZE, FakeWorker, go, in_order, job, make

DEATHS = [{("collect", 2)}, {("collect", 1)}, {("submit", 1)}, {("submit", 3)}, {("set_weights", 1)}]
DEATHS += [{("set_weights", 3)}, {("collect", 3), ("submit", 4)}]


@pytest.mark.parametrize("deaths", DEATHS)
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_dead_worker_is_replaced_and_no_prompt_is_lost(deaths: set[tuple[str, int]], staleness: int) -> None:
    victim, other = FakeWorker(deaths=deaths), FakeWorker()
    loop, trainer, sink = make(job(steps=6, staleness=staleness), victim, other)
    assert go(loop)
    assert trainer.batches == in_order(6)
    assert max(trainer.lags) <= staleness
    assert loop.pool.restarts == len(deaths) == sink.rows[-1][1]["rollout/restarts"]
    times = Counter(victim.asked + other.asked)
    assert times.keys() >= {(index, member) for index in range(6 * GROUPS) for member in range(SIZE)}
    assert max(times.values()) <= len(deaths) + 1  # once more for each death at most
    assert set(Counter(other.asked).values()) == {1}
    assert all(weights == f"weights {version}" for weights, version in victim.weights)


def test_prompts_of_a_dead_worker_are_submitted_again_once() -> None:
    """Three prompts go out, prompt 2 comes back, then the worker dies: the other two start again."""
    worker = FakeWorker(deaths={("collect", 4)})
    loop, trainer, _ = make(job(steps=1, staleness=0), worker)
    assert go(loop)
    assert worker.submitted == [(0, 0), (0, 1), (0, 2), (0, 0), (0, 1)]
    assert trainer.batches == [[0, 1, 2]]


def test_a_replacement_that_dies_while_it_starts_is_replaced_too() -> None:
    worker = FakeWorker(deaths={("collect", 2), ("set_weights", 2), ("submit", 2)})
    loop, trainer, _ = make(job(steps=3), worker)
    assert go(loop)
    assert trainer.batches == in_order(3) and loop.pool.restarts == 3


def test_a_replacement_during_an_update_keeps_old_weights_under_their_own_version() -> None:
    """Dies while new weights are being fetched: what it is given meanwhile must not carry the new number."""
    for call in range(2, 60):
        worker = FakeWorker(deaths={("collect", call)})
        loop, trainer, _ = make(job(steps=4, staleness=2), worker, slow=3, fetch=60)
        assert go(loop)
        assert all(weights == f"weights {version}" for weights, version in worker.weights), call
        assert trainer.batches == in_order(4)


def test_too_many_deaths_end_the_job_with_a_checkpoint() -> None:
    worker = FakeWorker(deaths={("collect", n) for n in range(8, 40)})
    loop, trainer, _ = make(job(steps=20, max_restarts=2), worker)
    with pytest.raises(UserError, match="died 3 times, the last time: in collect"):
        go(loop)
    assert trainer.version == 2 and list(trainer.saved) == [2]
    # Whoever resumes has the whole allowance again.
    again, taught, _ = make(job(steps=20, max_restarts=2), FakeWorker(deaths={("collect", 3)}), version=2)
    again.restore(trainer.saved[2])
    assert go(again) and trainer.batches + taught.batches == in_order(20)


@pytest.mark.parametrize("most", [0, 2])
def test_too_many_deaths_while_weights_are_sent_end_a_synchronous_job(most: int) -> None:
    """It waits until every worker has them, and this one never will."""
    worker = FakeWorker(deaths={("set_weights", n) for n in range(3, 40)})
    loop, trainer, _ = make(job(steps=20, max_restarts=most, staleness=0), worker)
    with pytest.raises(UserError, match=f"died {most + 1} times, the last time: in set_weights"):
        go(loop)
    assert trainer.version == 2 and list(trainer.saved) == [2]


def test_a_failure_while_weights_are_sent_ends_a_synchronous_job() -> None:
    @dataclass(kw_only=True)
    class Failing(FakeWorker):
        """Takes weights twice."""

        async def set_weights(self, weights: Any, version: int) -> None:
            if version == 2:
                raise RuntimeError("nobody expects this")
            await super().set_weights(weights, version)

    loop, trainer, _ = make(job(steps=20, staleness=0), Failing(), FakeWorker())
    with pytest.raises(RuntimeError, match="nobody expects this"):
        go(loop)
    assert list(trainer.saved) == [2]


def test_a_request_that_a_server_lost_disturbs_the_prompts_in_flight() -> None:
    @dataclass(kw_only=True)
    class Redrawing(FakeWorker):
        """Has drawn a completion again by its third report."""

        async def collect(self, seen: int) -> WorkerReport:
            return replace(await super().collect(seen), redrawn=int(self.reports >= 3))

    loop, _, _ = make(job(steps=5), Redrawing())
    assert go(loop) and loop.pool.disturbed == 2 * GROUPS < loop.buffer.admitted


def test_a_report_that_is_told_twice_counts_once() -> None:
    @dataclass(kw_only=True)
    class Doubling(FakeWorker):
        """Tells every other report again."""

        last: WorkerReport | None = None

        async def collect(self, seen: int) -> WorkerReport:
            if self.last is not None and seen % 2:
                again, self.last = self.last, None
                return again
            self.last = await super().collect(seen)
            return self.last

    worker = Doubling()
    loop, trainer, _ = make(job(steps=5), worker)
    assert go(loop) and trainer.batches == in_order(5)
