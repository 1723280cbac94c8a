"""Figures of the recipes, as SVG files that a repository can show; one look for all of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from bebop.metrics.intervals import Interval

# One colour an objective, the same in every figure.
COLORS = {
    "start": "#6b7280", "hard_ce": "#d1603d", "ce": "#c79a1e", "kl": "#e0b64a", "rkl": "#8a63b5", "tv": "#2563a8",
    "e2e_tv": "#16407a", "e2e_tv_corrected": "#4aa3b8", "nla": "#3a8f6d", "hybrid": "#b0476f",
}  # fmt: skip
STYLE: dict[str, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e8ebef",
    "axes.axisbelow": True, "svg.fonttype": "none", "svg.hashsalt": "bebop", "figure.constrained_layout.use": True,
    "legend.frameon": False,
}  # fmt: skip


@contextmanager
def figure(
    path: Path, columns: int = 1, width: float = 4.6, height: float = 3.2, rows: int = 1, **options: Any
) -> Iterator[Any]:
    """Axes side by side (an array if there are several), written to ``path`` at the end of the block."""
    with plt.rc_context(STYLE):
        made, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), **options)
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, metadata={"Date": None})
        plt.close(made)


def color(name: str) -> str:
    """The colour of an objective, or of anything else by its name."""
    return COLORS.get(name, list(COLORS.values())[sum(map(ord, name)) % len(COLORS)])


def errors(intervals: Sequence[Interval]) -> Any:
    """How far intervals reach below and above their values [2, n], as ``errorbar`` takes it."""
    return np.array([[i.value - i.low, i.high - i.value] for i in intervals]).T


def bars(axes: Any, names: Sequence[str], intervals: Sequence[Interval], labels: Sequence[str] | None = None) -> None:
    """Points with error bars, one a name: intervals show better so than on bars that start at 0."""
    for i, (name, interval) in enumerate(zip(names, intervals, strict=True)):
        axes.errorbar([i], [interval.value], errors([interval]), fmt="o", capsize=3, color=color(name))
    axes.set_xticks(range(len(names)), labels or names, rotation=35, ha="right")


def band(
    axes: Any, x: Sequence[float], intervals: Sequence[Interval], name: str, label: str | None = None, **style: Any
) -> None:
    """A line with its interval as a band."""
    values, low, high = (np.array([getattr(i, f) for i in intervals]) for f in ("value", "low", "high"))
    axes.plot(x, values, color=color(name), label=label or name, **style)
    axes.fill_between(x, low, high, color=color(name), alpha=0.15, linewidth=0)
