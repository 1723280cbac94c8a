"""Continuous batching in virtual time: when each completion ends, at the cost of one event for each.

All rows of a batch take part in every cycle, so the seconds of a cycle change only when a row comes or goes. Between
two such changes a whole run of cycles is skipped at once. The result is that of stepping cycle by cycle.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

SLACK = 1e-9  # of a cycle: times are sums of floats


class Ended(NamedTuple):
    """A completion that is finished."""

    key: int
    at: float  # seconds
    spans: tuple[tuple[int, int], ...]  # (cycles, version of the weights that ran them), in order


class _Call(NamedTuple):
    """A request for a completion, or weights: then ``key`` is their version, and loading takes ``seconds``."""

    at: float
    key: int
    cycles: int
    seconds: float | None


@dataclass(slots=True)
class _Row:
    key: int
    started: int  # cycles of the engine before
    loads: int  # of weights before


class SimulatedBatch:
    """An engine's rows, queue and clock; it takes in calls between two cycles, in the order in which they came."""

    def __init__(self, slots: int, cycle: Callable[[int], float], prefill: float = 0.0) -> None:
        """Make an engine whose cycle of n rows takes ``cycle(n)`` seconds, and each admission ``prefill`` seconds."""
        self.slots, self.cycle, self.prefill = slots, cycle, prefill
        self.at = 0.0  # seconds of the boundary between cycles up to which all is known
        self.version = 0
        self.busy = self.swap = 0.0  # seconds so far: in cycles and prefills, in loads
        self._cycles = 0
        self._began = False  # whether the turn at ``at`` has taken in its calls: later ones wait for the next turn
        self._calls: deque[_Call] = deque()  # that came since the last boundary
        self._waiting: deque[_Call] = deque()
        self._rows: list[tuple[int, int, _Row]] = []  # heap: (cycle after which it ends, order, row)
        self._order = 0
        self._loads: list[tuple[int, int]] = [(0, 0)]  # (cycles before, version)

    def add(self, key: int, cycles: int, now: float) -> None:
        """Request a completion of so many cycles, 1 or more."""
        self._calls.append(_Call(now, key, cycles, None))

    def load(self, version: int, seconds: float, now: float) -> None:
        """Load new weights, which takes ``seconds``."""
        self._calls.append(_Call(now, version, 0, seconds))

    def advance(self, now: float) -> list[Ended]:
        """Return what has ended by ``now``, in order; a cycle that is in progress then is left for later."""
        ended: list[Ended] = []
        while True:
            self._take_in()
            if not self._rows:
                if not self._calls or self._calls[0].at > now:
                    return ended
                self.at = max(self.at, self._calls[0].at)
                continue
            seconds = self.cycle(len(self._rows))
            count = min(self._until_change(seconds), math.floor((now - self.at) / seconds + SLACK))
            if count < 1:
                return ended
            self.at += count * seconds
            self.busy += count * seconds
            self._cycles += count
            self._began = False
            while self._rows and self._rows[0][0] == self._cycles:
                ended.append(self._end(heapq.heappop(self._rows)[2]))

    def next_change(self) -> float | None:
        """Return when something will have ended or been taken in, without further calls; None if never."""
        if self._rows:
            seconds = self.cycle(len(self._rows))
            return self.at + self._until_change(seconds) * seconds
        return max(self.at, self._calls[0].at) if self._calls else None

    def _until_change(self, seconds: float) -> int:
        """Return the number of cycles until a row ends or a call that has come meanwhile can be taken in."""
        count = self._rows[0][0] - self._cycles
        if self._calls:
            count = min(count, max(1, math.ceil((self._calls[0].at - self.at) / seconds - SLACK)))
        return count

    def _take_in(self) -> None:
        """Take in the calls that have come by the boundary of a turn, once, then fill the slots."""
        if self._began:
            return
        boundary = self.at + SLACK
        while self._calls and self._calls[0].at <= boundary:
            call = self._calls.popleft()
            if call.seconds is None:
                self._waiting.append(call)
                continue
            self.at += call.seconds
            self.swap += call.seconds
            self.version = call.key
            self._loads.append((self._cycles, self.version))
        while self._waiting and len(self._rows) < self.slots:
            call = self._waiting.popleft()
            self.at += self.prefill
            self.busy += self.prefill
            self._order += 1
            row = _Row(call.key, self._cycles, len(self._loads) - 1)
            heapq.heappush(self._rows, (self._cycles + call.cycles, self._order, row))
        self._began = bool(self._rows)

    def _end(self, row: _Row) -> Ended:
        """Return a finished row with the weights that ran each of its cycles."""
        spans: list[tuple[int, int]] = []
        for index in range(row.loads, len(self._loads)):
            begin = max(row.started, self._loads[index][0])
            end = self._loads[index + 1][0] if index + 1 < len(self._loads) else self._cycles
            if end > begin:
                spans.append((end - begin, self._loads[index][1]))
        return Ended(row.key, self.at, tuple(spans))
