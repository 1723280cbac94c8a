"""Figures of the study on drafts."""

from pathlib import Path

import numpy as np

from bebop.metrics.intervals import Interval
from recipes.reproduce.figures import band, color, errors, figure
from recipes.reproduce.real.arms import interval, of_arm
from recipes.reproduce.real_drafts.analysis import Results, accepted_at
from recipes.reproduce.real_drafts.findings import TEMPERATURES, at
from recipes.reproduce.real_drafts.tables import PLACES, both, by_kind, kinds


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Draw every figure that has heads; return the caption of each file."""
    there = {head: looks for head, looks in results.items() if looks.plain}
    swept = {head: looks for head, looks in there.items() if all(looks.by[at(t)] for t in TEMPERATURES)}
    cold = {head: looks for head, looks in there.items() if looks.cold}
    planes(there, folder / "boundary.svg")
    by_kinds(there, folder / "kinds.svg")
    captions = {
        "boundary.svg": "Positions at temperature 1 by the distance of both distributions and by how often a greedy "
        "draft is rejected, all seeds (darker: more positions, logarithmic); below the line sampled drafts are "
        "accepted more often.",
        "kinds.svg": "Acceptance of sampled minus that of greedy drafts by kind of prompt, temperature 1; intervals "
        "over seeds and prompts.",
    }
    if swept:
        temperatures(swept, folder / "temperatures.svg")
        captions["temperatures.svg"] = (
            "Acceptance of sampled minus that of greedy drafts over the temperature of target and draft."
        )
    if cold:
        drafts(cold, folder / "draft_temperatures.svg")
        captions["draft_temperatures.svg"] = (
            "Accept length by the draft's own temperature (0: greedy), the target's being 1."
        )
    return captions


def planes(results: Results, path: Path) -> None:
    """Draw TV against 1 - p(argmax q), one panel per head."""
    with figure(path, len(results), 3.8, 3.6, sharey=True, squeeze=False) as axes:
        for panel, (head, looks) in zip(axes[0], results.items(), strict=True):
            columns = [
                [one.numbers[name].ravel() for one in looks.plain.values()] for name in ("target_only", "overlap")
            ]
            x, y = (1 - np.concatenate(column) for column in columns)
            x, y = x[np.isfinite(x)], y[np.isfinite(y)]
            panel.hexbin(x, y, gridsize=28, extent=(0, 1, 0, 1), mincnt=1, bins="log", cmap="Blues", linewidths=0.2)
            panel.plot([0, 1], [0, 1], color="#d1603d", linewidth=1.2)
            panel.text(0.67, 0.36, f"sampled wins\n{np.mean(y < x):.0%}", ha="center", fontsize=9)
            panel.text(0.34, 0.74, f"greedy wins\n{np.mean(y > x):.0%}", ha="center", fontsize=9)
            panel.set(title=head, xlabel="1 - p(greedy draft)", aspect="equal")
        axes[0, 0].set(ylabel="TV of draft and target")


def by_kinds(results: Results, path: Path) -> None:
    """Draw one column per kind of prompt, in the order of the first head's advantage."""
    found: dict[str, dict[str, Interval]] = {
        head: {kind: by_kind(looks.plain, kind)["sampled - greedy"] for kind in kinds(results)}
        for head, looks in results.items()
    }
    first = next(iter(found.values()))
    order = sorted(first, key=lambda kind: first[kind].value)
    with figure(path, 1, max(5.0, 0.55 * len(order)), 3.8) as axes:
        for i, (head, line) in enumerate(found.items()):
            some = [line[kind] for kind in order]
            x = np.arange(len(order)) + 0.2 * (i - (len(found) - 1) / 2)
            axes.errorbar(
                x, [s.value for s in some], errors(some), fmt="o", ms=4, capsize=2, color=color(head), label=head
            )
        axes.axhline(0, color="#9aa3ad", linewidth=1)
        axes.set_xticks(range(len(order)), order, rotation=40, ha="right", fontsize=8)
        axes.set(ylabel="sampled - greedy")
        axes.legend(fontsize=8)


def temperatures(results: Results, path: Path) -> None:
    """Draw the difference of acceptance over the temperature of target and draft."""
    with figure(path, 1, 5.4, 3.6) as axes:
        for head, looks in results.items():
            some = [both(looks.by[at(t)])["sampled - greedy"] for t in TEMPERATURES]
            band(axes, TEMPERATURES, some, head, marker="o", ms=4)
        axes.axhline(0, color="#9aa3ad", linewidth=1)
        axes.set(xlabel="temperature of target and draft", ylabel="sampled - greedy, acceptance")
        axes.legend(fontsize=8)


def drafts(results: Results, path: Path) -> None:
    """Draw the accept length over the draft's temperature."""
    with figure(path, 1, 5.4, 3.6) as axes:
        for head, looks in results.items():
            band(axes, PLACES, [interval(of_arm(accepted_at(looks.cold, t))) for t in PLACES], head, marker="o", ms=4)
        axes.set(xlabel="temperature of the draft", ylabel="accept length, tokens")
        axes.legend(fontsize=8)
