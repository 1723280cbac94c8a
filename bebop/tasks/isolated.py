"""A child process for verifiers that may take for ever over what the model wrote.

``\\boxed{9^{9^{9}}}`` keeps sympy busy for ever, deep in C code that no thread can interrupt, and alarm signals only
work in a main thread while rewards are computed in others. So such verifiers run in a child that the kernel ends when
it has used its CPU time; a new one takes its place. CPU time, not wall time: a busy machine changes no reward. The
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

logger = logging.getLogger(__name__)

CPU_SECONDS = 3.0
MEMORY_BYTES = 2 << 30
COMMAND = "import sys; from bebop.tasks.isolated import serve; serve(int(sys.argv[1]), float(sys.argv[2]))"


class Isolated:
    """Calls a module-level function in a child process; thread-safe, one call at a time."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS) -> None:
        """Start nothing yet: the child comes with the first call."""
        self.cpu_seconds = cpu_seconds
        self._lock = threading.Lock()
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None

    def score(self, function: Callable[..., float], *args: object) -> float:
        """``function(*args)``, or 0.0 if it raised or used up its time or memory."""
        with self._lock:
            alive = self._child is not None and self._child[0].poll() is None
            process, connection = self._child if self._child is not None and alive else self._start()
            self._child = None  # until the reply is in: a call that is interrupted must not leave it to the next
            try:
                connection.send((function, args))
                result: float | str = connection.recv()
            except (EOFError, OSError) as error:
                connection.close()
                if process.wait() >= 0:  # not ended by a signal: a bug, e.g. the function cannot be imported there
                    raise RuntimeError(f"the verifier process failed with exit code {process.returncode}") from error
                logger.warning("a verifier was ended (signal %d), reward 0: %.80r", -process.returncode, args)
                return 0.0
            self._child = process, connection
        if isinstance(result, str):
            logger.debug("a verifier raised %s, reward 0: %.80r", result, args)
            return 0.0
        return result

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
