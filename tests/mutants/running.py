"""Run tests against planted faults: libraries are imported once, then each fault gets a forked process of its own."""

import gc
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from tests.mutants.fault import ROOT, Fault
from tests.mutants.planting import plant

Outcome = Literal["killed", "survived", "error"]
LIMIT = 90  # seconds a child may take
UNLOADED, CRASHED = 98, 99  # exit statuses: the tests never imported the faulty module; the child itself failed
# Errors that a typing mistake raises: any test that runs the line at all would notice such a fault.
TYPO = re.compile(r"^E +(NameError|UnboundLocalError|SyntaxError|IndentationError|ImportError|AttributeError)", re.M)
FAILED = re.compile(r"^FAILED (\S+)", re.M)


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of the tests of one fault."""

    fault: Fault  # without an address if nothing was planted
    outcome: Outcome
    seconds: float
    detail: str  # the tests that failed, or the end of the output

    @property
    def expected(self) -> bool:
        """Whether the fault was killed, or survived as an equivalent one has to."""
        return self.outcome == ("survived" if self.fault.equivalent else "killed")


def preload() -> None:
    """Import the slow libraries. They may start no threads, as threads do not survive a fork."""
    os.chdir(ROOT)
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins of others (hydra's, anyio's) cost more than a test
    os.environ.setdefault("TRITON_INTERPRET", "1")  # as tests/conftest.py does, before transformers imports triton
    import hypothesis
    import numpy
    import pytest
    import scipy.stats
    import torch
    import torch.distributed.fsdp
    import torch.utils.tensorboard
    import transformers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM

    del numpy, pytest, scipy, transformers, AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2ForCausalLM
    torch.set_num_threads(1)
    # The same examples for every fault, and no database, so that a killed run leaves nothing behind.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # shrinking a failure would only cost time
    hypothesis.settings.register_profile("mutants", database=None, derandomize=True, phases=phases)
    hypothesis.settings.load_profile("mutants")
    gc.freeze()  # keeps the collector of every child off the pages it shares with the parent


def judge_all(faults: Sequence[Fault], jobs: int) -> Iterator[Result]:
    """Yield results as they come. ``jobs`` faults run at a time, each in a process of its own."""
    for fault in faults:
        fault.place()  # errors in the rows come up before anything runs
    yield from _pool([partial(_start, fault, fault.node_ids()) for fault in faults], jobs)


def without_fault(faults: Sequence[Fault], jobs: int) -> Iterator[Result]:
    """Run all tests of ``faults`` once on the sources as they are, in ``jobs`` parts. Every part has to survive."""
    tests = sorted({test for fault in faults for test in fault.node_ids()})
    # A whole file includes its functions. Tests of one file are neighbours, so each part gets some of every file.
    tests = [test for test in tests if "::" not in test or test.split("::")[0] not in tests]
    count = min(jobs, len(tests))  # pytest without arguments would run every test
    parts = [Fault(f"no fault ({i + 1}/{count})", "", "", "", (), "nothing is wrong") for i in range(count)]
    starts = [partial(_start, part, tests[i::count], limit=10 * LIMIT) for i, part in enumerate(parts)]
    yield from _pool(starts, jobs)


@dataclass(frozen=True, slots=True)
class _Running:
    """A child process that runs the tests of a fault."""

    fault: Fault
    process: int
    folder: "tempfile.TemporaryDirectory[str]"
    started: float

    def result(self, status: int) -> Result:
        """Return the result that the exit status stands for, and delete the folder."""
        output = (Path(self.folder.name) / "output").read_text(errors="replace")
        self.folder.cleanup()
        seconds = time.perf_counter() - self.started
        if status == 0:
            return Result(self.fault, "survived", seconds, ", ".join(self.fault.tests))
        if status == 1 and not TYPO.search(output):
            tests = ", ".join(FAILED.findall(output))
            why = "" if self.fault.address else f"\n{output[-2500:]}"  # a failure without a fault has to be explained
            return Result(self.fault, "killed", seconds, tests + why)
        what = {UNLOADED: "its tests do not import the module", -signal.SIGALRM: "timed out"}
        return Result(self.fault, "error", seconds, what.get(status, f"exit status {status}\n{output[-2500:]}"))


def _pool(starts: Sequence[Callable[[], _Running]], jobs: int) -> Iterator[Result]:
    """Keep ``jobs`` children running. There are no threads, as they would not survive a fork."""
    todo = list(reversed(starts))
    running: dict[int, _Running] = {}
    try:
        while todo or running:
            while todo and len(running) < jobs:
                child = todo.pop()()
                running[child.process] = child
            process, code = os.wait()
            yield running.pop(process).result(os.waitstatus_to_exitcode(code))
    finally:
        for child in running.values():  # after an interrupt
            os.kill(child.process, signal.SIGKILL)
            os.waitpid(child.process, 0)
            child.folder.cleanup()


def _start(fault: Fault, tests: Sequence[str], limit: int = LIMIT) -> _Running:
    """Fork a child that plants the fault (nothing if it has no address) and runs ``tests``."""
    folder = tempfile.TemporaryDirectory(prefix="bebop-mutant-")
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return _Running(fault, process, folder, time.perf_counter())
    status = CRASHED
    try:
        signal.alarm(limit)
        output = os.open(Path(folder.name) / "output", os.O_WRONLY | os.O_CREAT, 0o600)
        os.dup2(output, 1)
        os.dup2(output, 2)
        finder = plant(fault) if fault.address else None
        status = _pytest(tests, Path(folder.name) / "tmp")
        if finder is not None and not finder.loaded:
            status = UNLOADED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # skips the parent's exit handlers


def _pytest(tests: Sequence[str], temporary: Path) -> int:
    import pytest

    quiet = ["-x", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "--tb=short", "-rf", "-W", "ignore"]
    return int(pytest.main([*quiet, f"--basetemp={temporary}", *tests]))
