"""Environments with limits: one that crashes, hangs or dies is lost for its own trajectory, and holds up no other.

An environment that blocks (``EnvironmentKind.blocking``) has a process of its own, which is killed with all that it
started. At most ``processes`` of them are open at a time. Further ones wait, first come first served, and that wait
counts towards no limit. All others run in the event loop, as tasks that are cancelled at their limit. One that blocks
there all the same holds up everything, even its own time limit. This is measured: a warning names the environment
(``BLOCKED_SECONDS``), and ``Episodes.longest_block`` keeps the longest time.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Generator, Mapping
from pathlib import Path
from typing import Any, Protocol

from bebop.errors import UserError
from bebop.tasks.environment import (
    Environment,
    EnvironmentKind,
    EnvironmentLost,
    EnvStep,
    arguments,
    checked_messages,
    checked_step,
    find_kind,
    load_class,
    one_line,
)
from bebop.tasks.episode_process import Apart, Pool
from bebop.tasks.output import Output

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # for an environment to close; its process is killed then
LEAVE_SECONDS = 1.0  # for a task to end when it is cancelled
BLOCKED_SECONDS = 1.0  # in one go without an await: a warning


class _Place(Protocol):
    """Where an episode runs: in a process (``Apart``) or in the event loop (``_Here``)."""

    async def take(self) -> None:
        """Wait for a free place."""
        ...

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Any, ...]:
        """Return the first messages of a question."""
        ...

    async def step(self, text: Any) -> EnvStep:
        """Return the reply to a turn."""
        ...

    async def close(self, lost: bool) -> None:
        """Close the environment and free the place, at once if it is lost."""
        ...


class Episodes:
    """Starts and ends the environments of one worker; everything but the constructor belongs to one event loop.

    >>> episodes = Episodes("guess", {"tries": 7}, reset_seconds=60, step_seconds=30, processes=8)
    >>> episodes.open().seconds
    0.0
    """

    def __init__(
        self,
        kind: EnvironmentKind | str,
        args: Mapping[str, Any],
        *,
        reset_seconds: float,
        step_seconds: float,
        processes: int,
        output: Path | None = None,
    ) -> None:
        """Import the class, unless it runs in processes; ``UserError`` for impossible settings.

        ``output``: the file for what those processes print; None: they print where this one does.
        """
        self.kind = find_kind(kind) if isinstance(kind, str) else kind
        self.limits = {"reset": reset_seconds, "step": step_seconds}
        _, self.args = arguments(self.kind, args)
        self.longest_block = 0.0  # seconds that an environment held the event loop in one go
        self.left: set[asyncio.Task[Any]] = set()  # tasks that still run although they were cancelled
        self._pool = Pool(self.kind, self.args, processes, None if output is None else Output(output))
        self._warned = False

    def open(self) -> "Episode":
        """Return an episode that has not begun: nothing runs yet."""
        place: _Place = Apart(self._pool) if self.kind.blocking else _Here(self)
        return Episode(place, self)

    async def shutdown(self) -> None:
        """Kill all processes with what they started, and cancel tasks that were left behind."""
        for task in self.left:
            task.cancel()
        await self._pool.end()

    async def within(self, limit: float, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any] | None:
        """Return the call as a finished task; None if it took longer and was cancelled, whatever it makes of that."""
        task = asyncio.create_task(call)
        try:
            done, _ = await asyncio.wait({task}, timeout=limit)
        finally:
            if not task.done():
                task.cancel()
                task.add_done_callback(_retrieve)
                await asyncio.wait({task}, timeout=LEAVE_SECONDS)
            if not task.done():
                self.left.add(task)
                task.add_done_callback(self.left.discard)
        return task if done else None

    def held(self, seconds: float) -> None:
        """Record how long an environment held the event loop."""
        self.longest_block = max(self.longest_block, seconds)
        if seconds > BLOCKED_SECONDS and not self._warned:
            self._warned = True
            text = "environment %s held up all others for %.1f s: it waits without await, so it needs 'blocking = True'"
            logger.warning(text, self.kind.name, seconds)


class Episode:
    """An ``Environment`` with limits. After ``EnvironmentLost``, or a call that was cancelled, only ``close``."""

    def __init__(self, place: _Place, episodes: Episodes) -> None:
        self.seconds = 0.0  # in reset and step so far, failed ones included
        self._place, self._episodes = place, episodes
        self._state = "new"  # then open; lost from when a call begins until it has returned; closed

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Any, ...]:
        """Return the first messages; ``EnvironmentLost``, ``UserError``. The wait for a process counts nowhere."""
        assert self._state == "new", self._state
        self._state = "lost"
        await self._or_lost(self._place.take())
        messages: tuple[Any, ...] = await self._limited("reset", self._place.reset(item, seed))
        return messages

    async def step(self, text: Any) -> EnvStep:
        """Return the reply to a turn, the Completion if the kind has ``tokens``; raises as ``reset``."""
        assert self._state == "open", self._state
        self._state = "lost"
        step: EnvStep = await self._limited("step", self._place.step(text))
        return step

    async def close(self) -> None:
        """End the episode. This raises nothing and takes some seconds at most."""
        if self._state != "closed":
            lost, self._state = self._state != "open", "closed"
            task = await self._episodes.within(CLOSE_SECONDS, self._or_lost(self._place.close(lost)))
            error = None if task is None or task.cancelled() else task.exception()
            if task is None or error is not None:
                logger.warning("%s, as it was closed", error or self._lost(f"took more than {CLOSE_SECONDS:g} s"))

    async def _limited(self, method: str, call: Coroutine[Any, Any, Any]) -> Any:
        """Return the call's result within its time limit."""
        limit, began = self._episodes.limits[method], time.monotonic()
        try:
            task = await self._episodes.within(limit, self._or_lost(call))
        finally:
            self.seconds += time.monotonic() - began
        if task is None:
            raise self._lost(f"{method} took more than task.environment.{method}_seconds={limit:g}")
        if task.cancelled():
            raise self._lost(f"{method} was cancelled by itself")
        result = task.result()
        self._state = "open"
        return result

    async def _or_lost(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return the call's result; ``EnvironmentLost`` for all that it raised but ``UserError``."""
        try:
            return await call
        except UserError:
            raise
        except EnvironmentLost as error:
            raise self._lost(" ".join(str(error).split())) from error
        except (Exception, SystemExit) as error:
            raise self._lost(f"raised {one_line(error)}") from error

    def _lost(self, why: str) -> EnvironmentLost:
        return EnvironmentLost(f"environment {self._episodes.kind.name}: {why}")


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Retrieve what a cancelled task raised, which has no consequence: asyncio would warn."""
    if not task.cancelled():
        task.exception()


class _Here:
    """An environment in the event loop."""

    def __init__(self, episodes: Episodes) -> None:
        self.episodes = episodes
        self.environment: Environment | None = None

    async def take(self) -> None:
        """Return at once: the event loop always has a place."""

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Any, ...]:
        async def begin() -> Any:
            self.environment = load_class(self.episodes.kind.make)(**self.episodes.args)
            return await self.environment.reset(item, seed)

        kind = self.episodes.kind
        return checked_messages(await _Timed(begin(), self.episodes.held), kind.name, kind.tokens)

    async def step(self, text: Any) -> EnvStep:
        assert self.environment is not None, "it was begun"
        kind = self.episodes.kind
        return checked_step(await _Timed(self.environment.step(text), self.episodes.held), kind.name, kind.tokens)

    async def close(self, lost: bool) -> None:
        if self.environment is not None:
            environment, self.environment = self.environment, None
            await _Timed(environment.close(), self.episodes.held)


class _Timed:
    """Awaits a coroutine and reports how long each stretch from one await to the next took."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], report: Callable[[float], None]) -> None:
        self.coroutine, self.report = coroutine, report

    def __await__(self) -> Generator[Any, Any, Any]:
        resume, value = self.coroutine.send, None
        while True:
            began = time.monotonic()
            try:
                waits_for = resume(value)
            except StopIteration as returned:
                return returned.value
            finally:
                self.report(time.monotonic() - began)
            try:
                resume, value = self.coroutine.send, (yield waits_for)
            except GeneratorExit:
                self.coroutine.close()
                raise
            except BaseException as error:  # a cancellation
                resume, value = self.coroutine.throw, error
