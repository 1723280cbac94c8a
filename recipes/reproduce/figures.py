"""Figures of the recipes: SVG files in one common style, which a repository can show.

matplotlib is imported only where a figure is drawn: pages and rules are made where it is not installed.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bebop.metrics.intervals import Interval

# One colour an objective, the same in every figure.
COLORS = {
    "start": "#6b7280", "hard_ce": "#d1603d", "ce": "#c79a1e", "kl": "#e0b64a", "rkl": "#8a63b5", "tv": "#2563a8",
    "e2e_tv": "#16407a", "e2e_tv_corrected": "#4aa3b8", "nla": "#3a8f6d", "hybrid": "#b0476f",
}  # fmt: skip
SAME = {"plain": "start", "TO + CE": "hard_ce", "RS + TV": "e2e_tv"}  # decoding arm -> objective of the same colour
STYLE: dict[str, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e8ebef",
    "axes.axisbelow": True, "svg.fonttype": "none", "svg.hashsalt": "bebop", "figure.constrained_layout.use": True,
    "legend.frameon": False,
}  # fmt: skip


@contextmanager
def figure(
    path: Path, columns: int = 1, width: float = 4.6, height: float = 3.2, rows: int = 1, **options: Any
) -> Iterator[Any]:
    """Yield axes side by side (an array if there are several), and write them to ``path`` at the end of the block."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        made, axes = plt.subplots(rows, columns, figsize=(width * columns, height * rows), **options)
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        made.savefig(path, metadata={"Date": None})
        plt.close(made)


def color(name: str) -> str:
    """Return the colour of an objective; any other name gets a fixed colour that depends on its letters."""
    return COLORS.get(SAME.get(name, name), list(COLORS.values())[sum(map(ord, name)) % len(COLORS)])


def errors(intervals: Sequence[Interval]) -> Any:
    """Return the distances of interval ends below and above their values [2, n], as ``errorbar`` expects."""
    return np.array([[i.value - i.low, i.high - i.value] for i in intervals]).T


def bars(axes: Any, names: Sequence[str], intervals: Sequence[Interval], labels: Sequence[str] | None = None) -> None:
    """Draw one point with an error bar per name: bars that start at 0 would hide the intervals."""
    for i, (name, interval) in enumerate(zip(names, intervals, strict=True)):
        axes.errorbar([i], [interval.value], errors([interval]), fmt="o", capsize=3, color=color(name))
    axes.set_xticks(range(len(names)), labels or names, rotation=35, ha="right")


def band(
    axes: Any, x: Sequence[float], intervals: Sequence[Interval], name: str, label: str | None = None, **style: Any
) -> None:
    """Draw a line of interval values, with the intervals as a band."""
    values, low, high = (np.array([getattr(i, f) for i in intervals]) for f in ("value", "low", "high"))
    axes.plot(x, values, color=color(name), label=label or name, **style)
    axes.fill_between(x, low, high, color=color(name), alpha=0.15, linewidth=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A line of a panel: Curve(label="ce", x=(1, 2, 3), y=(.80, .82, .81)); intervals get error bars."""

    label: str
    x: Sequence[float]
    y: Sequence[float] | Sequence[Interval]
    color: str = ""  # the name of a colour; empty: that of the label
    style: Mapping[str, Any] = field(default_factory=dict)  # further words of matplotlib


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One chart of a figure: curves that share their axes."""

    curves: Sequence[Curve]
    title: str = ""
    x: str = ""
    y: str = ""
    ticks: Sequence[str] = ()  # names of x = 0, 1, ...
    level: float | None = None  # where a dashed line lies
    legend: bool = False


def draw(path: Path, panels: Sequence[Panel], **options: Any) -> None:
    """Draw panels side by side; ``options`` are those of ``figure``."""
    with figure(path, len(panels), squeeze=False, **options) as axes:
        for one, panel in zip(axes[0], panels, strict=True):
            for curve in panel.curves:
                style: dict[str, Any] = {"marker": "o", "ms": 4, "color": color(curve.color or curve.label)}
                style |= {"label": curve.label, **curve.style}
                values = [y.value if isinstance(y, Interval) else y for y in curve.y]
                known = [y for y in curve.y if isinstance(y, Interval)]
                if known:
                    one.errorbar(curve.x, values, errors(known), capsize=3, **style)
                else:
                    one.plot(curve.x, values, **style)
            if panel.level is not None:
                one.axhline(panel.level, color="#6b7280", linestyle="--", linewidth=1)
            if panel.ticks:
                one.set_xticks(range(len(panel.ticks)), panel.ticks, rotation=35 if len(panel.ticks) > 6 else 0)
            one.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
            if panel.legend:
                one.legend(fontsize=8)
