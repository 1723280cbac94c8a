"""Processes of this machine, as /proc tells of them: their state, their children, their stacks; and how they are ended.

Where there is no /proc nothing is known: nobody is stopped, and nobody has children.
"""

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
OURS = f"{Path(__file__).parent}/"
THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
DUMP_SECONDS = 3.0  # for a process to write its stacks
QUIET_SECONDS = 0.2  # without a further byte: they are complete


class Status(NamedTuple):
    """What the kernel says of a process."""

    name: str
    state: str  # R runs, S sleeps, D waits for a device, T is stopped, Z has ended
    parent: int
    used: int  # ticks of CPU time, its own and the system's for it
    started: int  # ticks since the machine started: tells it from a later process of the same number


def status(pid: int) -> Status | None:
    """Of a process; None if there is none."""
    try:
        head, _, rest = (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(")")
    except OSError:
        return None
    fields = rest.split()
    return Status(head.partition("(")[2], fields[0], int(fields[1]), int(fields[11]) + int(fields[12]), int(fields[19]))


def stopped(pid: int) -> bool:
    """Whether a signal or a debugger has stopped it."""
    found = status(pid)
    return found is not None and found.state in "Tt"


def cpu_ticks(pid: int) -> int:
    """CPU time that it has used; 0 where nothing is known."""
    found = status(pid)
    return 0 if found is None else found.used


def descendants(pid: int) -> list[int]:
    """Its children, theirs, and so on."""
    known = {child: of.parent for child in _all() if (of := status(child)) is not None}
    found = [pid]
    for one in found:
        found += [child for child, parent in known.items() if parent == one]
    return found[1:]


def marked(mark: str) -> list[int]:
    """Processes that were started with ``mark`` (``NAME=value``) in their environment, whoever their parent is now."""
    wanted, found = mark.encode(), []
    for pid in _all():
        with contextlib.suppress(OSError):
            if wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def end(pids: Iterable[int]) -> None:
    """Kill them, those that are stopped too."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def stacks(pid: int, descriptor: int) -> str:
    """What a process writes to its file ``descriptor`` on SIGUSR1 (see ``faulthandler``); empty if it does not."""
    file = PROC / str(pid) / "fd" / str(descriptor)
    try:
        before = size = file.stat().st_size
        os.kill(pid, signal.SIGUSR1)
        begun = grown = time.monotonic()
        while (now := time.monotonic()) < begun + DUMP_SECONDS and (size == before or now < grown + QUIET_SECONDS):
            time.sleep(QUIET_SECONDS / 10)
            if file.stat().st_size != size:
                size, grown = file.stat().st_size, now
        return file.read_bytes()[before:].decode(errors="replace")
    except OSError:
        return ""


def main_stack() -> str:
    """Of this process's main thread, as ``faulthandler`` writes it."""
    frame, lines = sys._current_frames().get(threading.main_thread().ident or 0), ["Current thread 0x0 (main)"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


def place(dump: str, hint: str) -> str:
    """Where the thread with ``hint`` in its stack is, as ``engine.py:12 in step``; empty if there is none.

    Of its lines the innermost of Bebop's own, since what waits for a lock is Python's.
    """
    threads = [part for part in THREAD.split(dump) if hint in part]
    frames = FRAME.findall(threads[0]) if threads else []
    if not frames:
        return ""
    file, line, function = next((frame for frame in frames if frame[0].startswith(OURS)), frames[0])
    return f"{Path(file).name}:{line} in {function}"


def _all() -> list[int]:
    try:
        return [int(name) for name in os.listdir(PROC) if name.isdecimal()]
    except OSError:
        return []
