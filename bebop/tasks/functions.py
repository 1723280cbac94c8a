"""Functions in a child process that can be killed: reward functions of users, and slow verifiers.

``UserFunction`` calls a function of the user, which may hang, exit, crash or be killed. Its process imports the
function once and keeps it, with whatever the function remembers between calls. The limit is wall time, since a function
may wait for a server. Its output goes to a file, up to a limit.

``Isolated`` calls verifiers, which may take for ever over a completion: ``\\boxed{9^{9^{9}}}`` keeps sympy busy in C
code that no thread can interrupt, and alarm signals only reach the main thread, while rewards are computed in others.
The kernel ends the child once it has used its CPU time, and a new child replaces it. The limit is CPU time, not wall
time: a busy machine changes no reward. A child that is stopped or sleeps uses none. It is killed as well, and its call,
which is not to blame, is tried once more.

A child bounds time and memory; it is no sandbox. Pools of the standard library and of pebble run the parent's main
module again in every child, and break when an idle child is killed.
"""

import contextlib
import difflib
import functools
import importlib
import logging
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from bebop.errors import UserError
from bebop.runtime.processes import cpu_ticks
from bebop.tasks.output import Output
from bebop.tasks.signatures import Call, Function, Reply, Value, one_line

if TYPE_CHECKING:
    from bebop.config.job import RewardSignature

logger = logging.getLogger(__name__)

LOAD_SECONDS = 300.0  # time limit for the import of the function's module, which may load a model
LATE_SECONDS = 2.0  # time for a process to report which of several coroutines took too long
LEAVE_SECONDS = 2.0  # time for a process to end by itself once no more calls come
CPU_SECONDS = 3.0  # limit of a verifier
STILL_SECONDS = 20.0  # limit for a verifier that neither replies nor uses CPU time
ATTEMPTS = 2  # for a verifier whose child is lost
MEMORY_BYTES = 2 << 30  # limit of a verifier's process
MODULES = "bebop_"  # prefix of the names of modules from a user's files
ALLOWED = "auto, math_verify, package.module.function or path/to/file.py:function"


# ---- Python files of the user


class _NoBytecode(SourceFileLoader):
    """Loader that stores no bytecode: a refused job writes nothing, and a file changed within a second is reread."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """Write nothing, where importlib would write ``__pycache__``."""


def load_file(path: Path, kind: str) -> ModuleType:
    """Run a Python file as the module ``bebop_KIND_STEM`` and return it; raise whatever the file raises.

    The module is in ``sys.modules`` while it runs: dataclasses look there for the types of their fields.
    """
    name = f"{MODULES}{kind}_{path.stem}"
    loader = _NoBytecode(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "a file with a loader has a spec"
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


# ---- child processes


def start_python(
    module: str, function: str, pipe: int, *arguments: str, flags: Sequence[str] = (), **options: Any
) -> "subprocess.Popen[bytes]":
    """Call ``module.function(pipe, *arguments)`` in a Python process, which inherits the pipe.

    The process leads its own session: Ctrl-C only reaches the parent, and its children can be killed with it.
    """
    code = f"import sys; from {module} import {function}; {function}(int(sys.argv[1]), *sys.argv[2:])"
    return subprocess.Popen(
        [sys.executable, *flags, "-c", code, str(pipe), *arguments],
        pass_fds=[pipe],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), **options.pop("env", {})},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        **options,
    )


def follow_parent(pipe: int, end: Callable[[], NoReturn]) -> None:
    """Call ``end`` in a child soon after the parent has exited, even while another thread hangs.

    A C call that never releases the GIL delays this until it returns.
    """

    def wait() -> None:
        poll = select.poll()
        poll.register(pipe, 0)  # a hang-up is always reported
        poll.poll()
        time.sleep(LEAVE_SECONDS)
        end()

    threading.Thread(target=wait, daemon=True).start()


@dataclass(frozen=True, slots=True)
class _Child:
    process: "subprocess.Popen[bytes]"
    connection: Connection

    def kill(self) -> None:
        """Kill the process with all its children."""
        self.connection.close()
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ending(self) -> str:
        """Return in words how a process that closed its pipe ended."""
        try:
            code = self.process.wait(LEAVE_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its pipe"
        if code >= 0:
            return f"ended its process with exit code {code}"
        name = signal.Signals(-code).name
        return f"was ended by signal {-code} ({name})" + (", as when memory is short" if name == "SIGKILL" else "")


class _Caller:
    """Keeper of a child process between calls, for one call at a time; thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: _Child | None = None

    @contextlib.contextmanager
    def _lend(self) -> Iterator[_Child]:
        """Lend the child, or a new one if it ended. A call that raises loses its child, and with it any late reply."""
        with self._lock:
            child, self._child = self._child, None
            if child is None or child.process.poll() is not None:
                child = self._start()
            yield child
            self._child = child

    def _start(self) -> _Child:
        raise NotImplementedError


# ---- reward functions of users


class RewardTimeout(Exception):
    """Reward that took longer than ``task.reward_timeout``; its process was killed."""


class _Raised(Exception):
    """Traceback of an exception in a child process."""


class UserFunction(_Caller):
    """Function of the user, called in its own process. A process that ended is replaced."""

    def __init__(
        self, spec: str, timeout: float, output: Path | None = None, signature: "RewardSignature" = "auto"
    ) -> None:
        """Import ``spec`` (``package.module.function`` or ``path/to/file.py:function``) in a process; raise
        ``UserError`` on failure.

        ``timeout``: seconds for one call; ``output``: the file for its output; None: the standard error.
        """
        super().__init__()
        if spec.endswith(".py"):
            raise UserError(f"task.reward={spec!r} names a file and no function in it: give {spec}:FUNCTION")
        where, _, name = spec.rpartition(":" if ":" in spec else ".")
        if not where or not name:
            raise UserError(f"task.reward={spec!r} is not possible: give {ALLOWED}")
        if ":" in spec and (Path(where).suffix != ".py" or not Path(where).is_file()):
            raise UserError(f"task.reward={spec!r}: there is no Python file {where!r}")
        self.spec, self.timeout, self.output, self.asked = spec, timeout, Output(output), signature
        self.batched, self.is_async = False, False  # the process reports both
        self._child = self._start()

    def values(self, calls: Sequence[Call], places: Sequence[str]) -> list[Value | RewardTimeout]:
        """Return the function's value for each completion, or a ``RewardTimeout`` if it took too long.

        Args:
            calls: several at once only if the function is ``batched``; otherwise they are made one after another.
            places: start of the message of a ``UserError``, by completion: "reward f on prompt 7".
        """
        if not self.batched and len(calls) > 1:
            return [self.values([call], [place])[0] for call, place in zip(calls, places, strict=True)]
        replies = self._ask(calls, places)
        if replies is None and len(calls) > 1:  # one of them is to blame, but it is unknown which
            return [self.values([call], [place])[0] for call, place in zip(calls, places, strict=True)]
        late: Reply = ("late",)
        made = [late] * len(calls) if replies is None else replies
        return [self._value(reply, place) for reply, place in zip(made, places, strict=True)]

    def _ask(self, calls: Sequence[Call], places: Sequence[str]) -> list[Reply] | None:
        """Return the replies of the process; None if it did not answer in time and was killed."""
        with self._lend() as child:
            try:
                child.connection.send((list(calls), self.timeout))
                if not child.connection.poll(self.timeout + (LATE_SECONDS if self.is_async else 0.0)):
                    child.kill()
                    return None
                replies, stuck = child.connection.recv()
            except (EOFError, OSError) as error:
                raise UserError(f"{places[0]} {child.ending()}: it has to return a number") from error
            if stuck:
                child.kill()
        found: list[Reply] = replies
        return found

    def _value(self, reply: Reply, place: str) -> Value | RewardTimeout:
        match reply:
            case ("value", value):
                return value
            case ("late",):
                return RewardTimeout(f"{place} took more than task.reward_timeout={self.timeout:g} s")
            case ("raised", line, trace):
                raise UserError(f"{place} raised {line}") from _Raised(trace)
            case (_, message):
                raise UserError(f"{place} {message}")
        raise AssertionError(reply)

    def close(self) -> None:
        """Kill the process."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            self.output.close()

    __del__ = close

    def _start(self) -> _Child:
        """Start a process that imports the function; raise ``UserError`` if the import fails."""
        ours, theirs = Pipe()
        with theirs:
            streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            process = start_python(__name__, "serve", theirs.fileno(), self.spec, self.asked, flags=["-u"], **streams)
        child = _Child(process, ours)
        self.output.follow(process)
        try:
            said = ours.recv() if ours.poll(LOAD_SECONDS) else f"takes more than {LOAD_SECONDS:.0f} s to import"
        except (EOFError, OSError):
            said = f"cannot be imported: it {child.ending()}"
        if isinstance(said, str):
            child.kill()
            self.output.close()
            raise UserError(f"task.reward={self.spec!r} {said}")
        self.batched, self.is_async = said
        return child


def serve(pipe: int, spec: str, signature: "RewardSignature") -> None:
    """Import the function and answer calls until the parent exits. This is the child of ``UserFunction``."""
    connection = Connection(pipe)
    follow_parent(pipe, _kill_own_group)
    try:
        function = Function(load(spec), signature)
    except UserError as error:
        connection.send(str(error))
        return
    except BaseException as error:  # importing runs the user's code, which may raise anything, SystemExit too
        connection.send(f"cannot be imported: {one_line(error)}")
        return
    connection.send((function.batched, function.is_async))
    while True:
        try:
            calls, timeout = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(function.replies(calls, timeout))


def _kill_own_group() -> NoReturn:
    os.killpg(0, signal.SIGKILL)
    raise AssertionError("unreachable")


def load(spec: str) -> Callable[[str, dict[str, Any]], Any]:
    """Import ``package.module.function`` or ``path/to/file.py:function``; raise ``UserError`` if there is no such
    function.
    """
    where, _, name = spec.rpartition(":" if ":" in spec else ".")
    module = load_file(Path(where), "reward") if ":" in spec else importlib.import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        close = difflib.get_close_matches(name, [k for k, v in vars(module).items() if callable(v)])
        hint = f"; did you mean {' or '.join(close)}?" if close else ""
        raise UserError(f"is not possible: {where} has no function {name!r}{hint}")
    return function


# ---- verifiers


class _Lost(Exception):
    """The child is gone, through no fault of its call."""


class Isolated(_Caller):
    """Caller of module-level functions in a child process, which starts with the first call."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS, still_seconds: float = STILL_SECONDS) -> None:
        super().__init__()
        self.cpu_seconds, self.still_seconds = cpu_seconds, still_seconds

    def score(self, function: Callable[..., float], *args: object) -> float:
        """Return ``function(*args)``, or 0.0 if it raised, exceeded its time or memory, or lost two children."""
        result: float | str = ""
        for _ in range(ATTEMPTS):
            try:
                result = self._ask(function, args)
                break
            except _Lost as lost:
                result = f"a verifier {lost}"
                logger.warning("%s: %.80r", result, args)
        if isinstance(result, str):
            logger.debug("a verifier raised %s, reward 0: %.80r", result, args)
            return 0.0
        return result

    def _ask(self, function: Callable[..., float], args: tuple[object, ...]) -> float | str:
        """Return the reply, a text if it is no number; raise ``_Lost`` if the child is gone."""
        with self._lend() as child:
            try:
                child.connection.send((function, args))
                self._wait(child)
                result: float | str = child.connection.recv()
                return result
            except (EOFError, OSError) as error:
                child.connection.close()
                code = child.process.wait()
                if code >= 0:  # not ended by a signal: a bug, e.g. the function cannot be imported there
                    raise RuntimeError(f"the verifier process failed with exit code {code}") from error
                if code == -signal.SIGKILL:
                    raise _Lost("was killed") from error
            logger.warning("a verifier was ended (signal %d), reward 0: %.80r", -code, args)
            return "too long"

    def _wait(self, child: _Child) -> None:
        """Wait for a reply; kill the child and raise ``_Lost`` if it makes no progress."""
        used = cpu_ticks(child.process.pid)
        while not child.connection.poll(self.still_seconds):
            if (now := cpu_ticks(child.process.pid)) == used:
                child.kill()
                raise _Lost(f"was still for {self.still_seconds:.0f} s")
            used = now

    def close(self) -> None:
        """Close the pipe, which ends the child."""
        with self._lock:
            child, self._child = self._child, None
            if child is not None:
                child.connection.close()  # the child ends when it reads the end of the pipe
                child.process.wait()

    def _start(self) -> _Child:
        ours, theirs = Pipe()
        with theirs:
            threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
            options: dict[str, Any] = {"flags": ["-W", "ignore"], "env": threads, "stdout": subprocess.DEVNULL}
            process = start_python(__name__, "serve_verifiers", theirs.fileno(), str(self.cpu_seconds), **options)
        return _Child(process, ours)


@functools.cache
def isolated() -> Isolated:
    """Return the shared caller of verifiers of this process."""
    return Isolated()


def serve_verifiers(pipe: int, cpu_seconds: str) -> None:
    """Answer calls until the parent exits. This is the child of ``Isolated``."""
    connection = Connection(pipe)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.WARNING)  # math-verify warns that its own timeouts are off
    while True:
        try:
            function, args = connection.recv()  # imports the function's module, before the clock starts
        except (EOFError, OSError):
            return
        prepare = getattr(sys.modules[function.__module__], "prepare", None)
        if prepare is not None:  # libraries that a call would import
            with contextlib.suppress(Exception):  # the call itself will fail likewise, and is answered
                prepare(*args)
        signal.setitimer(signal.ITIMER_PROF, float(cpu_seconds))  # without a handler, SIGPROF ends the process
        try:
            result: float | str = function(*args)
        except Exception as error:  # for any error the parent gives reward 0, and the child continues
            result = type(error).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(result)
