"""Figure of the study: speed against total variation and against right answers, at both batch sizes."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bebop.metrics.intervals import Interval
from recipes.reproduce.figures import color, errors, figure
from recipes.reproduce.frontier.analysis import EXACT_ARMS, family, times_plain, utility, variation
from recipes.reproduce.frontier.arms import ARMS, BY_VARIATION, INKS, Arm
from recipes.reproduce.frontier.findings import BATCHES
from recipes.reproduce.frontier.jobs import Everything, Watched

# Offsets of names from their points, used in turn, in points of print. Right answers keep a system's settings apart.
Offsets = Mapping[str, Sequence[tuple[int, int]]]
BY_ANSWERS: Offsets = {"pad": ((4, -9),)}
GAP = 0.052  # share of the height between two names
LINEAR, LEFT, RIGHT = 0.01, -0.0125, 0.36  # axis of total variation: logarithmic beyond LINEAR, and its ends
TICKS = (0, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2)
Measure = Callable[[Watched], Interval]


def draw(results: Everything, folder: Path) -> dict[str, str]:
    """Draw the figure; return its caption by file name."""
    with figure(folder / "frontier.svg", 2, 6.4, 4.6, rows=len(BATCHES)) as axes:
        for (left, right), batch in zip(axes, BATCHES, strict=True):
            left.set_xscale("symlog", linthresh=LINEAR, linscale=0.9)
            left.set_xlim(LEFT, RIGHT)
            left.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS], minor=False)
            left.set_xticks([], minor=True)
            left.set_xlabel("total variation to the target, a token (sampled)")
            right.set_xlabel("share of right answers")
            for panel, measure, beside in ((left, variation, BY_VARIATION), (right, utility, BY_ANSWERS)):
                points(panel, results, batch, measure)
                settings(panel, results, batch, measure, beside)
                panel.set_ylabel(f"speed, x plain, batch {batch}")
            names(left, results, batch)
        axes[0][1].legend(loc="upper left", fontsize=9)
    return {
        "frontier.svg": "Speed (processor time, over plain decoding) against total variation to the target (left; "
        "linear up to .01, logarithmic beyond) and against the share of right answers (right), batch 1 (top) and 32 "
        "(bottom). Lines join the settings of a system, numbers at them are their tau and epsilon of the planted "
        "rule. Bars: 95 %, bootstrap over prompts and over chunks of them."
    }


def points(axes: Any, results: Everything, batch: int, measure: Measure) -> None:
    """Draw speed against the ``measure`` of each arm, with a line per family."""
    groups: dict[str, Sequence[Arm]] = {"exact": EXACT_ARMS}
    groups |= {arm.family: family(arm.family) for arm in ARMS if not arm.exact}
    for name, arms in groups.items():
        x = [measure(results.watched[arm.name]) for arm in arms]
        y = [times_plain(results, arm, batch) for arm in arms]
        joined = "" if name == "exact" else "-"
        axes.errorbar(
            [one.value for one in x], [one.value for one in y], errors(y), errors(x), fmt=f"o{joined}", ms=4, lw=1,
            elinewidth=0.6, color=color(INKS.get(name, name)), label=name,
        )  # fmt: skip


def settings(axes: Any, results: Everything, batch: int, measure: Measure, beside: Offsets) -> None:
    """Write the setting of each inexact arm at its point."""
    for arm in ARMS:
        if arm.exact:
            continue
        point = measure(results.watched[arm.name]).value, times_plain(results, arm, batch).value
        offsets = beside.get(arm.family, ((4, 4),))
        offset = offsets[family(arm.family).index(arm) % len(offsets)]
        text = arm.name.removeprefix(arm.family).strip() or "default"
        ink = color(INKS.get(arm.family, arm.family))
        axes.annotate(text, point, offset, textcoords="offset points", fontsize=7.5, color=ink)


def names(axes: Any, results: Everything, batch: int) -> None:
    """Write the names of exact arms beside the axis, one above another, each with a line to its point."""
    low, high = axes.get_ylim()
    sorted_arms = sorted(EXACT_ARMS, key=lambda arm: times_plain(results, arm, batch).value)
    speeds = [times_plain(results, arm, batch).value for arm in sorted_arms]
    for arm, speed, at in zip(sorted_arms, speeds, spread(speeds, low, high), strict=True):
        axes.annotate(
            arm.name, (variation(results.watched[arm.name]).low, speed), (0.97 * LEFT, at), fontsize=7.5, va="center",
            arrowprops={"arrowstyle": "-", "color": "#9ca3af", "lw": 0.5, "shrinkA": 1, "shrinkB": 1},
        )  # fmt: skip
    axes.set_ylim(low, high)


def spread(values: Sequence[float], low: float, high: float) -> list[float]:
    """Return rising places for the names of rising values, at least ``GAP`` of the height apart and within it."""
    gap = (high - low) * min(GAP, 0.96 / len(values))
    places: list[float] = []
    for value in values:
        places.append(max(value, places[-1] + gap if places else low + gap / 2))
    top = high - gap / 2
    for i in reversed(range(len(places))):
        places[i] = min(places[i], top)
        top = places[i] - gap
    return places
