"""Detection of hanging processes in one part of a job: a rollout worker, or all ranks of the trainer.

Signs of life, each compared with a limit:

- A process answers pings from a thread that does nothing else. A stopped process does not, nor one that never releases
  the GIL.
- Calls return in time (``Deadline``), and the threads of a worker make progress (``ThreadProgress``). A process that
  waits for ever still answers pings.

Invariants:

- A limit is ``FACTOR`` times the slowest time measured so far, and never less than a floor (``runtime.hang_after``).
  Nobody has to guess the duration of an update.
- Only seconds in which this process was awake count (``SuspendAwareClock``). A process that was stopped or starved, or
  whose machine slept, cannot know whether others were silent meanwhile.
- A dead process does not count as hanging: the next call to it raises.
"""

import asyncio
import contextlib
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from bebop.driver.protocols import Pace
from bebop.runtime.processes import stopped

T = TypeVar("T")
FACTOR = 10.0
FIRST = 600.0  # seconds before the first measurement: the process loads a model or compiles kernels
START = 1800.0  # seconds for the first start of a process, which loads its model
TICK = 0.5  # seconds between two checks
PING_SECONDS = 2.0  # between an answer and the next ping
# Text that identifies the stack of a hanging thread, by the thread's task.
HINTS = {"decoding": 'engine_thread.py", line', "reward": "_close"}


class SuspendAwareClock:
    """Clock that counts only the seconds in which this process was awake.

    Call ``tick`` every ``TICK`` seconds; a longer gap counts as two ticks.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._seconds, self._last = now, 0.0, now()

    def tick(self) -> float:
        """Return the awake seconds since the last tick."""
        passed = self._passed()
        self._seconds, self._last = self._seconds + passed, self._now()
        return passed

    def read(self) -> float:
        """Return the awake seconds since the clock was created."""
        return self._seconds + self._passed()

    def _passed(self) -> float:
        return min(self._now() - self._last, 2 * TICK)


class Deadline:
    """Time limits of calls, by kind.

    A process serves its kinds one after another, so each is limited by the slowest of them all. Some kinds, such as a
    probe that is due now and then, usually return at once but take as long as the others when due.

    >>> deadline = Deadline(30)
    >>> deadline.record("update", 12)
    >>> deadline.limit("update"), deadline.limit("save")
    (120.0, 600.0)
    >>> deadline.record("update", 100)  # a model that updates slowly also saves slowly
    >>> deadline.limit("save")
    1000.0
    """

    def __init__(self, floor: float, factor: float = FACTOR, first: float = FIRST) -> None:
        """Set the smallest limit and the limit of a kind that was not measured yet, in seconds."""
        self.floor, self.factor, self.first = floor, factor, first
        self._slowest: dict[str, float] = {}

    def record(self, kind: str, seconds: float) -> None:
        """Record the duration of a finished call."""
        self._slowest[kind] = max(seconds, self._slowest.get(kind, 0.0))

    def limit(self, kind: str) -> float:
        """Return the maximum seconds of a call of this kind."""
        least = self.floor if kind in self._slowest else max(self.floor, self.first)
        return max(least, self.factor * max(self._slowest.values(), default=0.0))


class ThreadProgress:
    """Progress of a worker's threads, from the worker's reports.

    A worker that was stopped together with this process reports a long silence. At most the time that passed here
    between two reports counts.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self._threads: dict[str, tuple[float, float, Pace]] = {}  # name -> silence that counts, time of report, pace

    def update(self, paces: Sequence[Pace], now: float) -> None:
        """Add a report that arrived at ``now`` of a ``SuspendAwareClock``."""
        for pace in paces:
            silent, at, _ = self._threads.get(pace.name, (math.inf, now, pace))
            self._threads[pace.name] = (min(pace.silent, silent + now - at), now, pace)

    def late(self) -> tuple[str, float] | None:
        """Return name and seconds of silence of a hanging thread; None if no thread hangs."""
        for silent, _, pace in self._threads.values():
            # A thread with a limit of its own enforces that limit itself.
            own = pace.limit + self.floor if math.isfinite(pace.limit) else 0.0
            measured = FACTOR * pace.slowest if pace.slowest else FIRST
            if silent > max(self.floor, measured, own):
                return pace.name, silent
        return None


async def within(work: Coroutine[Any, Any, T], limit: float, clock: SuspendAwareClock) -> T:
    """Await ``work``; raise ``TimeoutError`` after ``limit`` seconds of a new ``clock``."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            await asyncio.wait([task], timeout=min(TICK, limit / 4))
            clock.tick()
            if not task.done() and clock.read() > limit:
                raise TimeoutError
        return task.result()
    finally:
        task.cancel()


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """Detected hang: which processes to end, and why."""

    processes: tuple["ProcessHealth", ...]
    what: str  # " in decoding"; empty if that is unknown
    silent: float  # seconds that count
    hint: str = ""  # text in the stack of the thread to show; empty: of the one that serves calls


@dataclass(slots=True, kw_only=True)
class _Call:
    kind: str
    since: float  # of the clock
    limit: float


@dataclass(slots=True)
class ProcessHealth:
    """Signs of life of one process. ``ping`` sends it a ping; None until the process can answer."""

    name: str
    pid: int = 0
    local: bool = False  # whether it runs on this machine
    descriptor: int = -1  # of its file for stacks
    ping: Callable[[], "asyncio.Future[Any]"] | None = None
    silent: float = 0.0  # seconds for which a ping was not answered
    last_seen: float = 0.0  # time of its last sign of life, by the clock of its watchdog
    calls: list[_Call] = field(default_factory=list)
    _pinged: "asyncio.Future[Any] | None" = None
    _rest: float = 0.0  # seconds until the next ping

    def update(self, passed: float) -> None:
        """Check for an answer to the last ping, ``passed`` seconds after the last check, and ping again when due."""
        if self.ping is None:  # it is loading and may hold the GIL throughout: only being stopped counts as silence
            self.silent = self.silent + passed if self.local and stopped(self.pid) else 0.0
        elif self._pinged is None or self._pinged.done():
            self.silent, self._rest = 0.0, self._rest - passed
            if self._pinged is not None and (self._pinged.cancelled() or self._pinged.exception() is not None):
                return  # it is dead: the next call to it raises
            if self._rest <= 0:
                self._pinged, self._rest = self.ping(), PING_SECONDS
        else:
            self.silent += passed


class Watchdog:
    """Watchdog that checks its processes every ``TICK`` until one of them hangs."""

    def __init__(
        self,
        processes: Sequence[ProcessHealth],
        floor: float,
        *,
        start: float = START,
        clock: SuspendAwareClock | None = None,
    ) -> None:
        """Set the silence that is always allowed (``runtime.hang_after``) and the limit of a start, in seconds."""
        self.processes, self.floor, self.clock = processes, floor, clock or SuspendAwareClock()
        self.deadline, self.threads = Deadline(floor), ThreadProgress(floor)
        self.start_limit = start

    @contextlib.contextmanager
    def calling(self, process: ProcessHealth, kind: str, allowed: float = 0.0) -> Iterator[None]:
        """Watch a call to a process within the block; the call may wait ``allowed`` extra seconds."""
        limit = self.start_limit if kind == "start" else self.deadline.limit(kind) + allowed
        call = _Call(kind=kind, since=self.clock.read(), limit=limit)
        process.calls.append(call)
        try:
            yield
            process.last_seen = self.clock.read()
            if kind != "start":
                self.deadline.record(kind, max(0.0, self.clock.read() - call.since - allowed))
        finally:
            process.calls.remove(call)

    def check(self) -> Hang | None:
        """Return a hang, or None if nothing hangs; call it every ``TICK`` seconds."""
        passed = self.clock.tick()
        for process in self.processes:
            process.update(passed)
            if not process.silent:
                process.last_seen = self.clock.read()
        if unresponsive := [process for process in self.processes if process.silent > self.floor]:
            silent = max(process.silent for process in unresponsive)
            return Hang(processes=tuple(unresponsive), what=_current_call(unresponsive[0]), silent=silent)
        now = self.clock.read()
        for process in self.processes:
            for call in process.calls:
                if now - call.since > call.limit:
                    return self._late(call, now - call.since)
        if (late := self.threads.late()) is not None:
            name, silent = late
            return Hang(processes=tuple(self.processes), what=f" in {name}", silent=silent, hint=HINTS.get(name, ""))
        return None

    async def watch(self) -> Hang:
        """Check until a process hangs, and return the hang."""
        while (hang := self.check()) is None:
            await asyncio.sleep(TICK)
        return hang

    def _late(self, call: _Call, seconds: float) -> Hang:
        """Attribute a late call to the processes that do not answer pings either, else to all that serve it."""
        unresponsive = [process for process in self.processes if process.silent > self.floor / 4]
        asked = [process for process in self.processes if any(other.kind == call.kind for other in process.calls)]
        return Hang(processes=tuple(unresponsive or asked), what=f" in {call.kind}", silent=seconds)


def _current_call(process: ProcessHealth) -> str:
    """Return which call a process serves, other than ``collect``, which is always open."""
    kinds = [call.kind for call in process.calls if call.kind != "collect"]
    return f" in {kinds[0]}" if kinds else ""
