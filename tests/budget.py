"""Processor seconds of tests by folder, held against the budgets of ``[tool.bebop.test-budget]`` in pyproject.toml.

``pytest --budget quick`` ends with a table and fails where a folder, or all of them, took more than they may. Seconds
are user and system time of the test process and of the child processes that it waited for, so that a waiting test
costs nothing. A slower machine, or a busy one, needs more of them for the same work: before every test file a worker
times a short loop, and seconds are divided by how much slower that loop was than on the machine of the budgets.
"""

import math
import os
import time
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
START = "start"  # imports and collection, of all workers
TOP = "tests/*.py"


def processor_seconds() -> float:
    """Return user and system time of this process and of its children that have ended."""
    return sum(os.times()[:4])


def loop_seconds() -> float:
    """Return the processor seconds of a fixed piece of Python, some milliseconds."""
    begin = time.process_time()
    table: dict[int, int] = {}
    for i in range(20_000):
        table[i % 997] = table.get(i % 997, 0) + i
    return time.process_time() - begin


def folder(path: Path, root: Path = ROOT) -> str:
    """Return the folder below tests/ that a test file counts for; one name for all files that stand in tests/."""
    parts = path.relative_to(root).parts
    return parts[1] if len(parts) > 2 else TOP


@dataclass
class Spent:
    """What one test process spent.

    Attributes:
        seconds: Processor seconds by folder.
        loops: Seconds of each timed loop.
    """

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    loops: list[float] = field(default_factory=list)

    def add(self, seconds: Mapping[str, float], loops: Sequence[float]) -> None:
        """Add what another process spent."""
        for name, value in seconds.items():
            self.seconds[name] += value
        self.loops += loops

    def slowness(self, reference: float) -> float:
        """Return how many times longer the loop took than ``reference`` seconds; 1 where none was timed."""
        return sum(self.loops) / len(self.loops) / reference if self.loops else 1.0


def overspent(seconds: Mapping[str, float], budget: Mapping[str, float]) -> list[str]:
    """Return the folders, ``total`` among them, that took more than their budget; some need not have one."""
    every = {**seconds, "total": sum(seconds.values())}
    return [name for name, value in every.items() if value > budget.get(name, math.inf)]


class Recorder:
    """The plugin: it measures in every worker and judges in the process that started them."""

    def __init__(self, name: str) -> None:
        settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["bebop"]["test-budget"]
        if name not in settings:
            raise pytest.UsageError(
                f"--budget {name}: pyproject.toml has {', '.join(k for k in settings if k != 'loop')}"
            )
        self.name, self.budget, self.reference = name, settings[name], float(settings["loop"])
        self.spent, self.begin = Spent(), time.monotonic()
        self.file: Path | None = None
        self.others = False  # whether workers ran the tests

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Measure one test with its fixtures; before the first of a file, the speed of the machine."""
        if item.path != self.file:
            self.file = item.path
            self.spent.loops.append(loop_seconds())
        before = processor_seconds()
        yield
        self.spent.seconds[folder(item.path)] += processor_seconds() - before

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Hand over what a worker spent, or judge the sum of all processes."""
        if self.others:
            self.spent.seconds[START] += sum(os.times()[:2])  # workers are children, and have reported themselves
        else:
            self.spent.seconds[START] += processor_seconds() - sum(self.spent.seconds.values())
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output["spent"] = {"seconds": dict(self.spent.seconds), "loops": self.spent.loops}
        elif session.exitstatus == pytest.ExitCode.OK and self.too_much():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        """Add what a worker of pytest-xdist spent; a worker that crashed has not said it."""
        spent = getattr(node, "workeroutput", {}).get("spent")
        if spent is not None:
            self.others = True
            self.spent.add(**spent)

    def scaled(self) -> dict[str, float]:
        """Return the seconds by folder on the machine of the budgets.

        Those of a faster machine stay as they are: what imports and PyTorch take does not shrink as the loop does.
        """
        slowness = max(1.0, self.spent.slowness(self.reference))
        return {name: seconds / slowness for name, seconds in self.spent.seconds.items()}

    def too_much(self) -> list[str]:
        """Return the folders over their budget."""
        return overspent(self.scaled(), self.budget)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the table."""
        scaled, over = self.scaled(), self.too_much()
        rows = [(name, self.spent.seconds[name], scaled[name]) for name in sorted(scaled, key=lambda n: -scaled[n])]
        rows.append(("total", sum(self.spent.seconds.values()), sum(scaled.values())))
        terminalreporter.section(f"processor seconds, budget '{self.name}'")
        terminalreporter.line(f"{'folder':14}{'seconds':>9}{'scaled':>9}{'budget':>9}")
        for name, seconds, value in rows:
            mark = "  over budget" if name in over else ""
            terminalreporter.line(f"{name:14}{seconds:9.1f}{value:9.1f}{self.budget.get(name, math.inf):9.0f}{mark}")
        slowness, wall = self.spent.slowness(self.reference), time.monotonic() - self.begin
        terminalreporter.line(
            f"this machine was {slowness:.2f} times as slow as that of the budgets; {wall:.0f} s in all"
        )
        if over:
            terminalreporter.line("Make tests cheaper, or mark them slow; --durations=30 shows the longest.")
