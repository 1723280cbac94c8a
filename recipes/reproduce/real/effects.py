"""Numbers of heads that were trained with several seeds and evaluated on the same prompts, with intervals over both.

*Two levels, crossed.* An arm has one head per seed; every head of every arm drafts on the same prompts. Another study
would have other seeds and other prompts. Both vary, but neither is nested in the other: a hard prompt is hard for all
seeds at once. Hence

- *prompts* are bootstrapped, with all chains of a prompt together. One draw of prompts serves all seeds and both arms
  of a comparison. Prompts drawn anew for each seed would average away what seeds have in common. Chains drawn one by
  one would average away what the chains of a prompt have in common;
- *seeds* get Student's t of the numbers of single seeds. Three seeds have only ten different resamples, and a bootstrap
  over them alone holds the truth in about 75 of 100 cases where 95 are promised.

Both half widths are added in squares, each with the quantile of its own level. The sum holds the truth as often as
promised, whichever level the spread comes from (``tests/recipes/reproduce/test_real_effects.py`` simulates it). The
interval is slightly too wide: the interaction of seed and prompt counts at both levels, and kinds of prompts are drawn
freely instead of in fixed shares. p is two-sided: the level at which the interval would just reach 0.

*Noise floor*: the root-mean-square difference of two seeds of one arm, for the noisier arm. It comes from seeds within
an arm, never from arms of one seed, which share the order of the completions. *Size*: an effect over the noise floor.
Within a claim, p-values are corrected by ``verdicts.holm``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from bebop.adaptation.probe import Probe as Chains
from bebop.metrics.intervals import NORMAL_95, across_seeds, resampled, student_t
from recipes.reproduce.measured import Number

Array = NDArray[np.float64]
T = TypeVar("T")
DECISIVE = 0.001  # level where ``Effect.number`` is no surer than the effect: below .05 over all findings of a claim
MOST_DEGREES = 200


@dataclass(frozen=True, slots=True)
class Statistic:
    """Number of one head as a function of sums over prompts, so that a bootstrap is a product with weights."""

    sums: Array  # [N, M] of each prompt
    of: Callable[[Array], Array]  # sums over prompts [R, M] -> the number [R]

    def __call__(self, weights: Array) -> Array:
        """Return the number [R] under weights of the prompts [R, N]."""
        return self.of(weights @ self.sums)


@dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """Number of one arm, or difference of two arms, with its interval and noise floor.

    Example: Effect(value=.031, low=.018, high=.044, p=.004, floor=.006, ...).
    """

    value: float
    low: float
    high: float  # of the 95 % interval
    p: float  # two-sided, against 0
    floor: float  # noise: RMS difference of two seeds of one arm; NaN with one seed
    seeds: int
    seed_error: float  # standard error over seeds; NaN with one seed
    prompt_error: float  # standard error over prompts

    @property
    def size(self) -> float:
        """Return the value in units of the noise floor, signed."""
        return self.value / self.floor if self.floor else math.copysign(math.inf, self.value)

    def reach(self, level: float) -> float:
        """Return half the width of the interval that excludes a share ``level`` of all cases."""
        over_seeds = student_t(self.seeds - 1, level) * self.seed_error if self.seeds > 1 else math.nan
        return math.hypot(over_seeds, NormalDist().inv_cdf(1 - level / 2) * self.prompt_error)

    def number(self) -> Number:
        """Return the effect as a ``Number`` for the rules of ``verdicts``, with the same interval.

        Its Student's t has as many degrees of freedom as keep p at ``DECISIVE`` from being smaller than that of the
        effect. ``Number.seeds`` is one more than those, not the number of runs. A noise floor therefore has to come
        from ``seeds_of``.
        """
        if math.isnan(self.low):
            return Number(value=self.value, low=self.low, high=self.high, seeds=self.seeds)
        asked = self.reach(DECISIVE) / self.reach(0.05) if self.high > self.low else 1.0
        least, most = self.seeds - 1, MOST_DEGREES
        while least < most:  # tails get lighter with the degrees of freedom
            middle = (least + most + 1) // 2
            heavy = student_t(middle, DECISIVE) / student_t(middle) >= asked
            least, most = (middle, most) if heavy else (least, middle - 1)
        return Number(value=self.value, low=self.low, high=self.high, seeds=least + 1)


# ---- numbers of one head


def prompts(chains: Chains) -> NDArray[np.int64]:
    """Return the prompt index of each chain [n], counted from 0 among the prompts that have chains."""
    return np.unique(chains.row, return_inverse=True)[1].astype(np.int64)


def by_prompt(chains: Chains, columns: Sequence[Array]) -> Array:
    """Return sums over each prompt [N, M] of numbers of chains [n] or of their steps [n, K]."""
    place = prompts(chains)
    totals = [column if column.ndim == 1 else column.sum(1) for column in columns]
    return np.stack([np.bincount(place, total) for total in totals], 1)


def mean_of(chains: Chains, values: Array) -> Statistic:
    """Return the mean over all chains [n] or steps [n, K]; NaN is left out."""
    known = np.isfinite(values)
    return Statistic(by_prompt(chains, [np.where(known, values, 0), known.astype(float)]), _ratio)


def slope_of(chains: Chains, x: Array, y: Array) -> Statistic:
    """Return the least-squares slope of y on x over all chains or steps, both [n] or [n, K]; NaN is left out."""
    known = np.isfinite(x) & np.isfinite(y)
    a, b = np.where(known, x, 0), np.where(known, y, 0)
    return Statistic(by_prompt(chains, [known.astype(float), a, b, a * a, a * b]), _slope)


def accept_length(chains: Chains) -> Statistic:
    """Return the tokens per cycle with sampled drafts, the number of most comparisons."""
    return mean_of(chains, chains.accept)


def _ratio(sums: Array) -> Array:
    return sums[:, 0] / sums[:, 1]


def _slope(sums: Array) -> Array:
    n, x, y, xx, xy = sums.T
    slopes: Array = (n * xy - x * y) / (n * xx - x * x)
    return slopes


# ---- numbers of arms


def single(arm: Sequence[T], what: Callable[[T], Statistic]) -> Effect:
    """Return a number of one arm: ``what`` of each seed's head, averaged over seeds."""
    return _effect([what(one) for one in arm], None)


def paired(first: Sequence[T], second: Sequence[T], what: Callable[[T], Statistic]) -> Effect:
    """Return ``what`` of the first arm minus that of the second, seed by seed on the same prompts."""
    assert len(first) == len(second), "a comparison takes the same seeds of both arms"
    return _effect([what(one) for one in first], [what(one) for one in second])


def contrast(first: Sequence[Statistic], second: Sequence[Statistic]) -> Effect:
    """Return the difference of two lists of statistics, paired by seed, such as two kinds of drafts of one arm."""
    assert len(first) == len(second), "a comparison takes the same seeds of both arms"
    return _effect(first, second)


def seeds_of(arm: Sequence[T], what: Callable[[T], Statistic]) -> Array:
    """Return the number of each seed's head [S], the input of a noise floor."""
    return _values([what(one) for one in arm])


def noise(values: Array) -> float:
    """Return the root-mean-square difference of two seeds of one arm, over all pairs; NaN with one seed."""
    return math.sqrt(2) * float(np.std(values, ddof=1)) if len(values) > 1 else math.nan


def _values(statistics: Sequence[Statistic]) -> Array:
    return np.array([float(one(np.ones((1, len(one.sums))))[0]) for one in statistics])


def _effect(first: Sequence[Statistic], second: Sequence[Statistic] | None) -> Effect:
    count = len(first[0].sums)
    assert all(len(one.sums) == count for one in (*first, *(second or ()))), "all heads draft on the same prompts"

    def averaged(weights: Array) -> Array:
        """Return the mean over seeds [R], for one draw of prompts a row."""
        found: Array = np.mean([one(weights) for one in first], 0)
        return found - np.mean([one(weights) for one in second], 0) if second is not None else found

    singly = _values(first) - (_values(second) if second is not None else 0)
    within = [noise(_values(arm)) for arm in (first, second) if arm is not None]
    over_prompts, over_seeds = resampled(averaged, count), across_seeds(singly)
    value = over_prompts.value
    prompt_error = max(value - over_prompts.low, over_prompts.high - value) / NORMAL_95
    half = over_seeds.high - over_seeds.value
    effect = Effect(
        value=value, low=math.nan, high=math.nan, p=1.0, floor=max(within), seeds=len(first), prompt_error=prompt_error,
        seed_error=half / student_t(len(first) - 1) if len(first) > 1 else math.nan,
    )  # fmt: skip
    return _with_interval(effect)


def _with_interval(effect: Effect) -> Effect:
    reach = effect.reach(0.05)
    ends = {"low": effect.value - reach, "high": effect.value + reach, "p": p_value(effect)}
    return Effect(**{name: getattr(effect, name) for name in Effect.__slots__} | ends)


def p_value(effect: Effect) -> float:
    """Return the level at which the interval around an effect just reaches 0; 1 without an interval or effect."""
    if math.isnan(effect.reach(0.05)) or effect.value == 0:
        return 1.0
    low, high = math.log(1e-12), 0.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if effect.reach(math.exp(middle)) > abs(effect.value) else (low, middle)
    return math.exp(high)
