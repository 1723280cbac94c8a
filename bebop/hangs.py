"""How long a silence may last until it counts as a hang.

What was measured decides: ``FACTOR`` times the slowest of its kind so far, and never less than a floor
(``runtime.hang_after``). Seconds count only while this process was awake itself: one that was stopped or starved, or
whose machine slept, knows nothing of the others' silence meanwhile.
"""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from bebop.protocols import Pace

T = TypeVar("T")
FACTOR = 10.0
FIRST = 600.0  # seconds, where nothing of a kind was measured: models are loaded, kernels compiled
START = 1800.0  # seconds for a process to load its model, the first time
TICK = 0.5  # seconds between two looks


class AwakeClock:
    """Seconds in which this process was awake: it is looked at every ``TICK``, and a longer gap counts for two."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now, self._seconds, self._last = now, 0.0, now()

    def tick(self) -> float:
        """Seconds since the last tick, as far as they count."""
        passed = self._passed()
        self._seconds, self._last = self._seconds + passed, self._now()
        return passed

    def read(self) -> float:
        """Seconds since the beginning, as far as they count."""
        return self._seconds + self._passed()

    def _passed(self) -> float:
        return min(self._now() - self._last, 2 * TICK)


class Deadline:
    """How long calls may take, by kind.

    Kinds that a process serves one after another are held against the slowest of them all: some (a probe that is due
    now and then) mostly have nothing to do, and take as long as the others when they have.

    >>> deadline = Deadline(30)
    >>> deadline.took("update", 12)
    >>> deadline.limit("update"), deadline.limit("save")
    (120.0, 600.0)
    """

    def __init__(self, floor: float, factor: float = FACTOR, first: float = FIRST) -> None:
        """``floor``, ``first``: seconds."""
        self.floor, self.factor, self.first = floor, factor, first
        self._slowest: dict[str, float] = {}

    def took(self, kind: str, seconds: float) -> None:
        """A call came back."""
        self._slowest[kind] = max(seconds, self._slowest.get(kind, 0.0))

    def limit(self, kind: str) -> float:
        """Seconds for a call."""
        if kind not in self._slowest:
            return max(self.floor, self.first)
        return max(self.floor, self.factor * max(self._slowest.values()))


class Paces:
    """The threads of a worker, as its reports tell of them.

    A worker that was stopped together with this process reports a long silence: it counts by the time that was seen
    to pass here between two reports.
    """

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self._heard: dict[str, tuple[float, float, Pace]] = {}  # name -> silence that counts, when it was heard, pace

    def hear(self, paces: Sequence[Pace], now: float) -> None:
        """What a report said, at ``now`` of an ``AwakeClock``."""
        for pace in paces:
            counted, at, _ = self._heard.get(pace.name, (math.inf, now, pace))
            self._heard[pace.name] = (min(pace.silent, counted + now - at), now, pace)

    def late(self) -> tuple[str, float] | None:
        """A thread that hangs, and its seconds of silence."""
        for silent, _, pace in self._heard.values():
            own = pace.limit + self.floor if math.isfinite(pace.limit) else 0.0  # what has a limit keeps it itself
            measured = FACTOR * pace.slowest if pace.slowest else FIRST
            if silent > max(self.floor, measured, own):
                return pace.name, silent
        return None


async def within(work: Coroutine[Any, Any, T], limit: float, clock: AwakeClock) -> T:
    """Await ``work``; ``TimeoutError`` after ``limit`` seconds of a fresh ``clock``."""
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
