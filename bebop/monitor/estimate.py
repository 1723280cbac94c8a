"""Number with its uncertainty: a point and bootstrap draws, combined by arithmetic.

Differences, sums and products of estimates are computed draw by draw, so the shared part of two estimates (the same
resampled completions) stays shared in the result. Estimates cannot be averaged: ``bebop.monitor.window`` forms means
once, from totals and counts.
"""

import math
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
LEVEL = 0.95  # of intervals that are shown
_NONE: Array = np.empty(0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Estimate:
    """Point estimate with bootstrap draws around it, whose spread is its uncertainty.

    >>> Estimate(point=-0.12, draws=np.array([-0.15, -0.09, -0.12])).text()
    '-0.12 [-0.18, -0.06]'
    """

    point: float
    draws: Array  # [B]

    @classmethod
    def unknown(cls, draws: int) -> "Estimate":
        """Return an estimate of NaN: not measured, or not identified."""
        return cls(point=math.nan, draws=np.full(draws, math.nan))

    def __add__(self, other: "Estimate") -> "Estimate":
        return Estimate(point=self.point + other.point, draws=self.draws + other.draws)

    def __sub__(self, other: "Estimate") -> "Estimate":
        return Estimate(point=self.point - other.point, draws=self.draws - other.draws)

    def __mul__(self, other: "Estimate") -> "Estimate":
        return Estimate(point=self.point * other.point, draws=self.draws * other.draws)

    @property
    def known(self) -> bool:
        """Return whether point and standard error are finite."""
        return math.isfinite(self.point) and math.isfinite(self.error)

    @property
    def error(self) -> float:
        """Return the standard error."""
        away = self.draws - self.draws.mean()
        return math.sqrt(float(away @ away) / (len(away) - 1))

    @property
    def low(self) -> float:
        """Return the lower end of the 95 % interval."""
        return self.interval()[0]

    @property
    def high(self) -> float:
        """Return the upper end of the 95 % interval."""
        return self.interval()[1]

    def interval(self, level: float = LEVEL) -> tuple[float, float]:
        """Return point -+ normal quantile x standard error; the draws already carry the correction for few units."""
        half = _quantile(level) * self.error
        return self.point - half, self.point + half

    def excludes_zero(self, level: float = LEVEL) -> bool:
        """Return whether the interval lies on one side of zero; False for an unknown estimate."""
        low, high = self.interval(level)
        return low > 0 or high < 0

    def text(self) -> str:
        """Return ``point [low, high]`` for a sentence."""
        low, high = self.interval()
        return f"{self.point:.2g} [{low:.2g}, {high:.2g}]" if math.isfinite(high - low) else "unknown"

    def triple(self) -> tuple[float, float, float]:
        """Return (point, low, high)."""
        return self.point, *self.interval()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Summary(Estimate):
    """Estimate to be shown, not combined any more: its standard error in place of its draws, of which none are left."""

    spread: float  # the standard error

    @classmethod
    def of(cls, estimate: Estimate) -> "Summary":
        """Return the summary of an estimate; it shows the same numbers."""
        return cls(point=estimate.point, draws=_NONE, spread=estimate.error)

    @property
    def error(self) -> float:
        """Return the standard error."""
        return self.spread


@cache
def t_over_normal(freedom: float) -> float:
    """Return how much wider a 95 % interval is under Student's t than under the normal; inf below 2 degrees of freedom.

    Uses a Cornish-Fisher expansion, within 3 %: the monitor needs numpy alone, and degrees of freedom may be fractions.
    """
    if freedom < 2:
        return math.inf
    z = _quantile(LEVEL)
    terms = (
        z,
        (z**3 + z) / 4 / freedom,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96 / freedom**2,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / freedom**3,
    )
    return sum(terms) / z


@cache
def _quantile(level: float) -> float:
    """Return the quantile of the normal distribution for a two-sided interval."""
    return NormalDist().inv_cdf(0.5 + level / 2)
