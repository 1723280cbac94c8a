"""Signed slopes of acceptance on entropy, in acceptance per nat: over tokens, over completions, over temperatures.

All fits are least squares. The sums of each completion [S] are kept, so that a bootstrap over completions multiplies
them by weights [R, S].
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from bebop.adaptation.probe import Probe
from bebop.metrics.intervals import Interval, resampled

Array = NDArray[np.float64]
# Nats. Three in four tokens of the built-in model lie below 0.15; four in a hundred above 1.3, where it chooses between
# four ways to write a solution.
EDGES = (0.01, 0.05, 0.2, 0.5, 1.0, 1.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Points:
    """Sums per completion over its points (entropy x, acceptance y)."""

    n: Array  # [S]
    x: Array  # [S]
    y: Array  # [S]
    xx: Array  # [S]
    xy: Array  # [S]

    def slope(self, weights: Array | None = None) -> Array:
        """Return least-squares slopes [R] over all points of completions weighted [R, S]; None weights each once."""
        w = np.ones((1, len(self.n))) if weights is None else weights
        n, x, y, xx, xy = (w @ sums for sums in (self.n, self.x, self.y, self.xx, self.xy))
        with np.errstate(invalid="ignore", divide="ignore"):
            slopes: Array = (n * xy - x * y) / (n * xx - x * x)
        return slopes

    def interval(self) -> Interval:
        """Return the slope with its bootstrap interval over completions."""
        return resampled(self.slope, len(self.n))


def pairs(probe: Probe, name: str, position: int | None = None, task: str | None = None) -> tuple[Array, Array, Array]:
    """Return completion, target entropy and probed number of every existing step.

    ``position`` counts from 1; None takes all positions.
    """
    where = slice(None) if position is None else slice(position - 1, position)
    x, y = probe.numbers["target_entropy"][:, where], probe.numbers[name][:, where]
    known = np.isfinite(x) & np.isfinite(y)
    if task is not None:
        known &= (probe.task == task)[:, None]
    rows = np.broadcast_to(probe.row[:, None], x.shape)
    return rows[known].astype(float), x[known], y[known]


def points(probe: Probe, name: str, of: str, task: str | None = None) -> Points:
    """Return the points of a probed number against entropy, all positions: one per token or per completion (``of``)."""
    rows, x, y = pairs(probe, name, task=task)
    if of == "tokens":
        return tokens(rows, x, y)
    task_of = dict(zip(probe.row.tolist(), probe.task.tolist(), strict=True))
    return answers(rows, x, y, np.array([task_of[int(row)] for row in rows]))


def tokens(rows: ArrayLike, x: ArrayLike, y: ArrayLike) -> Points:
    """Make every step a point; ``rows`` gives the completion of each step."""
    _, answer = np.unique(np.asarray(rows), return_inverse=True)
    entropy, value = np.asarray(x, float), np.asarray(y, float)
    columns = (np.ones_like(entropy), entropy, value, entropy**2, entropy * value)
    n, sx, sy, sxx, sxy = (np.bincount(answer, column).astype(float) for column in columns)
    return Points(n=n, x=sx, y=sy, xx=sxx, xy=sxy)


def answers(rows: ArrayLike, x: ArrayLike, y: ArrayLike, tasks: NDArray[np.str_]) -> Points:
    """Make every completion a point: its means over steps [n], minus those of its task.

    Without the subtraction, a hard task would look like an effect of entropy.
    """
    sums = tokens(rows, x, y)
    mean_x, mean_y = sums.x / sums.n, sums.y / sums.n
    _, first = np.unique(np.asarray(rows), return_index=True)
    for task in np.unique(tasks):
        own = tasks[first] == task
        mean_x[own] -= mean_x[own].mean()
        mean_y[own] -= mean_y[own].mean()
    return Points(n=np.ones_like(mean_x), x=mean_x, y=mean_y, xx=mean_x**2, xy=mean_x * mean_y)


def slope_difference(after: Points, before: Points) -> Interval:
    """Return the rise of a slope from one head to another on the same completions, resampled together."""
    assert len(after.n) == len(before.n), "slopes are compared on the same answers"

    def difference(weights: Array) -> Array:
        return after.slope(weights) - before.slope(weights)

    return resampled(difference, len(after.n))


def line(x: ArrayLike, y: ArrayLike) -> tuple[float, float]:
    """Fit a straight line through a few points; return its slope and R squared, the share of variance explained."""
    entropy, value = np.asarray(x, float), np.asarray(y, float)
    slope, level = np.polyfit(entropy, value, 1)
    spread = float(((value - value.mean()) ** 2).sum())
    rest = float(((value - level - slope * entropy) ** 2).sum())
    return float(slope), 1 - rest / spread if spread > 0 else float("nan")


def by_entropy(x: ArrayLike, y: ArrayLike) -> list[tuple[float, float, int]]:
    """Return mean entropy, mean value and number of steps in each bin of ``EDGES``; NaN in a bin without steps."""
    entropy, value = np.asarray(x, float), np.asarray(y, float)
    empty = (float("nan"), float("nan"), 0)
    place = np.digitize(entropy, EDGES)
    bins = []
    for j in range(len(EDGES) + 1):
        chosen = place == j
        count = int(chosen.sum())
        bins.append((float(entropy[chosen].mean()), float(value[chosen].mean()), count) if count else empty)
    return bins


def bin_names() -> list[str]:
    """Return the bins of ``EDGES`` as text."""
    return [f"< {EDGES[0]}", *(f"{a}-{b}" for a, b in pairwise(EDGES)), f"> {EDGES[-1]}"]
