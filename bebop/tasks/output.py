"""Output of the user's code in its own process, a reward function or an environment: shown or stored."""

import contextlib
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

OUTPUT_LOG = "output.log"  # in the run folder
OUTPUT_BYTES, SHOWN_BYTES = 1 << 20, 1 << 12  # limits of a file, and of the standard error
LEFT_OUT = "[what is printed from here on is left out]\n"
LAST_SECONDS = 2.0  # time for the last lines of an ended process


class Output:
    """Output appended to a file up to ``OUTPUT_BYTES``, or shown on the standard error up to ``SHOWN_BYTES``.

    Several processes may write the same file. Its folder is not created here: until it exists, lines wait.
    """

    def __init__(self, path: Path | None) -> None:
        """Append to the file ``path``; None means the standard error."""
        self.path = path
        self._waiting, self._shown, self._lock = b"", 0, threading.Lock()
        self._thread: threading.Thread | None = None

    def follow(self, process: "subprocess.Popen[bytes]") -> None:
        """Read the output of a process to its end, in a thread: a full pipe would block the process."""
        assert process.stdout is not None
        self._thread = threading.Thread(target=self._follow, args=(process.stdout,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait for the last lines of an ended process; its children may still hold the pipe."""
        if self._thread is not None:
            self._thread.join(LAST_SECONDS)

    def _follow(self, pipe: IO[bytes]) -> None:
        with pipe:
            while line := pipe.readline(SHOWN_BYTES):
                with self._lock:
                    self._add(line)

    def _add(self, line: bytes) -> None:
        lines = self._waiting + line
        if self.path is None:
            room, self._shown = SHOWN_BYTES - self._shown, self._shown + len(line)
            if room > 0:
                shown = line.decode(errors="replace").rstrip("\n")
                sys.stderr.write(f"reward: {shown}\n" + LEFT_OUT * (len(line) >= room))
            return
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        except FileNotFoundError:  # the run folder is made once the whole job runs
            self._waiting = lines[:OUTPUT_BYTES]
            return
        except OSError:  # no reward depends on it
            return
        self._waiting = b""
        with open(descriptor, "ab", buffering=0) as file, contextlib.suppress(OSError):
            room = OUTPUT_BYTES - os.fstat(descriptor).st_size
            if room > 0:
                file.write(lines + LEFT_OUT.encode() * (len(lines) >= room))
