"""Environments with limits: one that crashes, hangs or dies is lost only for its own trajectory, and blocks no other.

An environment that blocks (``EnvironmentKind.blocking``) has its own process, which is killed with all its children. At
most ``processes`` of them are open at a time. Further ones wait, first come, first served, and that wait counts towards
no limit. All others run in the event loop, as tasks that are cancelled at their limit. If one of those blocks anyway,
it blocks everything, even its own time limit. This is measured: a warning names the environment (``BLOCKED_SECONDS``),
and ``Episodes.longest_block`` records the longest time.
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

CLOSE_SECONDS = 10.0  # time limit for an environment to close, after which its process is killed
LEAVE_SECONDS = 1.0  # time limit for a cancelled task to end
BLOCKED_SECONDS = 1.0  # without an await, after which a warning is logged


class _Place(Protocol):
    """Place in which an episode runs: a process (``Apart``) or the event loop (``_Here``)."""

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
        """Close the environment and release the place, at once if it is lost."""
        ...


class Episodes:
    """Environments of one worker; everything but the constructor belongs to one event loop.

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
        """Import the class, unless it runs in processes; raise ``UserError`` for impossible settings.

        ``output``: the file for the output of those processes; None: they print where this one does.
        """
        self.kind = find_kind(kind) if isinstance(kind, str) else kind
        self.limits = {"reset": reset_seconds, "step": step_seconds}
        _, self.args = arguments(self.kind, args)
        self.longest_block = 0.0  # longest time in seconds for which an environment blocked the event loop
        self.left: set[asyncio.Task[Any]] = set()  # tasks that still run although they were cancelled
        self._pool = Pool(self.kind, self.args, processes, None if output is None else Output(output))
        self._warned = False

    def open(self) -> "Episode":
        """Return an episode that has not started; nothing runs yet."""
        place: _Place = Apart(self._pool) if self.kind.blocking else _Here(self)
        return Episode(place, self)

    async def shutdown(self) -> None:
        """Kill all processes with their children, and cancel tasks that were left behind."""
        for task in self.left:
            task.cancel()
        await self._pool.end()

    async def within(self, limit: float, call: Coroutine[Any, Any, Any]) -> asyncio.Task[Any] | None:
        """Return the call as a finished task; None if it exceeded ``limit`` and was cancelled, even without effect."""
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
        """Record how long an environment blocked the event loop."""
        self.longest_block = max(self.longest_block, seconds)
        if seconds > BLOCKED_SECONDS and not self._warned:
            self._warned = True
            text = "environment %s held up all others for %.1f s: it waits without await, so it needs 'blocking = True'"
            logger.warning(text, self.kind.name, seconds)


class Episode:
    """Environment with time limits. After ``EnvironmentLost`` or a cancelled call, only ``close`` is allowed."""

    def __init__(self, place: _Place, episodes: Episodes) -> None:
        self.seconds = 0.0  # in reset and step so far, failed ones included
        self._place, self._episodes = place, episodes
        self._state = "new"  # then open; lost during each call, so that a failed call leaves it lost; closed

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Any, ...]:
        """Return the first messages; raises ``EnvironmentLost``, ``UserError``. The wait for a process has no limit."""
        assert self._state == "new", self._state
        self._state = "lost"
        await self._or_lost(self._place.take())
        messages: tuple[Any, ...] = await self._limited("reset", self._place.reset(item, seed))
        return messages

    async def step(self, text: Any) -> EnvStep:
        """Return the reply to a turn (the Completion if the kind has ``tokens``); raises like ``reset``."""
        assert self._state == "open", self._state
        self._state = "lost"
        step: EnvStep = await self._limited("step", self._place.step(text))
        return step

    async def close(self) -> None:
        """End the episode. This never raises and takes a few seconds at most."""
        if self._state != "closed":
            lost, self._state = self._state != "open", "closed"
            task = await self._episodes.within(CLOSE_SECONDS, self._or_lost(self._place.close(lost)))
            error = None if task is None or task.cancelled() else task.exception()
            if task is None or error is not None:
                logger.warning("%s, as it was closed", error or self._lost(f"took more than {CLOSE_SECONDS:g} s"))

    async def _limited(self, method: str, call: Coroutine[Any, Any, Any]) -> Any:
        """Return the call's result; raise ``EnvironmentLost`` if it exceeds its time limit."""
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
        """Return the call's result; turn every exception except ``UserError`` into ``EnvironmentLost``."""
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
    """Retrieve the exception of a cancelled task, since asyncio would warn otherwise."""
    if not task.cancelled():
        task.exception()


class _Here:
    """Environment in the event loop."""

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
    """Awaitable that runs a coroutine and reports the duration of each stretch between awaits."""

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
            except BaseException as error:  # for instance a cancellation
                resume, value = self.coroutine.throw, error
