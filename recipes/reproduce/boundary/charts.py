"""Figures of the study ``boundary``."""

from pathlib import Path

import numpy as np

from recipes.reproduce.boundary.sides import Sides
from recipes.reproduce.figures import color, figure
from recipes.reproduce.harness import Results
from recipes.reproduce.temperature.slopes import EDGES, bin_names

PLANES = ("hard_ce", "ce", "e2e_tv")


def planes(results: Results[Sides], path: Path) -> None:
    """Draw TV against 1 - p(argmax q), one panel per head."""
    with figure(path, len(PLANES), 3.8, 3.6, sharey=True) as axes:
        for panel, head in zip(axes, PLANES, strict=True):
            x, y = (1 - np.concatenate([getattr(f, name) for f in results.of(head)]) for name in ("greedy", "sampled"))
            panel.hexbin(x, y, gridsize=28, extent=(0, 1, 0, 1), mincnt=1, bins="log", cmap="Blues", linewidths=0.2)
            panel.plot([0, 1], [0, 1], color="#d1603d", linewidth=1.2)
            panel.text(0.67, 0.36, f"sampled wins\n{np.mean(y < x):.0%}", ha="center", fontsize=9)
            panel.text(0.34, 0.74, f"greedy wins\n{np.mean(y > x):.0%}", ha="center", fontsize=9)
            panel.set(title=head, xlabel="1 - p(greedy draft)", aspect="equal")
        axes[0].set(ylabel="TV of draft and target")


def bins(results: Results[Sides], path: Path) -> None:
    """Draw the share of positions where sampled drafts win, and the acceptance, in bins of entropy."""

    def mean(head: str, of: str, j: int) -> float:
        values = np.concatenate([f.values(of)[np.digitize(f.entropy, EDGES) == j] for f in results.of(head)])  # type: ignore[arg-type]
        return float(values.mean()) if len(values) else float("nan")

    places = range(len(EDGES) + 1)
    with figure(path, 2, 5.2, 3.6) as (left, right):
        for head in results.arms:
            y = [mean(head, "sampled_wins", j) for j in places]
            left.plot(places, y, marker="o", markersize=4, color=color(head), label=head)
        names = {"sampled": "always sampled", "greedy": "always greedy", "best": "the better one each time"}
        for (of, label), style in zip(names.items(), ("-", "--", ":"), strict=True):
            right.plot(
                places, [mean("e2e_tv", of, j) for j in places], style, marker="o", ms=4, color="#16407a", label=label
            )
        left.axhline(0.5, color="#9aa3ad", linewidth=1)
        for panel in (left, right):
            panel.set_xticks(places, bin_names(), rotation=30)
            panel.set(xlabel="entropy of the target, nats")
            panel.legend(fontsize=8)
        left.set(ylabel="share where sampled drafts win", ylim=(0, 1))
        right.set(ylabel="acceptance", ylim=(0, 1))
