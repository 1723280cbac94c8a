"""A bad input given to the real command in this process, and what is wrong with how the command took it."""

import contextlib
import io
import logging
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn
from unittest.mock import patch

import torch

from bebop import adapt, cli, demo, export, run, simulate
from bebop.bench import __main__ as bench
from bebop.certify import __main__ as certify
from bebop.command import run_main
from bebop.config import docs as settings
from bebop.megatron_job import adapt as megatron_adapt
from bebop.megatron_job import convert as megatron_convert
from bebop.metrics import catalogue
from bebop.report import __main__ as report
from bebop.report.dashboards import __main__ as dashboards
from bebop.view import __main__ as view
from recipes import docs
from recipes.cluster import __main__ as cluster
from recipes.reproduce import __main__ as reproduce
from recipes.tiny import __main__ as tiny
from tests.bad_input.case import Case
from tests.commands import on_disk

Main = Callable[..., int | None]
COMMANDS: dict[str, Main] = {
    "bebop": cli.main, "demo": demo.main,
    "run": run.main, "adapt": adapt.main, "bench": bench.main, "report": report.main,
    "dashboards": dashboards.main, "reproduce": reproduce.main, "tiny": tiny.main, "certify": certify.main,
    "view": view.main, "export": export.main, "settings": settings.main, "catalogue": catalogue.main,
    "simulate": simulate.main, "cluster": cluster.main, "docs": docs.main,
    "megatron_job.adapt": megatron_adapt.main, "megatron_job.convert": megatron_convert.main,
}  # fmt: skip
# What can be wrong with how a command takes a bad input: unclear is all but one line on stderr that names the value.
KINDS = ("traceback", "exit code", "unclear", "written")
OF_LIBRARIES = ("hydra.cc", "object_type", "full_key", "in struct")  # of references alone Hydra's own word is shown
# Where a command has refused all that it refuses, and begins with work of minutes.
WORK = (
    "bebop.runtime.job.run_job", "bebop.adapt.begin", "bebop.simulate._simulated", "bebop.view.__main__._serve",
    "bebop.megatron_job.adapt.begin", "bebop.certify.__main__.write_down", "recipes.docs.draw",
    "bebop.demo.demo",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a command ended."""

    code: object  # exit status; the exception, where one came out
    out: str
    err: str
    written: tuple[str, ...]  # what is on the disk, or no longer, or changed


def outcome(main: Main, arguments: Sequence[str], folders: Sequence[Path]) -> Outcome:
    """Run a command to its end and look at everything in ``folders`` before and after."""
    before = _seen(folders)
    out, err = io.StringIO(), io.StringIO()
    with _as_command(arguments), redirect_stdout(out), redirect_stderr(err), _logged(err):
        try:
            run_main(main)
        except SystemExit as left:
            code: object = left.code
        except BaseException as error:  # what would be a traceback
            code = error
    after = _seen(folders)
    changed = sorted(path for path in before | after if before.get(path) != after.get(path))
    return Outcome(code=code, out=out.getvalue(), err=err.getvalue(), written=tuple(changed))


def faults(seen: Outcome, names: str) -> list[tuple[str, str]]:
    """What is wrong with how a command ended that had to refuse its input in one line with ``names`` in it.

    Each is one of KINDS, and what was seen.
    """
    lines = seen.err.splitlines()
    wrong = []
    if isinstance(seen.code, BaseException) or "Traceback" in seen.err:
        wrong.append(("traceback", repr(seen.code)))
    elif seen.code != 2:
        wrong.append(("exit code", str(seen.code)))
    if seen.out:
        wrong.append(("unclear", f"on stdout: {seen.out[:200]!r}"))
    if len(lines) != 1 or not lines[0].startswith("error: "):
        wrong.append(("unclear", f"{len(lines)} lines: {seen.err[:400]!r}"))
    elif names not in lines[0]:
        wrong.append(("unclear", f"{names!r} is not named: {lines[0]}"))
    elif "${" not in lines[0] and (words := [word for word in OF_LIBRARIES if word in lines[0]]):
        wrong.append(("unclear", f"{words} is a library's word: {lines[0]}"))
    if seen.written:
        wrong.append(("written", ", ".join(seen.written)))
    return wrong


def run_case(case: Case, folder: Path, temp: Path) -> Outcome:
    """A filled-in case in its working folder, with a folder of its own for temporary files."""
    was = os.getcwd()
    places = patch.dict(os.environ, {"TMPDIR": str(temp), **case.environment})
    with contextlib.ExitStack() as stack:
        for place in (places, patch.object(tempfile, "tempdir", None), *(patch(begun, _taken) for begun in WORK)):
            stack.enter_context(place)
        os.chdir(folder)
        try:
            return outcome(COMMANDS[case.command], case.arguments, (folder, temp))
        finally:
            os.chdir(was)


def _taken(*_: object) -> NoReturn:
    """Instead of a job of minutes: nothing that is wrong may come that far."""
    raise AssertionError("the job was about to start")


def _seen(folders: Sequence[Path]) -> dict[str, tuple[int, int]]:
    return {path: stat for folder in folders for path, stat in on_disk(folder).items()}


@contextmanager
def _logged(err: io.StringIO) -> Iterator[None]:
    """Libraries took hold of stderr as they were imported: what they say there belongs to it."""
    loggers = [one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)]
    handlers = [h for one in loggers for h in one.handlers if isinstance(h, logging.StreamHandler)]
    # One without a stream (torch's for traces) opens a file when it is needed, and takes any other for one.
    held = [(h, h.stream) for h in handlers if not isinstance(h, logging.FileHandler) and h.stream is not None]
    for handler, _ in held:
        handler.setStream(err)
    try:
        yield
    finally:
        for handler, stream in held:
            handler.setStream(stream)


@contextmanager
def _as_command(arguments: Sequence[str]) -> Iterator[None]:
    """The process is as it was afterwards."""
    handlers, filters = list(logging.root.handlers), list(warnings.filters)
    argv, term = sys.argv, signal.getsignal(signal.SIGTERM)
    interrupt, threads = signal.getsignal(signal.SIGINT), torch.get_num_threads()
    sys.argv, logging.root.handlers[:] = ["command", *arguments], []
    try:
        yield
    finally:
        sys.argv, logging.root.handlers[:] = argv, handlers
        warnings.filters[:] = filters  # type: ignore[index]
        signal.signal(signal.SIGTERM, term)
        signal.signal(signal.SIGINT, interrupt)
        torch.set_num_threads(threads)  # sums come out differently with another number
