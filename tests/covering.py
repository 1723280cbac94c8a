"""Does an interval hold the truth as often as it says? One row per interval and simulator, one pair of checks for all.

A row simulates data whose truth is known and returns every interval that is made of them. ``short`` counts how often
each held the truth; the same count with intervals ten times narrower has to fail for every one of them, which an
interval that is merely wide does not pass either. To cover a new interval, add a row.

``make test`` repeats one row of each kind, as often as it says (``quick``); ``make test-slow`` every row in full.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from bebop.metrics.intervals import Interval
from bebop.monitor.estimate import LEVEL, Estimate

LEAST = 0.90  # of repetitions; that 100 intervals of 95 % hold fewer than 90 has a chance of 1 in 80
RUNS = 200


@dataclass(frozen=True, slots=True)
class Trial:
    """An interval, and what it should hold."""

    value: float
    low: float
    high: float
    truth: float

    def narrowed(self, times: float) -> "Trial":
        """The planted fault: the same point, ends ``times`` closer to it."""
        low, high = (self.value + (end - self.value) / times for end in (self.low, self.high))
        return replace(self, low=low, high=high)

    @property
    def holds(self) -> bool:
        """False for an interval that is not there."""
        return self.low <= self.truth <= self.high


Simulate = Callable[[int], Mapping[str, Trial]]


@dataclass(frozen=True, slots=True)
class Row:
    """Intervals of one kind: what they vary over (texts, prompts, steps, seeds), and a simulator by seed."""

    name: str
    over: str
    simulate: Simulate
    runs: int = RUNS
    least: float = LEAST
    quick: int = 0  # repetitions in ``make test``

    def __str__(self) -> str:
        return f"{self.name} over {self.over}, {self.runs} runs"


def cases(rows: Iterable[Row]) -> list[Any]:
    """Return parameters of a test: rows with their quick repetitions, and marked slow those with more in full.

    The seeds are fixed, so few repetitions fail as reliably as many; they only see larger faults.
    """
    every = list(rows)
    quick = [replace(row, runs=row.quick) for row in every if row.quick]
    return [*quick, *(pytest.param(row, marks=pytest.mark.slow) for row in every if row.runs > row.quick)]


def of_estimate(estimate: Estimate, truth: float, level: float = LEVEL) -> Trial:
    """The monitor's kind."""
    return Trial(estimate.point, *estimate.interval(level), truth)


def of_interval(interval: Interval, truth: float) -> Trial:
    """The recipes' kind."""
    return Trial(interval.value, interval.low, interval.high, truth)


@cache
def _repeated(row: Row) -> tuple[Mapping[str, Trial], ...]:
    return tuple(row.simulate(seed) for seed in range(row.runs))


def shares(row: Row, narrower: float = 1.0) -> dict[str, float]:
    """Interval -> share of repetitions in which it held the truth."""
    repetitions = _repeated(row)
    names = sorted({name for trials in repetitions for name in trials})
    assert names and all(set(trials) == set(names) for trials in repetitions), "every repetition gives every interval"
    return {n: float(np.mean([trials[n].narrowed(narrower).holds for trials in repetitions])) for n in names}


def short(row: Row, narrower: float = 1.0) -> dict[str, float]:
    """The intervals that hold the truth too seldom, with how often they do."""
    return {name: share for name, share in shares(row, narrower).items() if share < row.least}
