"""Numbers for rules: value, 95 % interval, and p-values against a bound.

Two kinds of intervals are stored. Over seeds it is Student's t: its half width is a quantile times the standard error,
so the standard error follows from it. A bootstrap over completions is treated as normal: half width over 1.96.
Intervals that were stored as text have lost digits. So ``rounding`` is added to the half width, and the value counts as
that much closer to its bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from bebop.metrics.intervals import Interval, across_seeds

NORMAL_95 = 1.959964


@dataclass(frozen=True, slots=True, kw_only=True)
class Number:
    """A stored number with its interval; ``str`` gives 0.055 [0.002, 0.108]."""

    value: float
    low: float
    high: float
    seeds: int | None = None  # number of runs of a Student interval; None: a bootstrap over completions
    rounding: float = 0.0  # half a unit of the last digit that was stored
    source: str | None = None  # where the number was read, if it was not stored separately

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    @property
    def error(self) -> float:
        """Return the standard error."""
        half = (self.high - self.low) / 2 + self.rounding
        return half / (NORMAL_95 if self.seeds is None else quantile(self.seeds - 1))

    @property
    def spread(self) -> float:
        """Return the standard deviation between single runs; 0 where the interval is not over runs."""
        return self.error * math.sqrt(self.seeds) if self.seeds else 0.0

    def above(self, bound: float) -> float:
        """Return the one-sided p: how often a number would lie this far above ``bound`` if the truth were ``bound``."""
        return self._tail(self.value - bound - self.rounding)

    def below(self, bound: float) -> float:
        """Return the one-sided p: how often a number would lie this far below ``bound`` if the truth were ``bound``."""
        return self._tail(bound - self.value - self.rounding)

    def _tail(self, distance: float) -> float:
        if math.isnan(distance) or math.isnan(self.error):
            return 1.0
        if self.error == 0:
            return 0.0 if distance > 0 else 1.0
        t = distance / self.error
        return 0.5 * math.erfc(t / math.sqrt(2)) if self.seeds is None else student_tail(t, self.seeds - 1)


def over_seeds(values: Sequence[float] | Any) -> Number:
    """Return the mean over independent runs, with Student's interval."""
    listed = [float(value) for value in values]
    return of(across_seeds(listed), len(listed))


def of(interval: Interval, seeds: int | None = None) -> Number:
    """Return the number of an interval; ``seeds``: the number of runs if it is a Student interval over runs."""
    return Number(value=interval.value, low=interval.low, high=interval.high, seeds=seeds)


def student_tail(t: float, degrees: int) -> float:
    """Return P(T > t) of Student's t with whole degrees of freedom.

    It uses the finite sums of Abramowitz and Stegun 26.7.3 and 4.
    """
    angle = math.atan2(t, math.sqrt(degrees))
    cosine, sine = math.cos(angle), math.sin(angle)
    term, total = 1.0, 0.0
    if degrees % 2:
        term = cosine
        for k in range(1, degrees - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        inside = 2 / math.pi * (angle + sine * total)
    else:
        for k in range(0, degrees - 1, 2):
            total += term
            term *= cosine**2 * (k + 1) / (k + 2)
        inside = sine * total
    return max(0.5 * (1 - inside), 0.0)


@cache
def quantile(degrees: int) -> float:
    """Return the two-sided 95 % quantile of Student's t, found by bisection."""
    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, degrees) > 0.025 else (low, middle)
    return (low + high) / 2
