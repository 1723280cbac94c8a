"""Entry points of all commands: argument parsing and exit codes.

The exit code is 0 when the command did its work, 2 with one line on stderr for a fault that the user can fix, and 130
when it was interrupted. A traceback is a bug of ours.
"""

import argparse
import errno
import logging
import os
import shlex
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from bebop.errors import UserError

FULL = (errno.ENOSPC, errno.EDQUOT)
CLOSED = (errno.EROFS, errno.EACCES, errno.EPERM)
# Errors of a disk; other OSErrors (a refused connection, too many open files) mean something else.
DISK = (*FULL, *CLOSED, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ENOENT)
# torch and safetensors raise their own errors if a write fails, recognisable only by their text.
FAILED_WRITES = ("inline_container", "I/O error", "iostream error")
INTERRUPTED = 130


def run_main(main: Callable[[list[str]], int | None], arguments: Sequence[str] | None = None) -> NoReturn:
    """Run an entry point with ``arguments`` (default: those of the process) and exit with its exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    warnings.filterwarnings("ignore", category=FutureWarning)
    _keep_cache()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # SIGTERM is an interrupt, so cleanup runs
    try:
        code = main(list(sys.argv[1:] if arguments is None else arguments)) or 0
    except UserError as error:
        code = _say(f"error: {error}", 2)
    except OSError as error:
        if error.errno not in DISK:
            raise
        code = _say(f"error: {_explained(error.filename or 'a file', error)}", 2)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # another interrupt must not print anything during the exit
        code = _say("interrupted", INTERRUPTED)
    # An interrupt in code given as text (dataclasses and namedtuples create their methods so) leaves a mark in
    # CPython: a ``python -m`` process then ends by SIGINT, whatever its exit code. Running another text clears it.
    exec("pass")
    sys.exit(code)


@contextmanager
def stoppable() -> Iterator[Callable[[], bool]]:
    """Only record the first Ctrl-C or SIGTERM while the block runs; a second one interrupts as usual.

    Yields:
        A function that returns whether one came. The block then saves its state, and the interrupt follows at its end.
    """
    came = False

    def note(number: int, frame: Any) -> None:
        nonlocal came
        if came:
            raise KeyboardInterrupt
        came = True
        sys.stderr.write("stopping after this step; a checkpoint will be written (once more to stop at once)\n")

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield lambda: False
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _keep_cache() -> None:
    """Give torch's compiler a permanent cache folder: by default it creates a temporary one on import."""
    place = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "bebop", "torchinductor")
    with suppress(UserError):  # without a writable home, torch's default is used
        check_writable("the cache", place)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(place))


def _say(text: str, code: int) -> int:
    sys.stderr.write(" ".join(text.split()) + "\n")
    return code


@contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turn disk errors while the block writes ``path`` into a ``UserError`` that advises what to do."""
    try:
        yield
    except OSError as error:
        raise UserError(_explained(path, error)) from error
    except Exception as error:
        if not any(mark in str(error) for mark in FAILED_WRITES):
            raise
        raise UserError(_explained(path, _refused(path, error))) from error


def _refused(path: Path | str, error: Exception) -> OSError:
    """Return the system error behind a library's error."""
    if isinstance(error.__context__, OSError):
        return error.__context__
    number = next((n for n in DISK if f"os error {n})" in str(error)), None)
    if number is None:
        place = next(p for p in (Path(path), *Path(path).absolute().parents) if p.is_dir())
        number = errno.ENOSPC if os.statvfs(place).f_bavail * os.statvfs(place).f_frsize < 1 << 20 else errno.EIO
    return OSError(number, os.strerror(number))


def _explained(path: Path | str, error: OSError) -> str:
    advice = "choose another place"
    if error.errno in FULL:
        advice = "free some space and go on from the last checkpoint, or choose another place"
    elif error.errno in CLOSED:
        advice = "choose a place that this user may write to"
    elif error.errno == errno.EFBIG:
        advice = "raise the limit on the size of files (ulimit -f)"
    return f"{str(path)!r} cannot be written: {error.strerror or error}; {advice}"


def check_writable(setting: str, folder: Path) -> None:
    """Raise ``UserError`` unless ``folder`` can be created or written to; creates nothing."""
    name = f"{setting}={str(folder)!r}"
    try:
        there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
        reason = None if there.is_dir() else errno.ENOTDIR
        if reason is None and not os.access(there, os.W_OK | os.X_OK):
            reason = errno.EACCES
        if reason is None and os.statvfs(there).f_flag & os.ST_RDONLY:  # for root the permission check always passes
            reason = errno.EROFS
        space = os.statvfs(there)
        if reason is None and space.f_blocks and not space.f_bavail:
            reason = errno.ENOSPC
        if reason is None and max(len(os.fsencode(part)) for part in folder.absolute().parts) > 255:
            reason = errno.ENAMETOOLONG
    except OSError as error:
        reason = error.errno
    if reason is not None:
        raise UserError(f"{name} cannot be made: {os.strerror(reason)}")


def shown_command(name: str, *arguments: str) -> str:
    """Return a command of this package as a user would type it, for messages and pages.

    >>> shown_command("view", "runs/my run")
    "python -m bebop.view 'runs/my run'"
    """
    return shlex.join(["python", "-m", f"bebop.{name}", *arguments])


def shown_path(path: Path) -> Path:
    """Return a path as a user would type it here: relative if it lies below the working directory.

    A link keeps its own name, for instance that of a run's newest model.
    """
    here, there = Path.cwd(), path.parent.resolve() / path.name
    return there.relative_to(here) if there.is_relative_to(here) else path


class Parser(argparse.ArgumentParser):
    """Argument parser for options with dashes; a mistake raises one ``UserError`` instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        """Raise ``UserError`` with the message; argparse calls this."""
        raise UserError(f"{message}; see {self.prog} --help")


def whole(lowest: int, most: int = 1 << 16) -> Callable[[str], int]:
    """Return an argument type for ``add_argument``: whole numbers from ``lowest`` to ``most``."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text[:80]!r} is not possible: a whole number is wanted here") from None
        if not lowest <= value <= most:
            raise argparse.ArgumentTypeError(f"{text[:80]} is not possible: give a number from {lowest} to {most}")
        return value

    return read
