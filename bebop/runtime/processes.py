"""Processes of this machine: their state, their children and their stacks, and how to end them.

psutil raises if a process no longer exists; these functions return that as an ordinary result. psutil is imported
inside the functions: a machine that only measures on a GPU may lack it.
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

PACKAGE = f"{Path(__file__).parents[1]}/"
THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
DUMP_SECONDS = 3.0  # time limit for a process to write its stacks
QUIET_SECONDS = 0.2  # without a further byte, after which the stacks are complete


class Status(NamedTuple):
    """Kernel's view of a process: its name, state and parent."""

    name: str
    state: str  # one of psutil's STATUS_ words
    parent: int


def status(pid: int) -> Status | None:
    """Return the status of a process, or None if there is none."""
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return Status(process.name(), process.status(), process.ppid())
    except psutil.Error:
        return None


def start_ticks(pid: int) -> int:
    """Return when a process began, in ticks since the machine booted; 0 if there is no such process.

    The value distinguishes a process from a later one with the same id. psutil's ``create_time`` moves with the wall
    clock.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19])
    except OSError:
        return 0


def namespace() -> str:
    """Return a word for this start of this machine and this container, in which a process id has one meaning.

    It is empty if the system does not tell.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped a process."""
    import psutil

    found = status(pid)
    return found is not None and found.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)


def lives(pid: int) -> bool:
    """Return whether a process has not ended; a zombie has ended and waits for its parent."""
    import psutil

    found = status(pid)
    return found is not None and found.state != psutil.STATUS_ZOMBIE


def zombies(pid: int) -> int:
    """Return how many children of a process have ended and were not waited for.

    psutil would read every process of the machine, which takes milliseconds; the kernel lists children by thread.
    """
    import psutil

    children = set[int]()
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            children.update(map(int, listed.read_text().split()))
    found = map(status, children)
    return sum(child is not None and child.state == psutil.STATUS_ZOMBIE for child in found)


def cpu_ticks(pid: int) -> int:
    """Return the clock ticks of CPU time that a process has used, 0 if there is no such process."""
    import psutil

    try:
        used = psutil.Process(pid).cpu_times()
    except psutil.Error:
        return 0
    return round((used.user + used.system) * os.sysconf("SC_CLK_TCK"))


def descendants(pid: int) -> list[int]:
    """Return the ids of the children of a process, of their children, and so on."""
    import psutil

    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.Error:
        return []


def marked(mark: str) -> list[int]:
    """Return the processes that were started with ``mark`` (``NAME=value``) in their environment, orphans included."""
    import psutil

    name, _, value = mark.partition("=")
    found = psutil.process_iter(["environ"])  # of processes of others it is None
    return [process.pid for process in found if (process.info["environ"] or {}).get(name) == value]


def end(pids: Iterable[int]) -> None:
    """Kill processes, including stopped ones."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def stacks(pid: int, descriptor: int) -> str:
    """Return the stacks that a process writes to file ``descriptor`` on SIGUSR1 (``faulthandler``); empty if none."""
    file = Path(f"/proc/{pid}/fd/{descriptor}")
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
    """Return the stack of this process's main thread, in the format of ``faulthandler``."""
    frame, lines = sys._current_frames().get(threading.main_thread().ident or 0), ["Current thread 0x0 (main)"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)


def place(dump: str, hint: str) -> str:
    """Return where the thread with ``hint`` in its stack is, as ``engine.py:12 in step``; empty without such a thread.

    The innermost line of Bebop's own code counts: a thread that waits for a lock is in Python's own code.
    """
    threads = [part for part in THREAD.split(dump) if hint in part]
    frames = FRAME.findall(threads[0]) if threads else []
    if not frames:
        return ""
    file, line, function = next((frame for frame in frames if frame[0].startswith(PACKAGE)), frames[0])
    return f"{Path(file).name}:{line} in {function}"
