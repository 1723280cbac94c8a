"""Processes of a job behind Ray: made, asked, watched and ended."""

import asyncio
import contextlib
import faulthandler
import os
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError

from bebop.errors import UserError
from bebop.events import EventLog
from bebop.hangs import START, Deadline
from bebop.processes import DUMP_SECONDS, descendants, end, marked, place, stacks, stopped
from bebop.protocols import DamagedWeights
from bebop.rollout.engine import EngineDied
from bebop.watchdog import Hang, Life, Watchdog

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
GRACE_SECONDS = 5.0  # for a death to be told, once something failed that may follow from it
Options = Mapping[str, Any]  # of an actor, from ``placement.reserve``


def _watching(method: F) -> F:
    """A method that a thread of its own answers."""
    marked: F = ray.method(concurrency_group="watch")(method)
    return marked


class _Process:
    """A process of its own for one part of a job, whose methods are called by name.

    The part is made by a call: of what a constructor raises, Ray keeps the text alone, and a mistake in the settings
    would look like a death. Calls of the group ``watch`` are answered by a thread of their own, whatever else goes on.
    """

    def __init__(self, mark: str) -> None:
        name, _, value = mark.partition("=")
        os.environ[name] = value  # whatever is started from here can be told by it
        self.stacks_file = tempfile.TemporaryFile()  # without a name: nothing stays behind
        faulthandler.register(signal.SIGUSR1, self.stacks_file, all_threads=True)

    def hello(self) -> tuple[int, str, int]:
        """Process id, Ray's node, and the descriptor of the file for stacks; before there is a part."""
        return os.getpid(), ray.get_runtime_context().get_node_id(), self.stacks_file.fileno()

    def make(self, part: Callable[..., Any], *arguments: Any) -> None:
        """Make the part."""
        self.part = part(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """One of the part's methods."""
        return getattr(self.part, method)(*arguments)

    @_watching
    def ping(self) -> None:
        """A sign of life."""

    @_watching
    def tell(self, method: str) -> None:
        """Call a method of the part while another call is under way. All that it may do is set a flag."""
        getattr(self.part, method)()

    @_watching
    def stacks(self) -> str:
        """Of all threads."""
        return stacks(os.getpid(), self.stacks_file.fileno())


def free_port(tried: Collection[int] = ()) -> int:
    """A TCP port that is free on the loopback address, none of ``tried``: the system may give the same one again."""
    while (port := _some_port()) in tried:
        pass
    return port


def _some_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def _call(death: type[Exception], result: Awaitable[T]) -> T:
    """Await a Ray call; a dead actor or engine becomes ``death``, what is meant for us is raised as it was inside."""
    try:
        return await result
    except RayTaskError as error:
        if isinstance(error.cause, UserError | DamagedWeights):  # Ray's own text has a traceback in it
            raise type(error.cause)(str(error.cause)) from None
        if isinstance(error.cause, EngineDied):
            raise death(str(error.cause)) from error
        raise
    except RayError as error:  # of an actor that is killed for want of memory Ray tells by an OutOfMemoryError
        raise death(str(error).strip().splitlines()[0]) from error


class Part:
    """The processes of one part of a job, and who looks after them: a hang is a death, and says what hung where."""

    def __init__(self, name: str, death: type[Exception], options: Sequence[Options], floor: float, events: EventLog):
        """``name``: of the part in events; ``death``: what any call raises once a process is gone; ``floor``: seconds
        of silence that are always allowed."""
        self.name, self.death, self.options, self.floor, self.events = name, death, options, floor, events
        self.actors: list[Any] = []
        self.dog = Watchdog([], floor)
        self.ray_lives = True  # else it is not to be asked: it would not answer for a long while
        self._mark = ""
        self._starts = Deadline(floor, first=START)
        self._watch: asyncio.Task[str] | None = None
        self._hang = ""  # what is known of the one that was found
        self._ended: float | None = None  # when the end of a process was noticed

    @property
    def pids(self) -> list[int]:
        """Process ids."""
        return [life.pid for life in self.dog.lives]

    async def start(self, make: Callable[[Sequence[Any]], Awaitable[Sequence[Awaitable[Any]]]]) -> None:
        """Start the processes, or start them again; ``make`` makes the parts in them and returns what to wait for."""
        self.close()
        self._mark = f"BEBOP_PART={uuid4().hex}"
        remote = ray.remote(concurrency_groups={"watch": 1})(_Process)
        actors = self.actors = [remote.options(**options).remote(self._mark) for options in self.options]
        ranks = [f"rank {i}" if len(actors) > 1 else "" for i in range(len(actors))]
        dog = self.dog = Watchdog([Life(name) for name in ranks], self.floor, start=self._starts.limit("start"))
        self._watch = asyncio.create_task(self._look(dog))
        begun = dog.clock.read()
        try:
            here = ray.get_runtime_context().get_node_id()
            hellos = await self._gather("start", [actor.hello.remote() for actor in actors])
            for life, (pid, node, descriptor) in zip(dog.lives, hellos, strict=True):
                life.pid, life.here, life.descriptor = pid, node == here, descriptor
            await self._gather("start", await make(actors))
            for life, actor in zip(dog.lives, actors, strict=True):
                life.ping = partial(_ping, actor)
        except BaseException:
            self.close()
            raise
        self._starts.took("start", dog.clock.read() - begun)
        if self._ended is not None:
            why = f"process {', '.join(map(str, self.pids))}"
            self.events.write("replaced", self.name, why, recover_s=time.monotonic() - self._ended)
            self._ended = None

    async def ask(self, i: int, kind: str, result: Awaitable[T], allowed: float = 0.0) -> T:
        """Await a call of process ``i``; ``allowed``: seconds that it may wait on purpose."""
        assert self._watch is not None, "not started"
        life, answer = self.dog.lives[i], asyncio.ensure_future(_call(self.death, result))
        try:
            with self.dog.calling(life, kind, allowed):
                await asyncio.wait([answer, self._watch], return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return answer.result()
                raise self.death(self._watch.result())
        except UserError:
            raise
        except Exception as error:
            if self._hang:  # whatever became of the call, that is why
                raise self.death(self._hang) from error
            if not isinstance(error, self.death):
                raise
            if self._ended is None:
                self._ended = time.monotonic()
                self.events.write("death", self.name, str(error), notice_s=self.dog.clock.read() - life.heard)
            raise
        finally:
            answer.cancel()

    async def all(self, kind: str, method: str, *arguments: Any) -> list[Any]:
        """Every process is asked the same; their answers."""
        return await self._gather(kind, [actor.call.remote(method, *arguments) for actor in self.actors])

    async def tell(self, method: str) -> None:
        """Tell every process something, whatever it is busy with."""
        await self._gather(method, [actor.tell.remote(method) for actor in self.actors])

    async def _gather(self, kind: str, results: Sequence[Awaitable[Any]]) -> list[Any]:
        """All answers. Of several failures a death counts: the others are its consequence, and may be told before."""
        tasks = [asyncio.create_task(self.ask(i, kind, result)) for i, result in enumerate(results)]
        try:
            done, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if others and not any(isinstance(task.exception(), self.death) for task in done):
                await asyncio.wait(others, timeout=GRACE_SECONDS)
            failed = [error for task in tasks if task.done() and (error := task.exception()) is not None]
            if failed:
                raise next((error for error in failed if isinstance(error, self.death)), failed[0])
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, dog: Watchdog) -> str:
        """Wait for a hang, and end what hangs; one line about it."""
        hang = await dog.watch()
        told = [await self._told(hang, life) for life in hang.lives]
        line = "; ".join(about for about, _ in told)
        if file := self.events.keep_stacks(self.name, "\n\n".join(f"{about}\n{dump}" for about, dump in told)):
            line += f"; stacks: {file}"
        self._ended, self._hang = time.monotonic(), line
        self.events.write("hang", self.name, line, silent_s=hang.silent, notice_s=hang.silent)
        for life in hang.lives:
            self._end(life)
        return line

    async def _told(self, hang: Hang, life: Life) -> tuple[str, str]:
        """What is known of a process that hangs, in a line, and its stacks."""
        who = f"{life.name} (process {life.pid})" if life.name else f"process {life.pid}"
        line = f"{who} is silent for {hang.silent:.0f} s{hang.what}"
        if life.here and stopped(life.pid):
            return f"{line}, stopped by a signal", "a stopped process cannot write its stacks"
        dump = ""
        if life.here:
            dump = await asyncio.to_thread(stacks, life.pid, life.descriptor)
        elif life.pid:
            with contextlib.suppress(TimeoutError, self.death):
                dump = await asyncio.wait_for(_call(self.death, self._actor(life).stacks.remote()), 2 * DUMP_SECONDS)
        where = place(dump, hang.hint)
        return line + (f", at {where}" if where else ""), dump or "it did not write its stacks"

    def _actor(self, life: Life) -> Any:
        return self.actors[self.dog.lives.index(life)]

    def _end(self, life: Life) -> None:
        """By Ray, which counts it as meant to end, and by the system: one that is stopped does not hear Ray."""
        if self.ray_lives:
            ray.kill(self._actor(life))
        if life.here:
            end([*descendants(life.pid), life.pid])

    def close(self) -> None:
        """End the processes and whatever they started."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        for life in self.dog.lives[: len(self.actors)]:
            self._end(life)
        if self._mark and any(life.here for life in self.dog.lives):
            end(marked(self._mark))
        self.actors, self._mark, self._hang = [], "", ""


def _ping(actor: Any) -> "asyncio.Future[Any]":
    answer = asyncio.ensure_future(asyncio.wrap_future(actor.ping.remote().future()))
    answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # a death is told by other calls
    return answer
