"""Figures of the losses: validation curves, gains over soft cross-entropy, overlap along a chain, acceptance against
entropy.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bebop.metrics.intervals import Interval
from recipes.reproduce.figures import band, color, errors, figure
from recipes.reproduce.real.arms import each
from recipes.reproduce.real.runs import CONVERGED, SHARED
from recipes.reproduce.real.slopes import TENTHS, temperature_points, tenth_points
from recipes.reproduce.real_losses.comparison import FRESH, NAMES, SLOPED, heads, swept
from recipes.reproduce.real_losses.curves import Trained
from recipes.reproduce.real_losses.findings import MARKS
from recipes.reproduce.real_losses.tables import depth, gain, number, shown

GREY = "#6b7280"
# Colors of losses that figures.COLORS lacks.
SHADES = {
    "top_4": "#84cc16", "top_4_renormalised": "#4d7c0f", "top_64": "#f472b6", "top_64_renormalised": "#9d174d",
}  # fmt: skip
OUTSIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5), "fontsize": 8}  # of a legend
LAST = f" at {MARKS['steps'][-1]}"
CAPTIONS: Mapping[str, str] = {
    "curves.svg": "Accept length on validation text against steps (left) and processor time in updates (right): heads "
    "from the shared head (top), the shared head and fresh ones (bottom). A line a run; dots: the learning rate was "
    "lowered; dotted: marks.",
    "gains.svg": "Accept length over that of ce, paired by seed, with 95 % intervals over seeds and prompts: the best "
    "heads of the losses that are claimed of (left), flat or not as the table says, and all losses after equal steps "
    "(right).",
    "positions.svg": "Overlap of draft and target by position in the chain, best heads, with 95 % intervals.",
    "entropy.svg": "Mean overlap against the target's entropy, best heads: a point a temperature (left), a point a "
    "tenth of all tokens at temperature 1 (right); a line a seed.",
}


def draw(place: Path, runs: Sequence[Trained], folder: Path) -> dict[str, str]:
    """Draw all four figures; return their captions."""
    draw_curves(folder / "curves.svg", runs)
    draw_gains(folder / "gains.svg", place)
    draw_positions(folder / "positions.svg", place)
    draw_entropy(folder / "entropy.svg", place)
    return dict(CAPTIONS)


def draw_curves(path: Path, runs: Sequence[Trained]) -> None:
    """Draw the validation curves: one row per start, one column per clock."""
    with figure(path, 2, 5.6, 3.4, 2, squeeze=False) as panels:
        for row, from_shared in zip(panels, (True, False), strict=True):
            own = [one for one in runs if (one.run.start == SHARED) == from_shared]
            for axes, clock, scale in zip(row, ("step", "seconds"), (1, 60), strict=True):
                for one in own:
                    _curve(axes, one, clock, scale)
                marked = any(one.run.name != SHARED for one in own)
                for mark in MARKS["steps" if clock == "step" else "processor time"] if marked else ():
                    axes.axvline(float(mark.split()[1]) / scale, color=GREY, linestyle=":", linewidth=1)
                if not from_shared:  # the shared head runs for ten times as long
                    axes.set_xscale("symlog", linthresh=max(50.0 / scale, 1.0))
                    axes.set_xlim(left=0)
                axes.set(xlabel="steps" if clock == "step" else "processor minutes")
            row[0].set(ylabel="accept length, validation")
            _legend(row[1], **OUTSIDE)


def _curve(axes: Any, one: Trained, clock: str, scale: float) -> None:
    fresh = one.run.name.startswith(FRESH.strip())
    style = {"color": _shade(one.run.objective), "linewidth": 1.1, "linestyle": "--" if fresh else "-"}
    name = SHARED if one.run.name == SHARED else f"{FRESH if fresh else ''}{one.run.objective}"
    x = [getattr(each_, clock) / scale for each_ in one.curve]
    axes.plot(x, [each_.length for each_ in one.curve], label=name, **style)
    lowered = [(getattr(drop, clock) / scale, drop.length) for drop in one.drops]
    if lowered:
        axes.plot(*zip(*lowered, strict=True), "o", markersize=4, color=style["color"])


def _shade(name: str) -> str:
    return SHADES.get(name) or color(name)


def _legend(axes: Any, **options: Any) -> None:
    """Draw a legend with each name once, however many seeds it has."""
    found = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    if found:
        axes.legend(found.values(), found.keys(), **options)


def draw_gains(path: Path, place: Path) -> None:
    """Draw the gains: best heads on the left, heads after equal steps on the right."""
    with figure(path, 2, 5.0, 3.6) as (left, right):
        _gains(left, place, [name for name in CONVERGED if name != "ce"], ("", " greedy", " on unseen kinds"))
        others = [name for name in NAMES if name not in ("ce", SHARED, f"{FRESH}ce")]
        _gains(right, place, others, (LAST,))
        left.set(title="best heads", ylabel="accept length over ce")
        right.set(title=LAST.strip())


def _gains(axes: Any, place: Path, names: Sequence[str], times: Sequence[str]) -> None:
    marks = dict(zip(times, "o^s", strict=False))
    names = [name for name in names if heads(place, name)]
    for i, words in enumerate(times):
        for j, name in enumerate(names):
            base = f"{FRESH}ce" if name.startswith(FRESH) else "ce"
            found = gain(place, name, base, words)
            if found is not None:
                x = j + 0.2 * (i - (len(times) - 1) / 2)
                shade = _shade(name.removeprefix(FRESH))
                label = (words.strip() or "sampled") if j == 0 else None
                style = {"fmt": marks[words], "capsize": 3, "color": shade, "label": label}
                axes.errorbar([x], [found.value], errors([found]), **style)
    axes.axhline(0, color=GREY, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(names)), names, rotation=35, ha="right")
    if len(times) > 1 and axes.get_legend_handles_labels()[1]:
        axes.legend(fontsize=8)


def draw_positions(path: Path, place: Path) -> None:
    """Draw overlap by position in the chain, one line per loss."""
    steps = range(depth(place))
    with figure(path, 1, 5.6, 3.6) as axes:
        for name in (SHARED, *CONVERGED):
            if found := heads(place, name):
                intervals = [shown(each(found, number("overlap", k))) for k in steps]
                known: list[Interval] = [one for one in intervals if one is not None]
                label = "start" if name == SHARED else name
                band(axes, [k + 1 for k in steps], known, label, label=name, marker="o", markersize=3)
        axes.set(xlabel="position in the chain", ylabel="overlap of draft and target", xticks=[k + 1 for k in steps])
        _legend(axes, **OUTSIDE)


def draw_entropy(path: Path, place: Path) -> None:
    """Draw acceptance against entropy, over temperatures and between tokens."""
    with figure(path, 2, 4.8, 3.6) as (left, right):
        for name in SLOPED:
            for looks in swept(place, name).values():
                _points(left, temperature_points(looks, "overlap"), name)
            for chains in heads(place, name).values():
                _points(right, tenth_points(chains, "overlap"), name)
        for axes, words in ((left, "over temperatures"), (right, f"{TENTHS} parts of all tokens, temperature 1")):
            axes.set(title=words, xlabel="entropy of the target, nats")
            _legend(axes)
        left.set(ylabel="overlap of draft and target")


def _points(axes: Any, sums: Any, name: str) -> None:
    """Draw the means of points from sums over prompts [N, 3 P]."""
    n, x, y = sums.sum(0).reshape(-1, 3).T
    known = n > 0
    axes.plot(
        *np.array([x[known], y[known]]) / n[known], "o-", markersize=3, color=color(name), label=name, linewidth=1
    )
