"""Bootstrap intervals over sequences: tokens of one answer depend on one another, answers do not (SPEC 0.6)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]
DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Interval:
    """A number with its 95 % interval: 2.71 [2.65, 2.78]."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def excludes(self, number: float) -> bool:
        """Whether ``number`` lies outside."""
        return not self.low <= number <= self.high

    def overlaps(self, other: "Interval") -> bool:
        """Whether the two have a number in common."""
        return self.low <= other.high and other.low <= self.high


def ratio(totals: ArrayLike, counts: ArrayLike, *, seed: int = 0) -> Interval:
    """sum(totals) / sum(counts) over sequences, both [S]: a mean over cycles or tokens, resampled by sequence."""
    top, bottom = np.asarray(totals, float), np.asarray(counts, float)
    return resampled(lambda w: _over(w @ top, w @ bottom), len(top), seed)


def ratio_difference(
    after: tuple[ArrayLike, ArrayLike], before: tuple[ArrayLike, ArrayLike], *, seed: int = 0
) -> Interval:
    """Difference of two ratios of (totals, counts) on the *same* sequences, resampled together."""
    (a, b), (c, d) = ((np.asarray(x, float) for x in pair) for pair in (after, before))
    return resampled(lambda w: _over(w @ a, w @ b) - _over(w @ c, w @ d), len(a), seed)


def resampled(statistic: Callable[[Array], Array], count: int, seed: int = 0, draws: int = DRAWS) -> Interval:
    """Percentile interval of a statistic of weighted sequences: weights [R, S] -> [R], all draws at once."""
    if count == 0:
        return Interval(float("nan"), float("nan"), float("nan"))
    value = float(statistic(np.ones((1, count)))[0])
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(count, np.full(count, 1 / count), size=draws).astype(float)
    found = statistic(weights)
    low, high = np.nanpercentile(found, [2.5, 97.5]) if np.isfinite(found).any() else (np.nan, np.nan)
    return Interval(value, float(low), float(high))


def across_seeds(values: ArrayLike) -> Interval:
    """Mean over independent runs with the 95 % interval of Student's t; three runs have few degrees of freedom."""
    array = np.asarray(values, float)
    mean = float(array.mean())
    if len(array) < 2:
        return Interval(mean, float("nan"), float("nan"))
    half = T_95[min(len(array) - 1, len(T_95))] * float(array.std(ddof=1)) / np.sqrt(len(array))
    return Interval(mean, mean - half, mean + half)


# Two-sided 95 % quantiles of Student's t by degrees of freedom.
T_95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228}


def _over(top: Array, bottom: Array) -> Array:
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(bottom > 0, top / bottom, np.nan)
