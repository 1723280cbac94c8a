"""Environments in processes of their own, which can be killed with all their children at any time.

A process imports the class once and plays one episode after another; the module keeps its state in between. It is no
sandbox. Calls are pickles and replies are JSON, so no code of it runs in the calling process. Its event loop runs only
during a call: a task that an environment leaves behind is suspended until the next call.

A pool starts processes when they are needed, keeps idle ones, and bounds their number. What an environment leaves in
the background becomes a child of its process, and a zombie once it ends: nobody knows whether the environment will wait
for it. A process with many zombies is replaced.
"""

import asyncio
import contextlib
import ctypes
import io
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import time
import traceback
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from bebop.errors import UserError
from bebop.runtime.processes import descendants, end, marked, zombies
from bebop.tasks.environment import (
    Environment,
    EnvironmentKind,
    EnvironmentLost,
    EnvStep,
    Message,
    checked_messages,
    checked_step,
    load_class,
    one_line,
)
from bebop.tasks.functions import LEAVE_SECONDS, follow_parent, start_python
from bebop.tasks.output import Output

LOAD_SECONDS = 300.0  # time limit for the import of the class's module
POLL_SECONDS = 0.5  # between two checks that it still runs: its children may hold its pipe open
MESSAGE_BYTES = 64 << 20
SIZE = 8  # bytes in front of a message that hold its length
MAX_ZOMBIES = 31  # of a process that is kept: each holds a process id, and a container may have few
MARK = "BEBOP_ENVIRONMENT"  # in the environment of the process and of what it starts
PR_SET_CHILD_SUBREAPER = 36


class _Raised(Exception):
    """Traceback of an exception in the process of an environment."""


class EnvironmentProcess:
    """Process of an environment, for one call at a time, used from one event loop. A call that ends early leaves it
    ``busy``.
    """

    def __init__(self, process: "subprocess.Popen[bytes]", mark: str) -> None:
        self.process, self.mark = process, mark
        self.busy = False  # a reply is due: no further call is possible
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def start(
        cls, make: str, args: Mapping[str, Any], name: str, output: Output | None = None
    ) -> "EnvironmentProcess":
        """Start a process that imports ``make``; raise ``UserError`` if it cannot, ``EnvironmentLost`` if the process
        ended.

        ``output``: reads everything that it prints; None: it prints where this process does.
        """
        identifier = secrets.token_hex(8)
        mark = f"{MARK}={identifier}"
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT} if output else {}
        ours, theirs = socket.socketpair()
        with theirs:
            env = {MARK: identifier}
            process = start_python(__name__, "serve", theirs.fileno(), flags=["-u"], env=env, **streams)
        if output is not None:
            output.follow(process)
        made = cls(process, mark)
        try:
            made._reader, made._writer = await asyncio.open_connection(sock=ours)
            async with asyncio.timeout(LOAD_SECONDS):
                await made.ask("load", make, dict(args), name)
        except TimeoutError:
            await made.end()
            raise EnvironmentLost(f"takes more than {LOAD_SECONDS:g} s to import") from None
        except BaseException:
            await made.end()
            raise
        return made

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Call a method and return its result: a list of messages, the fields of an ``EnvStep`` or None.

        Raises ``UserError``, or ``EnvironmentLost`` if it raised or the process ended; either leaves the process
        ``busy``.
        """
        assert not self.busy, "one call at a time"
        self.busy = True
        try:
            self._writer.write(_framed(pickle.dumps((method, arguments))))
            reply = await self._while_it_runs(self._reply())
        except (asyncio.IncompleteReadError, OSError) as error:
            raise EnvironmentLost(f"its process {await self._ending()} in {method}") from error
        if "wrong" in reply:
            raise UserError(reply["wrong"])
        if "lost" in reply:
            raise EnvironmentLost(reply["lost"])
        if "raised" in reply:
            raise EnvironmentLost(f"{method} raised {reply['raised']}") from _Raised(reply["where"])
        self.busy = False
        return reply["value"]

    def ended(self) -> bool:
        """Return whether the process ended. Its id stays reserved until ``end``, so that ``end`` cannot kill another
        process.
        """
        return self.process.returncode is not None or self._status() is not None

    async def end(self) -> None:
        """Kill the process with all its children, and wait until it is gone."""
        with contextlib.suppress(AttributeError):  # no pipe yet
            self._writer.transport.abort()
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        if self.process.returncode is None:
            end_tree(self.process.pid, self.mark)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    async def _reply(self) -> dict[str, Any]:
        await self._writer.drain()
        size = int.from_bytes(await self._reader.readexactly(SIZE), "little")
        if size > MESSAGE_BYTES:
            raise EnvironmentLost(f"its process sent a message of {size} bytes")
        reply: dict[str, Any] = json.loads(await self._reader.readexactly(size))
        return reply

    async def _while_it_runs(self, replying: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
        """Return the reply; raise ``OSError`` if the process ended, even if its pipe is still open."""
        task = asyncio.create_task(replying)
        try:
            gone = False
            while not (await asyncio.wait({task}, timeout=POLL_SECONDS))[0]:
                if gone:  # and its last output was read
                    raise ConnectionResetError("the process ended")
                gone = self.ended()
            return task.result()
        finally:
            task.cancel()

    async def _ending(self) -> str:
        """Return in words how the process ended."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while (status := self._status()) is None:
            if time.monotonic() > deadline:
                return "closed its pipe"
            await asyncio.sleep(LEAVE_SECONDS / 100)
        if status.si_code == os.CLD_EXITED:
            return f"ended with exit code {status.si_status}"
        name = signal.Signals(status.si_status).name
        short = ", as when memory is short," if name == "SIGKILL" else ""
        return f"was ended by signal {status.si_status} ({name}){short}"

    def _status(self) -> "os.waitid_result | None":
        """Return its exit status without reaping it; None while it runs."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def end_tree(pid: int, mark: str, spare: int = 0) -> None:
    """Kill a process, its descendants and all processes marked with ``mark``, except ``spare``.

    They are stopped first, until no new one is found: a stopped process starts nothing, and its children stay its own.
    """
    found: set[int] = set()
    while new := {pid, *descendants(pid), *marked(mark)} - found - {spare}:
        for one in new:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGSTOP)
        found |= new
    end(found)


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(SIZE, "little") + message


# ---- the pool


class Pool:
    """Pool of at most ``limit`` processes of one kind, for one event loop."""

    def __init__(
        self, kind: EnvironmentKind, args: Mapping[str, Any], limit: int, output: Output | None = None
    ) -> None:
        """Configure the pool without starting a process.

        ``args``: arguments of the class; ``output``: reads what processes print, if given.
        """
        self.kind, self.args, self.output = kind, args, output
        self.room = asyncio.Semaphore(limit)
        self.idle: list[EnvironmentProcess] = []
        self.all: set[EnvironmentProcess] = set()

    async def take(self) -> EnvironmentProcess:
        """Wait for a free process, first come, first served; raises ``UserError``, ``EnvironmentLost``."""
        await self.room.acquire()
        try:
            while self.idle:
                process = self.idle.pop()
                if not process.ended():
                    return process
                await self._end(process)
            process = await EnvironmentProcess.start(self.kind.make, self.args, self.kind.name, self.output)
            self.all.add(process)
            return process
        except BaseException:
            self.room.release()
            raise

    async def give_back(self, process: EnvironmentProcess, keep: bool) -> None:
        """Keep a process for the next episode, or kill it."""
        try:
            if keep and not process.ended() and zombies(process.process.pid) <= MAX_ZOMBIES:
                self.idle.append(process)
            else:
                await self._end(process)
        finally:
            self.room.release()

    async def end(self) -> None:
        """Kill all processes."""
        self.idle.clear()
        await asyncio.gather(*[self._end(process) for process in [*self.all]])

    async def _end(self, process: EnvironmentProcess) -> None:
        self.all.discard(process)
        await process.end()


class Apart:
    """Environment in a process of the pool: call ``take`` before ``reset``, and ``close`` at the end."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.process: EnvironmentProcess | None = None

    async def take(self) -> None:
        """Wait for a free process."""
        self.process = await self.pool.take()

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """Return the first messages of a question."""
        return tuple(await self._ask("reset", item, seed))

    async def step(self, text: str) -> EnvStep:
        """Return the reply to a turn."""
        fields = await self._ask("step", text)
        return EnvStep(**{**fields, "messages": tuple(fields["messages"])})

    async def close(self, lost: bool) -> None:
        """Return the process to the pool; kill it if it is lost, or cannot close its environment."""
        if self.process is not None:
            process, self.process, keep = self.process, None, False
            try:
                if not lost:
                    await process.ask("close")
                    keep = True
            finally:
                await self.pool.give_back(process, keep)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """Return the reply; on failure kill the process at once, so that a late reply reaches nobody."""
        assert self.process is not None, "it was taken"
        try:
            return await self.process.ask(method, *arguments)
        except BaseException:
            await self.close(lost=True)
            raise


# ---- the process


def serve(descriptor: int) -> None:
    """Import the class and answer calls until the parent exits. This is the entry point of the process."""
    os.set_inheritable(descriptor, False)
    with contextlib.suppress(AttributeError, OSError):  # Linux only: orphaned grandchildren stay in our tree
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    follow_parent(descriptor, _end_own)
    with contextlib.suppress(OSError):  # the parent is gone
        _answer(descriptor)
    _end_own()


def _answer(descriptor: int) -> None:
    """Answer calls until the parent exits, then close the environment."""
    player = _Player()
    with asyncio.Runner() as runner, socket.socket(fileno=descriptor) as pipe, pipe.makefile("rwb") as stream:
        while (asked := _read(stream)) is not None:
            try:
                reply: dict[str, Any] = {"value": runner.run(player.play(*asked))}
            except UserError as error:
                reply = {"wrong": str(error)}
            except EnvironmentLost as error:
                reply = {"lost": str(error)}
            except BaseException as error:
                reply = {"raised": one_line(error), "where": traceback.format_exc()}
            stream.write(_framed(json.dumps(reply).encode()))
            stream.flush()
        with contextlib.suppress(Exception):
            runner.run(player.play("close", ()))


class _Player:
    """Executes the calls of ``EnvironmentProcess``."""

    def __init__(self) -> None:
        self.make, self.args, self.name = "", dict[str, Any](), ""
        self.environment: Environment | None = None

    async def play(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Execute one call and return a value that JSON can represent."""
        if method == "load":
            self.make, self.args, self.name = arguments
            load_class(self.make)
        elif method == "reset":
            self.environment = load_class(self.make)(**self.args)
            return checked_messages(await self.environment.reset(*arguments), self.name)
        elif method == "step":
            assert self.environment is not None, "it was begun"
            step: EnvStep = checked_step(await self.environment.step(*arguments), self.name)
            return asdict(step)
        elif self.environment is not None:
            environment, self.environment = self.environment, None
            await environment.close()
        return None


def _read(stream: io.BufferedRWPair) -> tuple[str, tuple[Any, ...]] | None:
    """Read the next call; None once the parent has exited."""
    size = int.from_bytes(stream.read(SIZE), "little")
    message = stream.read(size)
    return pickle.loads(message) if 0 < size == len(message) else None


def _end_own() -> NoReturn:
    """End this process and all its children."""
    end_tree(os.getpid(), f"{MARK}={os.environ[MARK]}", spare=os.getpid())
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("unreachable")
