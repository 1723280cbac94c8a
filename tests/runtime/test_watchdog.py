"""The watchdog: deadlines, progress of threads and pings, on a clock that the tests move by hand."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import pytest

from bebop.driver.protocols import Pace
from bebop.runtime.watchdog import (
    FIRST,
    PING_SECONDS,
    START,
    TICK,
    Deadline,
    Hang,
    ProcessHealth,
    SuspendAwareClock,
    ThreadProgress,
    Watchdog,
    within,
)


class Time:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


class Process:
    """Answers pings at once, as long as it is ``responsive``."""

    def __init__(self) -> None:
        self.responsive, self.asked = True, 0

    def ping(self) -> "asyncio.Future[Any]":
        self.asked += 1
        answer = asyncio.get_running_loop().create_future()
        if self.responsive:
            answer.set_result(None)
        return answer


class Watched:
    """A watchdog over processes that have started, with a floor of 30 s."""

    def __init__(self, count: int = 1) -> None:
        self.time = Time()
        self.processes = [Process() for _ in range(count)]
        self.health = [ProcessHealth(f"rank {i}", ping=process.ping) for i, process in enumerate(self.processes)]
        self.watchdog = Watchdog(self.health, 30.0, clock=SuspendAwareClock(self.time))

    def after(self, seconds: float) -> Hang | None:
        """The first hang within so many seconds of looking in time."""
        for _ in range(math.ceil(seconds / TICK)):
            self.time.seconds += TICK
            if (hang := self.watchdog.check()) is not None:
                return hang
        return None


def run(test: Callable[[], None]) -> None:
    """In an event loop, where futures are made."""

    async def main() -> None:
        test()

    asyncio.run(main())


def test_seconds_count_while_this_process_is_awake() -> None:
    time = Time()
    clock = SuspendAwareClock(time)
    time.seconds += TICK
    assert clock.tick() == TICK
    time.seconds += 3600  # the machine slept, or this process was stopped
    assert clock.read() == 3 * TICK
    assert clock.tick() == 2 * TICK and clock.read() == 3 * TICK


def test_a_deadline_follows_from_the_slowest_of_all_kinds() -> None:
    deadline = Deadline(30.0)
    assert deadline.limit("update") == FIRST, "nothing was measured yet"
    deadline.record("update", 2.0)
    assert deadline.limit("update") == 30.0, "never below the floor"
    deadline.record("update", 20.0)
    deadline.record("update", 1.0)
    deadline.record("certify", 0.001)
    assert deadline.limit("update") == deadline.limit("certify") == 200.0
    assert deadline.limit("save") == FIRST
    deadline.record("update", FIRST)
    assert deadline.limit("save") == 10 * FIRST, "what was not measured yet may be as slow as the rest"
    assert Deadline(1000.0).limit("update") == 1000.0


def pace(silent: float, slowest: float = 1.0, limit: float = math.inf) -> Pace:
    return Pace(name="decoding", silent=silent, slowest=slowest, limit=limit)


@pytest.mark.parametrize(
    ("report", "hangs"),
    [
        (pace(29), False),
        (pace(31), True),
        (pace(31, slowest=3.5), False),
        (pace(36, slowest=3.5), True),
        (pace(FIRST - 1, slowest=0.0), False),
        (pace(FIRST + 1, slowest=0.0), True),
        (pace(59, limit=30.0), False),  # whoever has a limit of its own keeps it itself, before this one does
        (pace(61, limit=30.0), True),
    ],
)
def test_a_thread_that_does_not_get_on(report: Pace, hangs: bool) -> None:
    threads = ThreadProgress(30.0)
    threads.update([report, Pace(name="reward", silent=0.0, slowest=0.1)], 5.0)
    assert threads.late() == (("decoding", report.silent) if hangs else None)


def test_a_silence_is_no_longer_than_what_was_seen_of_it() -> None:
    threads = ThreadProgress(30.0)
    threads.update([pace(1)], 10.0)
    threads.update([pace(101)], 12.0)  # worker and driver were stopped together
    assert threads.late() is None
    threads.update([pace(129)], 40.0)
    assert threads.late() == ("decoding", 31.0)
    threads.update([pace(0.5)], 42.0)
    assert threads.late() is None


def test_who_does_not_answer_hangs_whatever_it_was_asked_for() -> None:
    def test() -> None:
        watched = Watched()
        assert watched.after(120) is None
        assert watched.processes[0].asked == pytest.approx(120 / PING_SECONDS, rel=0.3), (
            "now and then, not all the time"
        )
        watched.processes[0].responsive = False
        with watched.watchdog.calling(watched.health[0], "update"):
            hang = watched.after(60)
        assert hang is not None and hang.processes == tuple(watched.health) and hang.what == " in update"
        assert (
            30 < hang.silent < 31
            and watched.watchdog.clock.read() - watched.health[0].last_seen < 30 + PING_SECONDS + 1
        )

    run(test)


def test_a_driver_that_slept_blames_nobody() -> None:
    def test() -> None:
        watched = Watched()
        watched.processes[0].responsive = False
        with watched.watchdog.calling(watched.health[0], "update"):
            assert watched.after(10) is None
            watched.time.seconds += 3600
            assert watched.watchdog.check() is None and watched.after(10) is None
        assert watched.after(30) is not None

    run(test)


def test_a_process_that_is_dead_does_not_hang() -> None:
    async def died() -> None:
        raise ConnectionError

    async def test() -> None:
        watched = Watched()
        watched.health[0].ping = lambda: asyncio.ensure_future(died())
        assert watched.after(3) is None
        await asyncio.sleep(0)
        assert watched.after(120) is None, "whoever calls it is told"

    asyncio.run(test())


def test_a_start_has_a_limit_before_there_is_anybody_to_answer() -> None:
    def test() -> None:
        watched = Watched()
        watched.health[0].ping = None
        with watched.watchdog.calling(watched.health[0], "start"):
            assert watched.after(START - 10) is None
            hang = watched.after(20)
        assert hang is not None and hang.what == " in start"

    run(test)


def test_a_late_call_is_blamed_on_the_unresponsive_or_else_on_all() -> None:
    def late(unresponsive: bool) -> tuple[str, ...]:
        watched = Watched(count=2)
        for process in watched.health:
            with watched.watchdog.calling(process, "update"):
                watched.time.seconds += TICK
                watched.watchdog.check()
        first, second = (watched.watchdog.calling(process, "update") for process in watched.health)
        with first, second:
            assert watched.after(20) is None
            watched.processes[1].responsive = not unresponsive
            hang = watched.after(20)
        assert hang is not None and hang.what == " in update" and hang.silent == pytest.approx(30, abs=1)
        return tuple(process.name for process in hang.processes)

    def test() -> None:
        assert late(unresponsive=True) == ("rank 1",)
        assert late(unresponsive=False) == ("rank 0", "rank 1")

    run(test)


def test_a_call_that_waits_on_purpose_may_wait() -> None:
    def test() -> None:
        watched = Watched()
        for _ in range(3):
            with watched.watchdog.calling(watched.health[0], "collect", 5.0):
                assert watched.after(5) is None
        assert watched.watchdog.deadline.limit("collect") == 30.0, "what it waits on purpose is not measured"
        with watched.watchdog.calling(watched.health[0], "collect", 5.0):
            assert watched.after(34) is None
            hang = watched.after(3)
        assert hang is not None and hang.what == " in collect"

    run(test)


def test_work_has_its_time_and_no_more() -> None:
    async def test() -> None:
        assert await within(asyncio.sleep(0, "done"), 10.0, SuspendAwareClock()) == "done"
        with pytest.raises(TimeoutError):
            await within(asyncio.Event().wait(), 0.05, SuspendAwareClock())

    asyncio.run(test())
