"""The figure: speed against total variation and against right answers, at both batch sizes."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bebop.intervals import Interval
from recipes.reproduce.figures import color, errors, figure
from recipes.reproduce.frontier.analysis import EXACT_ARMS, family, times_plain, utility, variation
from recipes.reproduce.frontier.arms import ARMS, Arm
from recipes.reproduce.frontier.findings import BATCHES
from recipes.reproduce.frontier.jobs import Everything

INKS = {"exact": "tv", "pad": "hard_ce", "pipo": "nla", "planted": "start"}
GAP = 0.055  # of the height between two labels


def draw(results: Everything, folder: Path) -> dict[str, str]:
    """One file, with the sentence below it."""
    with figure(folder / "frontier.svg", 2, 6.2, 4.6, rows=len(BATCHES)) as axes:
        for (left, right), batch in zip(axes, BATCHES, strict=True):
            panel(left, results, batch, variation)
            left.set(xscale="symlog", xlabel="total variation to the target, a token (sampled)")
            left.set_xscale("symlog", linthresh=0.01)
            left.set_xlim(-0.035, 0.5)
            panel(right, results, batch, utility)
            right.set(xlabel="share of right answers")
            label(left, results, batch)
            for one in (left, right):
                one.set(ylabel=f"speed, x plain, batch {batch}")
        axes[0][1].legend(loc="upper left")
    return {
        "frontier.svg": "Speed (processor time, over plain decoding) against total variation to the target (left; "
        "linear up to .01, logarithmic beyond) and against the share of right answers (right), batch 1 (top) and 32 "
        "(bottom). Lines join the settings of a system: tau of PAD and PIPO, epsilon of the planted rule. Bars: 95 %, "
        "bootstrap over prompts and over chunks of them."
    }


def panel(axes: Any, results: Everything, batch: int, of: Callable[[Any], Interval]) -> None:
    """Speed against what ``of`` gives of an arm; each family with its line."""
    groups: dict[str, Sequence[Arm]] = {"exact": EXACT_ARMS}
    groups |= {arm.family: family(arm.family) for arm in ARMS if not arm.exact}
    for name, arms in groups.items():
        x = [of(results.watched[arm.name]) for arm in arms]
        y = [times_plain(results, arm, batch) for arm in arms]
        line = "" if name == "exact" else "-"
        ink = color(INKS.get(name, name))
        axes.errorbar(
            [one.value for one in x], [one.value for one in y], errors(y), errors(x), fmt=f"o{line}", ms=4, lw=1,
            elinewidth=0.8, color=ink, label=name,
        )  # fmt: skip


def label(axes: Any, results: Everything, batch: int) -> None:
    """Names of exact arms beside the axis, of others at their points."""
    places = {arm.name: times_plain(results, arm, batch).value for arm in EXACT_ARMS}
    low, high = axes.get_ylim()
    for (name, y), at in zip(sorted(places.items(), key=lambda one: one[1]), spread(sorted(places.values()), low, high),
                             strict=True):  # fmt: skip
        axes.annotate(
            name, (-0.003, y), (-0.033, at), fontsize=7, va="center",
            arrowprops={"arrowstyle": "-", "color": "#9ca3af", "lw": 0.5},
        )  # fmt: skip
    for arm in ARMS:
        if not arm.exact:
            point = variation(results.watched[arm.name]).value, times_plain(results, arm, batch).value
            text = arm.name.removeprefix(arm.family).strip() or "default"
            axes.annotate(
                text,
                point,
                (4, 4),
                textcoords="offset points",
                fontsize=7,
                color=color(INKS.get(arm.family, arm.family)),
            )


def spread(values: Sequence[float], low: float, high: float) -> list[float]:
    """Rising places for labels of rising values, ``GAP`` of the height apart at least and inside of it."""
    gap = (high - low) * min(GAP, 0.96 / len(values))
    places: list[float] = []
    for value in values:
        places.append(max(value, places[-1] + gap) if places else max(value, low + gap / 2))
    over = places[-1] - (high - gap / 2)
    for i in range(len(places) - 1, -1, -1):
        if over <= 0:
            break
        places[i] -= over
        over = gap - (places[i] - places[i - 1]) if i else 0
    return places
