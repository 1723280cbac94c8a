"""A command in this process: its exit code, what it wrote, and what it left on the disk."""

import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from bebop.command import run_main

HANGING = 600  # seconds after which a process of its own counts as one that hangs, however busy the machine is


@contextmanager
def ended(
    main: Callable[..., int | None], arguments: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> Iterator[tuple[int, str, list[str]]]:
    """Exit code, stdout and lines of stderr of ``run_main(main)``; the process is as it was afterwards."""
    handlers, filters = list(logging.root.handlers), list(warnings.filters)
    argv, term, directory = sys.argv, signal.getsignal(signal.SIGTERM), tempfile.tempdir
    sys.argv = ["command", *arguments]
    capsys.readouterr()
    try:
        with pytest.raises(SystemExit) as left:
            run_main(main)
        assert isinstance(left.value.code, int)
        captured = capsys.readouterr()
        yield left.value.code, captured.out, captured.err.splitlines()
    finally:
        sys.argv, logging.root.handlers[:], tempfile.tempdir = argv, handlers, directory
        warnings.filters[:] = filters  # type: ignore[index]
        signal.signal(signal.SIGTERM, term)


def error_of(main: Callable[..., int | None], arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line, without ``error: ``, that a command refuses its arguments with."""
    with ended(main, arguments, capsys) as (code, out, lines):
        assert code == 2 and out == "" and len(lines) == 1 and lines[0].startswith("error: "), (code, out, lines)
        return lines[0].removeprefix("error: ")


def on_disk(folder: Path) -> dict[str, tuple[int, int]]:
    """Everything below a folder, with size and time."""
    found = [Path(place, name) for place, folders, files in os.walk(folder) for name in (*folders, *files)]
    return {str(path): (path.lstat().st_size, path.lstat().st_mtime_ns) for path in found}
