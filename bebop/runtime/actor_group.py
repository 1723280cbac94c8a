"""Ray actors of one part of a job: starts, calls, watches and ends them.

Invariants of an ``ActorGroup``:

- If a process ends for any reason, a call to it raises the exception ``death`` of the group.
- A hang counts as a death: a watchdog detects it, reports where the process hangs, and ends the process.
- ``close`` ends the processes with everything that they started, stopped processes included.
"""

import asyncio
import contextlib
import faulthandler
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import ray
from ray.exceptions import RayError, RayTaskError

from bebop.driver.protocols import DamagedWeights
from bebop.errors import UserError
from bebop.rollout.engine import EngineDied
from bebop.runtime.events import EventLog
from bebop.runtime.processes import DUMP_SECONDS, descendants, end, marked, place, stacks, stopped
from bebop.runtime.watchdog import START, Deadline, Hang, ProcessHealth, Watchdog

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
CALL_HINT = f'{Path(__file__).name}", line'  # in the stack of the thread that serves calls
GRACE_SECONDS = 5.0  # for a death to be reported after a failure that may be its consequence
Options = Mapping[str, Any]  # of an actor, from ``runtime.job.reserve``


def _watchdog_call(method: F) -> F:
    """Run this method in a separate thread, so that it answers while other calls are in progress."""
    separate: F = ray.method(concurrency_group="watch")(method)
    return separate


def _transfer_call(method: F) -> F:
    """Run this method in another separate thread, one call after another."""
    separate: F = ray.method(concurrency_group="transfer")(method)
    return separate


class _Process:
    """Ray actor that holds one part of a job and calls its methods by name.

    The part is created by a call, not in the constructor. Ray keeps only the text of a constructor's exception, so a
    mistake in the settings would look like a death.
    """

    def __init__(self, label: str, mark: str) -> None:
        self.label = label
        name, _, value = mark.partition("=")
        os.environ[name] = value  # child processes inherit it and can be found by it
        self.stacks_file = tempfile.TemporaryFile()  # without a name, so no file is left behind
        faulthandler.register(signal.SIGUSR1, self.stacks_file, all_threads=True)

    def __repr__(self) -> str:
        return self.label  # Ray shows it in its dashboard, in its logs and as the title of the process

    def handshake(self) -> tuple[int, str, int]:
        """Return the process id, the id of Ray's node, and the descriptor of the file for stacks."""
        return os.getpid(), ray.get_runtime_context().get_node_id(), self.stacks_file.fileno()

    def meeting(self) -> str:
        """Create a file by which processes of this machine meet, and return its address for torch.distributed.

        A port would be open to everybody. The file has no name and ends with this process, however that ends.
        """
        self.meeting_file = tempfile.TemporaryFile()
        return f"file:///proc/{os.getpid()}/fd/{self.meeting_file.fileno()}"

    def make(self, part: Callable[..., Any], *arguments: Any) -> None:
        """Create the part by calling ``part`` with the arguments."""
        self.part = part(*arguments)

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the part."""
        return getattr(self.part, method)(*arguments)

    @_transfer_call
    def transfer(self, method: str, *arguments: Any) -> Any:
        """Call a method of the part that sends or receives weights, while other calls may be in progress."""
        return getattr(self.part, method)(*arguments)

    @_watchdog_call
    def ping(self) -> None:
        """Return at once, as a sign of life."""

    @_watchdog_call
    def tell(self, method: str) -> None:
        """Call a method of the part while another call is in progress; the method may only set a flag."""
        getattr(self.part, method)()

    @_watchdog_call
    def stacks(self) -> str:
        """Return the stacks of all threads."""
        return stacks(os.getpid(), self.stacks_file.fileno())


async def _call(death: type[Exception], result: Awaitable[T]) -> T:
    """Await a Ray call; raise ``death`` for a dead actor or engine, and user errors as they were raised."""
    try:
        return await result
    except RayTaskError as error:
        if isinstance(error.cause, UserError | DamagedWeights):  # Ray's own text has a traceback in it
            raise type(error.cause)(str(error.cause)) from None
        if isinstance(error.cause, EngineDied):
            raise death(str(error.cause)) from error
        raise
    except RayError as error:  # an actor that is killed for lack of memory raises OutOfMemoryError
        raise death(str(error).strip().splitlines()[0]) from error


def actor_names(part: str, ranks: int = 1) -> tuple[str, list[str]]:
    """Return Ray's class name and actor names for a part; several ranks are numbered.

    >>> actor_names("rollout worker 3"), actor_names("trainer", 2)
    (('RolloutWorker', ['RolloutWorker(3)']), ('Trainer', ['Trainer(0)', 'Trainer(1)']))
    """
    words, number = part.split(), None
    if words[-1].isdigit():
        *words, number = words
    kind = "".join(word.capitalize() for word in words)
    if ranks > 1:
        return kind, [f"{kind}({rank})" for rank in range(ranks)]
    return kind, [kind if number is None else f"{kind}({number})"]


class ActorGroup:
    """Group of one or more actors that live and die together, with a watchdog."""

    def __init__(self, name: str, death: type[Exception], options: Sequence[Options], floor: float, events: EventLog):
        """Describe the group; ``start`` starts it.

        Args:
            name: name of the part in events.
            death: exception that every call raises once a process is gone.
            options: Ray's options of each actor.
            floor: seconds of silence that are always allowed (``runtime.hang_after``).
            events: log of deaths and hangs.
        """
        self.name, self.death, self.options, self.floor, self.events = name, death, options, floor, events
        self.actors: list[Any] = []
        self.nodes: list[str] = []  # Ray's ids of the actors' machines at their last start
        self.watchdog = Watchdog([], floor)
        self.ray_lives = True  # if False, Ray is not called: a dead Ray takes a long time to answer
        self._mark = ""
        self._starts = Deadline(floor, first=START)
        self._watching: asyncio.Task[str] | None = None
        self._hang = ""  # the hang that was found, in one line
        self._ended: float | None = None  # when the end of a process was noticed

    @property
    def pids(self) -> list[int]:
        """Return the process ids of all actors."""
        return [process.pid for process in self.watchdog.processes]

    @property
    def incarnation(self) -> str:
        """Return the id of the current start of the processes; empty if none run."""
        return self._mark

    async def start(self, make: Callable[[Sequence[Any]], Awaitable[Sequence[Awaitable[Any]]]]) -> None:
        """Start the processes, or start them again.

        ``make`` receives the actors, creates the parts in them and returns the calls to wait for.
        """
        self.close()
        self._mark = f"BEBOP_PART={uuid4().hex}"
        kind, labels = actor_names(self.name, len(self.options))
        remote = ray.remote(concurrency_groups={"watch": 1, "transfer": 1})(type(kind, (_Process,), {}))
        made = zip(self.options, labels, strict=True)
        actors = self.actors = [remote.options(**options).remote(label, self._mark) for options, label in made]
        processes = [ProcessHealth(f"rank {i}" if len(actors) > 1 else "") for i in range(len(actors))]
        watchdog = self.watchdog = Watchdog(processes, self.floor, start=self._starts.limit("start"))
        self._watching = asyncio.create_task(self._watch(watchdog))
        begun = watchdog.clock.read()
        try:
            here = ray.get_runtime_context().get_node_id()
            replies = await self._gather("start", [actor.handshake.remote() for actor in actors])
            self.nodes = [node for _, node, _ in replies]
            for process, (pid, node, descriptor) in zip(processes, replies, strict=True):
                process.pid, process.local, process.descriptor = pid, node == here, descriptor
            await self._gather("start", await make(actors))
            for process, actor in zip(processes, actors, strict=True):
                process.ping = partial(_ping, actor)
        except BaseException:
            self.close()
            raise
        self._starts.record("start", watchdog.clock.read() - begun)
        if self._ended is not None:
            why = f"process {', '.join(map(str, self.pids))}"
            self.events.write("replaced", self.name, why, recover_s=time.monotonic() - self._ended)
            self._ended = None

    async def ask(self, i: int, kind: str, result: Awaitable[T], allowed: float = 0.0) -> T:
        """Await a call to process ``i``, which may wait ``allowed`` extra seconds."""
        assert self._watching is not None, "not started"
        watching = self._watching
        process, answer = self.watchdog.processes[i], asyncio.ensure_future(_call(self.death, result))
        try:
            with self.watchdog.calling(process, kind, allowed):
                await asyncio.wait([answer, watching], return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    return answer.result()
                raise self.death("it was closed" if watching.cancelled() else watching.result())
        except UserError:
            raise
        except Exception as error:
            if watching is not self._watching:  # the group was closed on purpose; it may have new processes by now
                raise self.death("it was closed") from error
            if self._hang:  # whatever the call raised, the hang is the reason
                raise self.death(self._hang) from error
            if not isinstance(error, self.death):
                raise
            if self._ended is None:
                self._ended = time.monotonic()
                unseen = self.watchdog.clock.read() - process.last_seen
                self.events.write("death", self.name, str(error), notice_s=unseen)
            raise
        finally:
            answer.cancel()

    async def ask_all(self, kind: str, method: str, *arguments: Any) -> list[Any]:
        """Call the same method of the part in every process and return the results."""
        return await self._gather(kind, [actor.call.remote(method, *arguments) for actor in self.actors])

    async def tell_all(self, method: str) -> None:
        """Call a method that sets a flag in every process, while other calls may be in progress."""
        await self._gather(method, [actor.tell.remote(method) for actor in self.actors])

    async def _gather(self, kind: str, results: Sequence[Awaitable[Any]]) -> list[Any]:
        """Await one call to each process. Of several failures a death is raised, even if it is reported later."""
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

    async def _watch(self, watchdog: Watchdog) -> str:
        """Wait for a hang, end the hanging processes, and return a one-line description."""
        hang = await watchdog.watch()
        reports = [await self._describe(hang, process) for process in hang.processes]
        line = "; ".join(about for about, _ in reports)
        if file := self.events.keep_stacks(self.name, "\n\n".join(f"{about}\n{dump}" for about, dump in reports)):
            line += f"; stacks: {file}"
        self._ended, self._hang = time.monotonic(), line
        self.events.write("hang", self.name, line, silent_s=hang.silent, notice_s=hang.silent)
        for process in hang.processes:
            self._end(process)
        return line

    async def _describe(self, hang: Hang, process: ProcessHealth) -> tuple[str, str]:
        """Return one line about a hanging process, and its stacks."""
        who = f"{process.name} (process {process.pid})" if process.name else f"process {process.pid}"
        line = f"{who} is silent for {hang.silent:.0f} s{hang.what}"
        if process.local and stopped(process.pid):
            return f"{line}, stopped by a signal", "a stopped process cannot write its stacks"
        dump = ""
        if process.local:
            dump = await asyncio.to_thread(stacks, process.pid, process.descriptor)
        elif process.pid:
            call = self._actor(process).stacks.remote()
            with contextlib.suppress(TimeoutError, self.death):
                dump = await asyncio.wait_for(_call(self.death, call), 2 * DUMP_SECONDS)
        where = place(dump, hang.hint or CALL_HINT)
        return line + (f", at {where}" if where else ""), dump or "it did not write its stacks"

    def _actor(self, process: ProcessHealth) -> Any:
        return self.actors[self.watchdog.processes.index(process)]

    def _end(self, process: ProcessHealth) -> None:
        """Kill a process through Ray, so that Ray does not restart it, and by signal, which also ends a stopped
        process.
        """
        if self.ray_lives:
            ray.kill(self._actor(process))
        if process.local:
            end([*descendants(process.pid), process.pid])

    def close(self) -> None:
        """End the processes and everything that they started."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        for process in self.watchdog.processes[: len(self.actors)]:
            self._end(process)
        if self._mark and any(process.local for process in self.watchdog.processes):
            end(marked(self._mark))
        self.actors, self._mark, self._hang = [], "", ""


def _ping(actor: Any) -> "asyncio.Future[Any]":
    answer = asyncio.ensure_future(asyncio.wrap_future(actor.ping.remote().future()))
    answer.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # other calls report a death
    return answer
