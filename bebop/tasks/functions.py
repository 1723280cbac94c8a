"""A user's reward function, in a process of its own that can be ended: it may hang, exit, crash or be killed.

The process imports the function once and keeps it, with whatever the function remembers between calls. It is no
sandbox. Time is wall time, since a function may wait for a server. What it prints goes to a file, up to a limit.
"""

import difflib
import importlib
import math
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

from bebop.errors import UserError
from bebop.tasks.output import Output
from bebop.tasks.user_files import load_file

LOAD_SECONDS = 300.0  # for the import of the function's module, which may load a model
LEAVE_SECONDS = 2.0  # for the process to end by itself once nobody is there to ask it
COMMAND = "import sys; from bebop.tasks.functions import serve; serve(int(sys.argv[1]), sys.argv[2])"
ALLOWED = "auto, math_verify, package.module.function or path/to/file.py:function"


class RewardTimeout(Exception):
    """A reward took longer than ``task.reward_timeout``; its process was ended."""


class _Raised(Exception):
    """What the function raised, as its own process saw it."""


class UserFunction:
    """Calls a function in its process, one call at a time; thread-safe. A process that ended is replaced."""

    def __init__(self, spec: str, timeout: float, output: Path | None = None) -> None:
        """Import ``spec`` (``package.module.function`` or ``path/to/file.py:function``) there; ``UserError``.

        ``output``: the file for what it prints; None: the standard error.
        """
        if spec.endswith(".py"):
            raise UserError(f"task.reward={spec!r} names a file and no function in it: give {spec}:FUNCTION")
        where, _, name = spec.rpartition(":" if ":" in spec else ".")
        if not where or not name:
            raise UserError(f"task.reward={spec!r} is not possible: give {ALLOWED}")
        if ":" in spec and (Path(where).suffix != ".py" or not Path(where).is_file()):
            raise UserError(f"task.reward={spec!r}: there is no Python file {where!r}")
        self.spec, self.timeout, self.output = spec, timeout, Output(output)
        self._lock = threading.Lock()
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = self._start()

    def __call__(self, text: str, item: dict[str, Any], where: str) -> float:
        """The function's number for an answer; ``RewardTimeout``, or ``UserError`` that names the call as ``where``."""
        with self._lock:
            alive = self._child is not None and self._child[0].poll() is None
            process, connection = self._child if self._child is not None and alive else self._start()
            self._child = None  # until the reply is in: a call that is interrupted must not leave it to the next
            try:
                connection.send((text, item))
                late = not connection.poll(self.timeout)
                kind, *reply = ("late",) if late else connection.recv()
            except (EOFError, OSError) as error:
                raise UserError(f"{where} {_ending(process)}: it has to return a number") from error
            if late:
                _kill(process, connection)
                raise RewardTimeout(f"{where} took more than task.reward_timeout={self.timeout:g} s")
            self._child = process, connection
        if kind == "raised":
            raise UserError(f"{where} raised {reply[0]}") from _Raised(reply[1])
        if kind != "value" or not math.isfinite(reply[0]):
            raise UserError(f"{where} returned {str(reply[0])[:80]!r}: a finite number is wanted")
        return float(reply[0])

    def close(self) -> None:
        """End the process."""
        if (child := getattr(self, "_child", None)) is not None:
            self._child = None
            _kill(*child)
            self.output.close()

    __del__ = close

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        """A process that has imported the function; ``UserError`` if it cannot be imported."""
        ours, theirs = Pipe()
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", COMMAND, str(theirs.fileno()), self.spec],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is the parent's business; and what it starts can be ended with it
        )
        theirs.close()
        self.output.follow(process)
        try:
            problem = ours.recv() if ours.poll(LOAD_SECONDS) else f"takes more than {LOAD_SECONDS:.0f} s to import"
        except (EOFError, OSError):
            problem = f"cannot be imported: it {_ending(process)}"
        if problem is not None:
            _kill(process, ours)
            self.output.close()
            raise UserError(f"task.reward={self.spec!r} {problem}")
        return process, ours


def _ending(process: "subprocess.Popen[bytes]") -> str:
    """How a process that hung up came to its end, in words."""
    try:
        code = process.wait(LEAVE_SECONDS)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    if code >= 0:
        return f"ended its process with exit code {code}"
    name = signal.Signals(-code).name
    return f"was ended by signal {-code} ({name})" + (", as when memory is short" if name == "SIGKILL" else "")


def _kill(process: "subprocess.Popen[bytes]", connection: Connection) -> None:
    """End a process with all that it started."""
    connection.close()
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def serve(descriptor: int, spec: str) -> None:
    """The process: import the function, answer calls until the parent goes away."""
    connection = Connection(descriptor)
    threading.Thread(target=_follow, args=(descriptor,), daemon=True).start()
    try:
        function = load(spec)
    except UserError as error:
        connection.send(str(error))
        return
    except BaseException as error:  # importing runs the user's code, which may raise anything, SystemExit too
        connection.send(f"cannot be imported: {_one_line(error)}")
        return
    connection.send(None)
    while True:
        try:
            text, item = connection.recv()
        except (EOFError, OSError):
            return
        try:
            value = function(text, item)
            real = isinstance(value, Real)
            reply: tuple[Any, ...] = ("value", float(value)) if real else ("other", str(value)[:200])
        except BaseException as error:
            reply = ("raised", _one_line(error), traceback.format_exc())
        connection.send(reply)


def _follow(descriptor: int) -> NoReturn:
    """End this process and its children soon after the parent is gone, even where a call hangs."""
    watch = select.poll()
    watch.register(descriptor, 0)  # a hang-up is always reported
    watch.poll()
    time.sleep(LEAVE_SECONDS)
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("unreachable")


def load(spec: str) -> Callable[[str, dict[str, Any]], Any]:
    """The function behind ``package.module.function`` or ``path/to/file.py:function``; ``UserError`` without."""
    where, _, name = spec.rpartition(":" if ":" in spec else ".")
    module = load_file(Path(where), "reward") if ":" in spec else importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [k for k, v in vars(module).items() if callable(v)])
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UserError(f"is not possible: {where} has no function {name!r}{hint}")
    return function


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
