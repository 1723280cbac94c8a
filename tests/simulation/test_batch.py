"""Virtual time, and a batch in it, against what stepping through every cycle gives."""

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.simulation.parts import Ended, SimulatedBatch, versions
from bebop.simulation.run import Deadlock, VirtualTimeLoop, run_virtually

Call = tuple[float, int, int]  # seconds, cycles of an answer, or 0: new weights; number
PREFILL, LOAD = 0.5, 0.25


def cycle(rows: int) -> float:
    """Exact in binary, so that boundaries are where they should be."""
    return 1.0 + 0.125 * rows


def stepped(calls: list[Call], slots: int) -> list[tuple[int, float, list[int]]]:
    """Every cycle by itself: (number, seconds, version of each cycle) of each answer, in the order of their ends."""
    pending, waiting, rows = sorted(calls), [], []
    now, version, ended = 0.0, 0, []
    while pending or waiting or rows:
        if not waiting and not rows:
            now = max(now, pending[0][0])
        boundary = now
        while pending and pending[0][0] <= boundary:
            _, count, number = pending.pop(0)
            if count:
                waiting.append((number, count))
            else:
                now, version = now + LOAD, number
        while waiting and len(rows) < slots:
            number, count = waiting.pop(0)
            rows.append([number, count, []])
            now += PREFILL
        if not rows:
            continue
        now += cycle(len(rows))
        for row in rows:
            row[1] -= 1
            row[2].append(version)
        ended += [(row[0], now, row[2]) for row in rows if not row[1]]
        rows = [row for row in rows if row[1]]
    return ended


def jumped(calls: list[Call], slots: int, batch: Callable[..., SimulatedBatch] = SimulatedBatch) -> list[Ended]:
    """The same by events: each call is made at its time, and time is looked at whenever something may have changed."""
    one, ended = batch(slots, cycle, PREFILL), []
    for at, count, number in sorted(calls):
        while (change := one.next_change()) is not None and change < at:
            ended += one.advance(change)
        if count:
            one.add(number, count, at)
        else:
            one.load(number, LOAD, at)
    while (change := one.next_change()) is not None:
        ended += one.advance(change)
    return ended


def told(ended: list[Ended]) -> list[tuple[int, float, list[int]]]:
    return [(e.key, e.at, [v for count, v in e.spans for _ in range(count)]) for e in ended]


CALLS = st.lists(st.tuples(st.integers(0, 200).map(lambda n: n / 8), st.integers(0, 9)), min_size=1, max_size=20)


def numbered(calls: list[tuple[float, int]]) -> list[Call]:
    return [(at, count, number) for number, (at, count) in enumerate(sorted(calls), 1)]


@given(calls=CALLS, slots=st.integers(1, 5))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_events_give_what_every_single_cycle_gives(calls: list[tuple[float, int]], slots: int) -> None:
    assert sorted(told(jumped(numbered(calls), slots))) == sorted(stepped(numbered(calls), slots))


def test_a_batch_that_takes_calls_in_at_once_is_caught() -> None:
    class Impatient(SimulatedBatch):
        """Broken: a row comes in while a cycle runs."""

        def _take_in(self) -> None:
            self._began = False
            super()._take_in()

        def add(self, key: int, cycles: int, now: float) -> None:
            super().add(key, cycles, min(now, self.at))

    calls = numbered([(0.0, 4), (1.0, 3), (1.5, 5)])
    assert sorted(told(jumped(calls, 3))) == sorted(stepped(calls, 3))
    assert sorted(told(jumped(calls, 3, Impatient))) != sorted(stepped(calls, 3))


def test_by_hand() -> None:
    """Two slots, three answers: the third begins where the first has ended."""
    one = SimulatedBatch(2, lambda rows: float(rows))
    for key, cycles in ((1, 2), (2, 5), (3, 1)):
        one.add(key, cycles, 0.0)
    assert [(e.key, e.at) for e in one.advance(100.0)] == [(1, 4.0), (3, 6.0), (2, 8.0)]
    assert one.busy == 8.0 and one.next_change() is None


def test_tokens_are_spread_over_the_cycles_of_each_version() -> None:
    assert versions([(3, 7)], 5).tolist() == [7] * 5
    assert versions([(1, 0), (3, 2)], 8).tolist() == [0, 0, 2, 2, 2, 2, 2, 2]


def test_time_jumps_to_the_next_timer_and_keeps_their_order() -> None:
    async def work() -> list[tuple[str, float]]:
        seen: list[tuple[str, float]] = []

        async def later(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            seen.append((name, asyncio.get_running_loop().time()))

        await asyncio.gather(later("week", 604800.0), later("moment", 1e-3), later("day", 86400.0))
        return seen

    assert run_virtually(work()) == [("moment", 1e-3), ("day", 86400.0), ("week", 604800.0)]


def test_who_waits_for_ever_is_told_so() -> None:
    async def work() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run_virtually(work())
    assert VirtualTimeLoop().time() == 0.0
