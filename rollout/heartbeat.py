"""Checks that a server with open requests is still alive, though a completion may take any time.

While requests are open, it sends questions that the decoding process answers between two steps. A control call (such as
new weights) may delay these, and has a deadline of its own.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, TypeVar

from bebop.rollout.engine import EngineDied
from bebop.runtime.watchdog import FACTOR, FIRST, TICK, Deadline, SuspendAwareClock, within

T = TypeVar("T")
PATIENCE = 0.75  # of ``runtime.hang_after``: an engine is given up before its worker is
RECENT = 16  # replies that a limit follows from: kernels that were compiled once are forgotten
QUICK = ("server_info", "model_info", "update_weight_version", "end_weight_update", "abort_request",
         "continue_generation")  # have nothing to wait for  # fmt: skip


class Heartbeat:
    """Periodic questions to one server, from ``start`` to ``close``."""

    def __init__(self, name: str, ask: Callable[[], Awaitable[object]], hang_after: float) -> None:
        """Keep the question for ``start``.

        Args:
            name: of the server, in messages.
            ask: sends the question; if it raises, that is no reply.
            hang_after: seconds, see ``runtime.hang_after``.
        """
        self.name, self.ask, self.floor = name, ask, PATIENCE * hang_after
        self.why: str | None = None  # why the server counts as dead
        self._seconds: deque[float] = deque(maxlen=RECENT)  # that replies took
        self._deadline = Deadline(self.floor)
        self._owed = self._controls = 0
        self._warm = False  # whether a completion has come
        self._beat: asyncio.Task[str] | None = None

    def start(self) -> None:
        """Start the questions, or restart them."""
        self.close()
        self.why, self._warm = None, False
        self._beat = asyncio.create_task(self._watch())

    def close(self) -> None:
        """Stop the questions."""
        if self._beat is not None:
            self._beat.cancel()
            self._beat = None

    async def answer(self, work: Coroutine[Any, Any, T]) -> T:
        """Await a completion for as long as the server is alive; else raise ``EngineDied``."""
        answer = asyncio.ensure_future(work)
        self._owed += 1
        try:
            while not answer.done():
                if (beat := self._beat) is None:
                    raise EngineDied(f"{self.name} was closed")
                await asyncio.wait([answer, beat], return_when=asyncio.FIRST_COMPLETED)
                if not answer.done() and not beat.cancelled():  # cancelled: the questions were restarted
                    raise EngineDied(beat.result())
            reply = answer.result()
            self._warm = True
            return reply
        finally:
            self._owed -= 1
            answer.cancel()

    async def control(self, name: str, work: Coroutine[Any, Any, T]) -> T:
        """Await a control call; raise ``EngineDied`` if it takes much longer than such calls did."""
        limit, clock = self.floor if name in QUICK else self._deadline.limit(name), SuspendAwareClock()
        self._controls += 1
        try:
            reply = await within(work, limit, clock)
        except TimeoutError:
            raise EngineDied(f"{self.name} did not reply to {name} for {limit:.0f} s") from None
        finally:
            self._controls -= 1
        self._deadline.record(name, clock.read())
        return reply

    async def _watch(self) -> str:
        """Ask again and again; when a question stays open for too long, return why the server counts as dead."""
        while True:
            await asyncio.sleep(self.floor / 5)
            silent, clock, asked = 0.0, SuspendAwareClock(), asyncio.ensure_future(self._reply())
            try:
                while not asked.done():
                    await asyncio.wait([asked], timeout=min(TICK, self.floor / 5))
                    passed = clock.tick()
                    silent += passed if self._owed and not self._controls else 0.0
                    if silent > self._limit():
                        self.why = f"{self.name} is silent for {silent:.0f} s, with {self._owed} requests open"
                        return self.why
            finally:
                asked.cancel()
            self._seconds.append(silent)

    async def _reply(self) -> None:
        while True:
            with suppress(Exception):  # refused, cut off, busy: whatever it was, it is no reply
                await self.ask()
                return
            await asyncio.sleep(TICK)

    def _limit(self) -> float:
        return max(self.floor, FACTOR * max(self._seconds, default=0.0), 0.0 if self._warm else FIRST)
