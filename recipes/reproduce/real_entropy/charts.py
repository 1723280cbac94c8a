"""Figures of the study on entropy."""

from pathlib import Path
from typing import Any

import numpy as np

from bebop.metrics.intervals import Interval
from recipes.reproduce.figures import color, errors, figure
from recipes.reproduce.real.effects import by_prompt, prompts
from recipes.reproduce.real.evaluation import TEMPERATURES
from recipes.reproduce.real.slopes import ENTROPY, TENTHS
from recipes.reproduce.real_entropy.analysis import DRAFTS, Looks, Results
from recipes.reproduce.real_entropy.tables import at, in_tenth, mean

X = "entropy of the target, nats"


def draw(results: Results, folder: Path) -> dict[str, str]:
    """Draw every figure that has heads; return the caption of each file."""
    there = {head: looks for head, looks in results.items() if looks.plain}
    swept = {head: looks for head, looks in there.items() if looks.swept}
    captions = {}
    if swept:
        temperatures(swept, folder / "temperatures.svg")
        captions["temperatures.svg"] = (
            "Acceptance against the target's entropy over six temperatures (means over all contexts and positions, "
            "intervals over seeds and prompts): sampled drafts (left), greedy drafts (right)."
        )
    between(there, folder / "prompts.svg")
    tokens(there, folder / "tokens.svg")
    sides(there, folder / "entropies.svg")
    return captions | {
        "prompts.svg": "Acceptance of sampled drafts against the target's entropy at temperature 1, a point a prompt "
        "(mean over seeds), less the means of its kind.",
        "tokens.svg": "Acceptance by tenths of all tokens by the target's entropy at temperature 1: sampled drafts "
        "(left), greedy drafts (right).",
        "entropies.svg": "The draft's entropy against the target's: over temperatures (left), and by tenths of all "
        "tokens at temperature 1 (right); dotted: equal.",
    }


def points(panel: Any, x: list[Interval], y: list[Interval], head: str) -> None:
    """Draw a line through points with intervals of y."""
    panel.errorbar(
        [one.value for one in x], [one.value for one in y], errors(y), marker="o", ms=4, capsize=2, color=color(head),
        label=head,
    )  # fmt: skip


def temperatures(results: Results, path: Path) -> None:
    """Draw acceptance against entropy, one point per temperature."""
    with figure(path, 2, 5.2, 3.6, sharey=True) as axes:
        for panel, drafts in zip(axes, ("sampled", "greedy"), strict=True):
            for head, looks in results.items():
                arms = [at(looks, k) for k in range(len(TEMPERATURES))]
                points(panel, [mean(a, ENTROPY) for a in arms], [mean(a, DRAFTS[drafts]) for a in arms], head)
            panel.set(title=f"{drafts} drafts", xlabel=X)
        axes[0].set(ylabel="acceptance")
        axes[1].legend(fontsize=8)


def prompt_points(looks: Looks) -> Any:
    """Return entropy and acceptance of each prompt [N, 2], means over seeds minus the mean of its kind."""
    found = []
    for chains in looks.plain.values():
        numbers = [chains.numbers[name] for name in (ENTROPY, "overlap")]
        known = np.isfinite(numbers[0]).astype(float)
        sums = by_prompt(chains, [known, *(np.nan_to_num(one) for one in numbers)])
        found.append(sums[:, 1:] / sums[:, :1])
    values = np.mean(found, 0)
    chains = next(iter(looks.plain.values()))
    kinds = np.empty(len(values), chains.task.dtype)
    kinds[prompts(chains)] = chains.task
    for kind in np.unique(kinds):
        values[kinds == kind] -= values[kinds == kind].mean(0)
    return values


def between(results: Results, path: Path) -> None:
    """Draw acceptance against entropy, one point per prompt and one panel per head."""
    with figure(path, len(results), 3.6, 3.4, sharey=True, sharex=True, squeeze=False) as axes:
        for panel, (head, looks) in zip(axes[0], results.items(), strict=True):
            x, y = prompt_points(looks).T
            panel.scatter(x, y, s=8, color=color(head), alpha=0.5, linewidths=0)
            if np.ptp(x) > 0:
                slope = float((x * y).sum() / (x * x).sum())
                ends = np.array([x.min(), x.max()])
                panel.plot(ends, slope * ends, color="#374151", linewidth=1.2)
                panel.text(0.97, 0.95, f"{slope:.3f} per nat", transform=panel.transAxes, ha="right", fontsize=9)
            panel.set(title=head, xlabel="entropy of the target, nats")
        axes[0, 0].set(ylabel="acceptance of sampled drafts")


def tokens(results: Results, path: Path) -> None:
    """Draw acceptance against entropy, one point per tenth of all tokens."""
    with figure(path, 2, 5.2, 3.6, sharey=True) as axes:
        for panel, drafts in zip(axes, ("sampled", "greedy"), strict=True):
            for head, looks in results.items():
                x, y = ([in_tenth(looks, name, j) for j in range(TENTHS)] for name in (ENTROPY, DRAFTS[drafts]))
                points(panel, x, y, head)
            panel.set(title=f"{drafts} drafts", xlabel=X)
        axes[0].set(ylabel="acceptance")
        axes[1].legend(fontsize=8)


def sides(results: Results, path: Path) -> None:
    """Draw the draft's entropy against the target's."""
    with figure(path, 2, 5.2, 3.6) as axes:
        for head, looks in results.items():
            if looks.swept:
                arms = [at(looks, k) for k in range(len(TEMPERATURES))]
                points(axes[0], [mean(a, ENTROPY) for a in arms], [mean(a, "draft_entropy") for a in arms], head)
            x, y = ([in_tenth(looks, name, j) for j in range(TENTHS)] for name in (ENTROPY, "draft_entropy"))
            points(axes[1], x, y, head)
        for panel, title in zip(axes, ("over temperatures", "between tokens at temperature 1"), strict=True):
            end = max(panel.get_xlim()[1], 0.1)
            panel.plot([0, end], [0, end], ":", color="#6b7280", linewidth=1)
            panel.set(title=title, xlabel=X)
        axes[0].set(ylabel="entropy of the draft, nats")
        axes[1].legend(fontsize=8)
