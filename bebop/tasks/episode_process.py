"""An environment in a process of its own, which can be ended with all that it started, whatever it is doing.

The process imports the class once and plays one episode after another, with whatever the module remembers. It is no
sandbox. It is asked by pickles and replies by JSON, so that nothing in it runs in the process that asks. Only methods
in progress run: a task that an environment leaves behind in the event loop stands still until the next call.
"""

import asyncio
import contextlib
import ctypes
import io
import json
import os
import pickle
import secrets
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Coroutine, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from bebop.errors import UserError
from bebop.processes import descendants, end, marked
from bebop.tasks.environment import (
    Environment,
    EnvironmentLost,
    EnvStep,
    checked_messages,
    checked_step,
    load_class,
    one_line,
)
from bebop.tasks.output import Output

LOAD_SECONDS = 300.0  # for the import of the class's module
LEAVE_SECONDS = 2.0  # for a process to end by itself: once it has closed its pipe, or nobody is there to ask it
LOOK_SECONDS = 0.5  # between two looks whether it still runs: what it started may hold its pipe open
MESSAGE_BYTES = 64 << 20
SIZE = 8  # bytes that tell the length of a message
MARK = "BEBOP_ENVIRONMENT"  # in the environment of the process and of what it starts
COMMAND = "import sys; from bebop.tasks.episode_process import serve; serve(int(sys.argv[1]))"
PR_SET_CHILD_SUBREAPER = 36


class _Raised(Exception):
    """What an environment raised, as its own process saw it."""


class EnvironmentProcess:
    """One process, for one call at a time, used from one event loop. A call that ends early leaves it ``busy``."""

    def __init__(self, process: "subprocess.Popen[bytes]", mark: str) -> None:
        """Of ``started``."""
        self.process, self.mark = process, mark
        self.busy = False  # a reply is due: it cannot be asked any more
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter

    @classmethod
    async def started(
        cls, make: str, args: Mapping[str, Any], name: str, output: Output | None = None
    ) -> "EnvironmentProcess":
        """A process that has imported ``make``; ``UserError`` if it cannot, ``EnvironmentLost`` if it ended.

        ``output``: what reads all that it prints; None: it prints where this process does.
        """
        mark = f"{MARK}={secrets.token_hex(8)}"
        ours, theirs = socket.socketpair()
        path = os.pathsep.join(p for p in sys.path if p)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-u", "-c", COMMAND, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": path, MARK: mark.partition("=")[2]},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE if output else None,
                stderr=subprocess.STDOUT if output else None,
                start_new_session=True,  # Ctrl-C is the parent's business
            )
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
        """What a method returned: a list of messages, the fields of an ``EnvStep`` or None.

        ``UserError``, or ``EnvironmentLost`` if it raised or the process ended; it is ``busy`` after any of them.
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
        """Whether it is not there any more. Its number stays taken until ``end``, so that nobody else is killed."""
        return self.process.returncode is not None or self._status() is not None

    async def end(self) -> None:
        """Kill it with all that it started, and wait until it is gone."""
        with contextlib.suppress(AttributeError):  # it has no pipe yet
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
        """The reply; ``OSError`` if the process ended, even where its pipe is still open."""
        task = asyncio.create_task(replying)
        try:
            gone = False
            while not (await asyncio.wait({task}, timeout=LOOK_SECONDS))[0]:
                if gone:  # and its last words are read
                    raise ConnectionResetError("the process ended")
                gone = self.ended()
            return task.result()
        finally:
            task.cancel()

    async def _ending(self) -> str:
        """How it came to its end, in words."""
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
        """How it ended, without taking notice of it; None while it runs."""
        return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)


def end_tree(pid: int, mark: str, spare: int = 0) -> None:
    """Kill a process, what it started, what that started, and whoever else bears ``mark``; but not ``spare``.

    They are stopped first, until no new one is found: what does not run starts nothing, and its children stay its own.
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


# ---- the process


def serve(descriptor: int) -> None:
    """The process: import the class, answer calls until the parent goes away."""
    os.set_inheritable(descriptor, False)
    with contextlib.suppress(AttributeError, OSError):  # Linux alone: children of children that end stay in our tree
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    threading.Thread(target=_follow, args=(descriptor,), daemon=True).start()
    with contextlib.suppress(OSError):  # the parent is gone
        _answer(descriptor)
    _end_own()


def _answer(descriptor: int) -> None:
    """Answer calls until the parent goes away, then close what is open."""
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
    """Carries calls out."""

    def __init__(self) -> None:
        self.make, self.args, self.name = "", dict[str, Any](), ""
        self.environment: Environment | None = None

    async def play(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """One call, as something that JSON can hold."""
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
    """The next call; None once the parent is gone."""
    size = int.from_bytes(stream.read(SIZE), "little")
    message = stream.read(size)
    return pickle.loads(message) if 0 < size == len(message) else None


def _follow(descriptor: int) -> NoReturn:
    """End this process and all that it started soon after the parent is gone, even where a call hangs.

    A call that never lets go of the interpreter, one in C, is not ended before it returns.
    """
    watch = select.poll()
    watch.register(descriptor, 0)  # a hang-up is always reported
    watch.poll()
    time.sleep(LEAVE_SECONDS)
    _end_own()


def _end_own() -> NoReturn:
    """End this process and all that it started."""
    end_tree(os.getpid(), f"{MARK}={os.environ[MARK]}", spare=os.getpid())
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("unreachable")
