"""The figures of the study: accept length against entropy, and acceptance by position."""

from pathlib import Path
from typing import Any

import numpy as np

from recipes.reproduce.figures import color, errors, figure
from recipes.reproduce.real.arms import each, interval, of_arm
from recipes.reproduce.real.effects import mean_of
from recipes.reproduce.real.slopes import ENTROPY
from recipes.reproduce.real_regime.analysis import OBJECTIVES, Found, positions
from recipes.reproduce.real_regime.plan import DEPTH, TEMPERATURES

# Arms as the paper's figures name them: drafts, objective of the head, and the number of a chain.
ARMS = {
    "greedy drafts, ce": ("ce", "accept_greedy", "s"), "sampled drafts, ce": ("ce", "accept", "o"),
    "sampled drafts, TV": ("tv", "accept", "o"), "sampled drafts, end-to-end TV": ("e2e_tv", "accept", "o"),
}  # fmt: skip


def draw(form: str, found: Found, folder: Path) -> dict[str, str]:
    """Draw all figures of a form; return each with the sentence below it."""
    against_entropy(found, folder / f"{form}-entropy.svg")
    by_position(found, folder / f"{form}-positions.svg")
    return {
        f"{form}-entropy.svg": "Accept length with three drafts against the mean entropy of the target: a point a "
        "temperature with its 95 % interval (left), and a point a kind of prompt at the temperature of training "
        "(right). Squares: greedy drafts.",
        f"{form}-positions.svg": "Acceptance of each draft, given that those before it are accepted: sampled drafts "
        "(left), greedy drafts (right). Means over seeds.",
    }


def against_entropy(found: Found, path: Path) -> None:
    """Draw accept length against entropy, over temperatures and over kinds of prompts."""
    with figure(path, columns=2, sharey=True) as (left, right):
        for label, (name, number, marker) in ARMS.items():
            style: dict[str, Any] = {"color": color(name), "marker": marker, "mfc": "none" if marker == "s" else None}
            arms = [arm for t in TEMPERATURES if (arm := found.arm(name, t))]
            if not arms:
                continue
            x = [of_arm(each(arm, lambda one: mean_of(one, one.numbers[ENTROPY]))) for arm in arms]
            y = [interval(of_arm(each(arm, lambda one, n=number: mean_of(one, getattr(one, n))))) for arm in arms]  # type: ignore[misc]
            at = [one.value if one is not None else float("nan") for one in x]
            left.errorbar(at, [one.value for one in y], errors(y), capsize=3, label=label, **style)
            chains = [*found.arm(name).values()]
            kinds = np.unique(chains[0].task)
            own = [chains[0].task == kind for kind in kinds]
            places = [chains[0].numbers[ENTROPY][some].mean() for some in own]
            means = [np.mean([getattr(one, number)[some].mean() for one in chains]) for some in own]
            right.plot(places, means, linestyle="none", **style)
        left.set(xlabel="entropy of the target, nats", ylabel="accept length, three drafts")
        right.set(xlabel="entropy of the target, nats")
        left.legend(fontsize=8)


def by_position(found: Found, path: Path) -> None:
    """Draw the acceptance of each draft of a chain."""
    lines = positions(found)
    with figure(path, columns=2, sharey=True) as axes:
        for panel, drafts in zip(axes, ("sampled", "greedy"), strict=True):
            for line in lines:
                if line["drafts"] == drafts and line["head"] in OBJECTIVES:
                    values = [float(line[f"draft {k + 1}"]) for k in range(DEPTH)]
                    panel.plot(range(1, DEPTH + 1), values, marker="o", color=color(line["head"]), label=line["head"])
            panel.set(xlabel=f"draft of a chain, {drafts}", xticks=range(1, DEPTH + 1))
        axes[0].set(ylabel="acceptance")
        axes[0].legend(fontsize=8)
