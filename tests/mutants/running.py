"""Runs tests against planted faults: libraries are imported once, then each fault gets a forked process of its own."""

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
# What a slip of the pen raises: it would be "noticed" by any test that runs the line at all.
SLIP = re.compile(r"^E +(NameError|UnboundLocalError|SyntaxError|IndentationError|ImportError|AttributeError)", re.M)
FAILED = re.compile(r"^FAILED (\S+)", re.M)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a fault."""

    fault: Fault
    outcome: Outcome
    seconds: float
    said: str  # the test that failed, or the end of the output

    @property
    def good(self) -> bool:
        """Killed, or alive for a known reason."""
        return self.outcome == ("survived" if self.fault.immortal else "killed")


def preload() -> None:
    """Import what takes long and is not ours. One thread, as a forked process has no other."""
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
    # The same examples for every fault, and none kept: a killed run leaves nothing behind.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)  # a failure need not be shrunk
    hypothesis.settings.register_profile("mutants", database=None, derandomize=True, phases=phases)
    hypothesis.settings.load_profile("mutants")
    gc.freeze()  # what is here by now is not looked at again in every child


def judge_all(faults: Sequence[Fault], jobs: int) -> Iterator[Result]:
    """Results as they come, ``jobs`` faults at a time, each in a process of its own."""
    for fault in faults:
        fault.mutated()  # misaimed: said by name, before anything runs
    yield from _pool([partial(_start, fault) for fault in faults], jobs)


def without_fault(faults: Sequence[Fault], jobs: int) -> Iterator[Result]:
    """All their tests, each once, on the sources as they are: every part has to survive."""
    tests = sorted({test for fault in faults for test in fault.tests})
    # Neighbours share files; a whole file takes its functions along.
    tests = [test for test in tests if "::" not in test or test.split("::")[0] not in tests]
    count = min(jobs, len(tests))  # a part without tests would run them all
    parts = [Fault(f"no fault ({i + 1}/{count})", "", "", "", tuple(tests[i::count]), "nothing is wrong")
             for i in range(count)]  # fmt: skip
    yield from _pool([partial(_start, part, limit=10 * LIMIT) for part in parts], jobs)


@dataclass(frozen=True, slots=True)
class _Running:
    """A child at work."""

    fault: Fault
    process: int
    folder: "tempfile.TemporaryDirectory[str]"
    started: float

    def result(self, status: int) -> Result:
        """Its exit status, read; the folder goes."""
        output = (Path(self.folder.name) / "output").read_text(errors="replace")
        self.folder.cleanup()
        seconds = time.perf_counter() - self.started
        if status == 0:
            return Result(self.fault, "survived", seconds, ", ".join(self.fault.tests))
        if status == 1 and not SLIP.search(output):
            tests = ", ".join(FAILED.findall(output))
            why = "" if self.fault.file else f"\n{output[-2500:]}"  # where nothing is wrong, somebody has to look
            return Result(self.fault, "killed", seconds, tests + why)
        what = {UNLOADED: "its tests do not import it", -signal.SIGALRM: "no end in sight"}
        return Result(self.fault, "error", seconds, what.get(status, f"exit status {status}\n{output[-2500:]}"))


def _pool(starts: Sequence[Callable[[], _Running]], jobs: int) -> Iterator[Result]:
    """Keep ``jobs`` children going; no threads, as they would not survive the fork."""
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
        for child in running.values():  # interrupted: nobody waits for them any more
            os.kill(child.process, signal.SIGKILL)
            os.waitpid(child.process, 0)
            child.folder.cleanup()


def _start(fault: Fault, limit: int = LIMIT) -> _Running:
    """Fork a child that plants the fault (none if it names no file) and runs its tests."""
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
        finder = plant(fault) if fault.file else None
        status = _pytest(fault.tests, Path(folder.name) / "tmp")
        if finder is not None and not finder.loaded:
            status = UNLOADED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # not through the parent's handlers


def _pytest(tests: Sequence[str], temporary: Path) -> int:
    import pytest

    quiet = ["-x", "-p", "no:cacheprovider", "-p", "no:unraisableexception", "--tb=short", "-rf", "-W", "ignore"]
    return int(pytest.main([*quiet, f"--basetemp={temporary}", *tests]))
