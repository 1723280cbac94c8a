"""Dependence of acceptance on entropy on the chains of a head, as statistics that a bootstrap over prompts can weigh.

Least squares throughout, signed, in acceptance per nat. x is the target's entropy, y a number of NUMBERS such as
``overlap`` (acceptance of sampled drafts) or ``target_only`` (of greedy ones). Steps that do not exist are left out.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bebop.adaptation.probe import Probe
from recipes.reproduce.real.effects import Statistic, by_prompt, prompts, slope_of

Array = NDArray[np.float64]
ENTROPY = "target_entropy"
TENTHS = 10


# ---- few points, each a mean over steps: x and y [R, P] for R draws of prompts


def over_points(sums: Array, of: Callable[[Array, Array], Array]) -> Statistic:
    """Return a statistic of P points from sums of each prompt over the steps of each point [N, 3 P].

    The three sums of a point are its count, x and y.
    """

    def number(totals: Array) -> Array:
        n, x, y = np.moveaxis(totals.reshape(len(totals), -1, 3), 2, 0)
        with np.errstate(invalid="ignore", divide="ignore"):
            return of(x / n, y / n)

    return Statistic(sums, number)


def temperature_points(looks: Sequence[Probe], name: str, x: str = ENTROPY) -> Array:
    """Return sums [N, 3 P] of one head at P temperatures: one point each, over all contexts and positions."""
    return np.concatenate([_sums(look, look.numbers[x], look.numbers[name], 1) for look in looks], 1)


def tenth_points(chains: Probe, name: str, x: str = ENTROPY) -> Array:
    """Return sums [N, 30]: one point for each tenth of all steps, ordered by x.

    The assignment of steps to tenths stays fixed when prompts are resampled.
    """
    return _sums(chains, chains.numbers[x], chains.numbers[name], TENTHS)


def _sums(chains: Probe, x: Array, y: Array, parts: int) -> Array:
    known = np.isfinite(x) & np.isfinite(y)
    part = np.full(x.shape, -1)
    ranks = np.argsort(np.argsort(x[known], kind="stable"), kind="stable")
    part[known] = ranks * parts // max(1, len(ranks))
    columns = [np.where(part == j, v, 0.0) for j in range(parts) for v in (np.ones_like(x), x, y)]
    return by_prompt(chains, columns)


def slope(x: Array, y: Array) -> Array:
    """Return the slopes [R] of lines through points [R, P]."""
    a, b = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    slopes: Array = (a * b).sum(1) / (a * a).sum(1)
    return slopes


def r_squared(x: Array, y: Array) -> Array:
    """Return the share of the variance of y [R, P] that a line explains [R]."""
    a, b = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    shares: Array = (a * b).sum(1) ** 2 / ((a * a).sum(1) * (b * b).sum(1))
    return shares


def bend(x: Array, y: Array) -> Array:
    """Return the slope of the upper half of the points minus that of the lower half [R]; 0 for a straight line.

    The points [R, P] have to be in the order of their entropy.
    """
    half = x.shape[1] // 2
    return slope(x[:, -half:], y[:, -half:]) - slope(x[:, :half], y[:, :half])


# ---- many points


def over_temperatures(looks: Sequence[Probe], name: str) -> Statistic:
    """Return the slope of mean acceptance on mean entropy, with one point per temperature."""
    return over_points(temperature_points(looks, name), slope)


def between_tokens(chains: Probe, name: str) -> Statistic:
    """Return the slope over all steps, with one point per context and position."""
    return slope_of(chains, chains.numbers[ENTROPY], chains.numbers[name])


def between_prompts(chains: Probe, name: str) -> Statistic:
    """Return the slope over prompts: each point is a prompt's mean over steps, minus the mean of its kind.

    Kinds are centred anew in every resampling of prompts: the slope is that of sums within kinds.
    """
    x, y = chains.numbers[ENTROPY], chains.numbers[name]
    known = np.isfinite(x) & np.isfinite(y)
    n, a, b = by_prompt(chains, [known.astype(float), np.where(known, x, 0), np.where(known, y, 0)]).T
    there = n > 0
    a, b = (np.divide(total, n, out=np.zeros_like(n), where=there) for total in (a, b))
    own = of_kind(chains) & there[:, None]  # [N, kinds]
    columns = [own * column[:, None] for column in (np.ones_like(a), a, b, a * a, a * b)]

    def number(sums: Array) -> Array:
        count, x, y, xx, xy = np.split(sums, 5, 1)
        count = np.maximum(count, 1)  # the sums of a kind that was not drawn are all 0
        with np.errstate(invalid="ignore", divide="ignore"):
            slopes: Array = (xy - x * y / count).sum(1) / (xx - x * x / count).sum(1)
        return slopes

    return Statistic(np.concatenate(columns, 1), number)


def of_kind(chains: Probe) -> NDArray[np.bool_]:
    """Return whether each prompt is of each kind [N, kinds], with kinds in alphabetical order."""
    kinds, kind = np.unique(chains.task, return_inverse=True)
    found = np.zeros((int(prompts(chains).max()) + 1, len(kinds)), bool)
    found[prompts(chains), kind] = True
    return found


def correlation(chains: Probe, x: str, y: str) -> Statistic:
    """Return Pearson's correlation of two numbers over all steps; its square is R squared of either on the other."""
    a, b = chains.numbers[x], chains.numbers[y]
    known = np.isfinite(a) & np.isfinite(b)
    a, b = np.where(known, a, 0), np.where(known, b, 0)
    return Statistic(by_prompt(chains, [known.astype(float), a, b, a * a, b * b, a * b]), _correlation)


def told_by(chains: Probe, x: str, y: str = "overlap") -> Statistic:
    """Return R squared of y on x over all steps: how much of acceptance an entropy explains, token by token."""
    found = correlation(chains, x, y)
    return Statistic(found.sums, lambda sums: _correlation(sums) ** 2)


def _correlation(sums: Array) -> Array:
    n, x, y, xx, yy, xy = sums.T
    found: Array = (n * xy - x * y) / np.sqrt((n * xx - x * x) * (n * yy - y * y))
    return found
