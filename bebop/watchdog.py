"""Looks after the processes of one part of a job: a worker, or all ranks of the trainer.

Two signs of life count. Each process answers a ping from a thread of its own, whatever else it does: one that is
stopped or holds its interpreter for itself does not. And what it was asked for comes back in time (``Deadline``), and
its threads get on (``Paces``): one that waits for ever still answers pings.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bebop.hangs import START, TICK, AwakeClock, Deadline, Paces
from bebop.processes import stopped

PING_SECONDS = 2.0  # between an answer and the next ping
CALLING = 'remote/part.py", line'  # in a stack: what was asked for by name is below
HINTS = {"decoding": 'engine_thread.py", line', "reward": "_close"}  # in the stack of such a thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """What is to be ended, and why."""

    lives: tuple["Life", ...]
    what: str  # " in decoding"; empty: nobody knows in what
    silent: float  # seconds, as they count
    hint: str  # in the stack that tells


@dataclass(slots=True, kw_only=True)
class _Call:
    kind: str
    since: float  # of the clock
    limit: float


@dataclass(slots=True)
class Life:
    """What is known of one process. ``ping`` asks for an answer; None before there is anybody to answer."""

    name: str
    pid: int = 0
    here: bool = False  # on this machine
    descriptor: int = -1  # of its file for stacks
    ping: Callable[[], "asyncio.Future[Any]"] | None = None
    silent: float = 0.0  # seconds for which a ping was not answered
    heard: float = 0.0  # when it gave its last sign of life, by the clock of its watchdog
    calls: list[_Call] = field(default_factory=list)
    _pinged: "asyncio.Future[Any] | None" = None
    _rest: float = 0.0  # seconds until the next ping

    def listen(self, passed: float) -> None:
        """``passed`` seconds later: has it answered?"""
        if self.ping is None:  # it loads, and may keep its interpreter for itself: that it is not stopped has to do
            self.silent = self.silent + passed if self.here and stopped(self.pid) else 0.0
        elif self._pinged is None or self._pinged.done():
            self.silent, self._rest = 0.0, self._rest - passed
            if self._pinged is not None and (self._pinged.cancelled() or self._pinged.exception() is not None):
                return  # it is dead: whoever calls it is told
            if self._rest <= 0:
                self._pinged, self._rest = self.ping(), PING_SECONDS
        else:
            self.silent += passed


class Watchdog:
    """Looks every ``TICK`` until one of its processes hangs."""

    def __init__(
        self, lives: Sequence[Life], floor: float, *, start: float = START, clock: AwakeClock | None = None
    ) -> None:
        """``floor``: seconds of silence that are always allowed (``runtime.hang_after``); ``start``: for a start."""
        self.lives, self.floor, self.clock = lives, floor, clock or AwakeClock()
        self.deadline, self.paces = Deadline(floor), Paces(floor)
        self.start_limit = start

    @contextlib.contextmanager
    def calling(self, life: Life, kind: str, allowed: float = 0.0) -> Iterator[None]:
        """A call of a process is under way, which may wait for ``allowed`` seconds without cause for concern."""
        limit = self.start_limit if kind == "start" else self.deadline.limit(kind) + allowed
        call = _Call(kind=kind, since=self.clock.read(), limit=limit)
        life.calls.append(call)
        try:
            yield
            life.heard = self.clock.read()
            if kind != "start":
                self.deadline.took(kind, max(0.0, self.clock.read() - call.since - allowed))
        finally:
            life.calls.remove(call)

    def look(self) -> Hang | None:
        """To be called every ``TICK``: what hangs."""
        passed = self.clock.tick()
        for life in self.lives:
            life.listen(passed)
            if not life.silent:
                life.heard = self.clock.read()
        if deaf := [life for life in self.lives if life.silent > self.floor]:
            silent = max(life.silent for life in deaf)
            return Hang(lives=tuple(deaf), what=_doing(deaf[0]), silent=silent, hint=CALLING)
        now = self.clock.read()
        for life in self.lives:
            for call in life.calls:
                if now - call.since > call.limit:
                    return self._late(call, now - call.since)
        if (late := self.paces.late()) is not None:
            name, silent = late
            return Hang(lives=tuple(self.lives), what=f" in {name}", silent=silent, hint=HINTS.get(name, CALLING))
        return None

    async def watch(self) -> Hang:
        """Look until something hangs."""
        while (hang := self.look()) is None:
            await asyncio.sleep(TICK)
        return hang

    def _late(self, call: _Call, seconds: float) -> Hang:
        """Who is to blame for a call that is late: those that do not answer pings either, or else all that serve it."""
        deaf = [life for life in self.lives if life.silent > self.floor / 4]
        asked = [life for life in self.lives if any(other.kind == call.kind for other in life.calls)]
        return Hang(lives=tuple(deaf or asked), what=f" in {call.kind}", silent=seconds, hint=CALLING)


def _doing(life: Life) -> str:
    """What it was asked for, but for news, for which there is always a question."""
    kinds = [call.kind for call in life.calls if call.kind != "collect"]
    return f" in {kinds[0]}" if kinds else ""
