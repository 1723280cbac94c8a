"""An event loop whose clock jumps to the next timer when there is nothing else to do, so hours pass in seconds."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):
    """All tasks wait and no timer is set: in real time this would never end."""


class _Jumping(selectors.SelectSelector):
    """Moves the time on instead of waiting for files."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0  # seconds since the loop was made

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise Deadlock("all tasks wait for one another: nothing is left that could happen")
        self.now += max(0.0, timeout)
        return []


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose ``time()`` is virtual; threads and sockets must not be used, since their waits take no time here."""

    def __init__(self) -> None:
        self._jumping = _Jumping()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Return the virtual seconds since the loop was made."""
        return self._jumping.now


def run_virtually(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in virtual time; raise ``Deadlock`` if it would never end."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()
