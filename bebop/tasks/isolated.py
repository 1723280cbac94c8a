"""A child process for verifiers that may take for ever over what the model wrote.

``\\boxed{9^{9^{9}}}`` keeps sympy busy for ever, deep in C code that no thread can interrupt, and alarm signals only
work in a main thread while rewards are computed in others. So such verifiers run in a child that the kernel ends when
it has used its CPU time; a new one takes its place. CPU time, not wall time: a busy machine changes no reward. A child
that is stopped, or sleeps, uses none: it is ended as well, and the answer, which is not to blame, tried once more. The
child bounds time and memory; it is no sandbox.
"""

import functools
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from bebop.processes import cpu_ticks

logger = logging.getLogger(__name__)

CPU_SECONDS = 3.0
STILL_SECONDS = 20.0  # without a reply and without any use of CPU time
ASKED = 2  # times, where the child is lost over an answer
MEMORY_BYTES = 2 << 30
COMMAND = "import sys; from bebop.tasks.isolated import serve; serve(int(sys.argv[1]), float(sys.argv[2]))"


class _Lost(Exception):
    """The child is gone, through no fault of what it was asked."""


class Isolated:
    """Calls a module-level function in a child process; thread-safe, one call at a time."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS, still_seconds: float = STILL_SECONDS) -> None:
        """Start nothing yet: the child comes with the first call."""
        self.cpu_seconds, self.still_seconds = cpu_seconds, still_seconds
        self._lock = threading.Lock()
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None

    def score(self, function: Callable[..., float], *args: object) -> float:
        """``function(*args)``, or 0.0 if it raised, used up its time or memory, or lost two children."""
        with self._lock:
            for _ in range(ASKED):
                try:
                    result = self._ask(function, args)
                    break
                except _Lost as lost:
                    why = f"a verifier {lost}"
                    logger.warning("%s: %.80r", why, args)
            else:
                result = why
        if isinstance(result, str):
            logger.debug("a verifier raised %s, reward 0: %.80r", result, args)
            return 0.0
        return result

    def _ask(self, function: Callable[..., float], args: tuple[object, ...]) -> float | str:
        """The reply, a text where there is no number; ``_Lost``."""
        alive = self._child is not None and self._child[0].poll() is None
        process, connection = self._child if self._child is not None and alive else self._start()
        self._child = None  # until the reply is in: a call that is interrupted must not leave it to the next
        try:
            connection.send((function, args))
            self._wait(process, connection)
            result: float | str = connection.recv()
        except (EOFError, OSError) as error:
            connection.close()
            if process.wait() >= 0:  # not ended by a signal: a bug, e.g. the function cannot be imported there
                raise RuntimeError(f"the verifier process failed with exit code {process.returncode}") from error
            if process.returncode == -signal.SIGKILL:
                raise _Lost("was killed") from error
            logger.warning("a verifier was ended (signal %d), reward 0: %.80r", -process.returncode, args)
            return "too long"
        self._child = process, connection
        return result

    def _wait(self, process: "subprocess.Popen[bytes]", connection: Connection) -> None:
        """Until there is a reply; ``_Lost``, with the child ended, if there is none and it does nothing for it."""
        used = cpu_ticks(process.pid)
        while not connection.poll(self.still_seconds):
            if (now := cpu_ticks(process.pid)) == used:
                connection.close()
                process.kill()
                process.wait()
                raise _Lost(f"was still for {self.still_seconds:.0f} s")
            used = now

    def close(self) -> None:
        """End the child."""
        with self._lock:
            if self._child is not None:
                process, connection = self._child
                connection.close()  # the child ends when it reads the end of the pipe
                process.wait()
                self._child = None

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = Pipe()
        path = os.pathsep.join(p for p in sys.path if p)
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", COMMAND, str(theirs.fileno()), str(self.cpu_seconds)],
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the parent's business
        )
        theirs.close()
        return process, ours


@functools.cache
def isolated() -> Isolated:
    """The child of this process, started when first used."""
    return Isolated()


def serve(descriptor: int, cpu_seconds: float) -> None:
    """The child: answer calls until the parent goes away."""
    connection = Connection(descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    logging.disable(logging.WARNING)  # math-verify warns that its own timeouts are off
    while True:
        try:
            function, args = connection.recv()  # imports the function's module, before the clock starts
        except (EOFError, OSError):
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # without a handler, SIGPROF ends the process
        try:
            result: float | str = function(*args)
        except Exception as error:  # whatever it was, the parent gives reward 0 and the child serves on
            result = type(error).__name__
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send(result)
