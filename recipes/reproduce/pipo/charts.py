"""The figures of the pipo recipe."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bebop.metrics.intervals import across_seeds
from recipes.reproduce.figures import band, color, errors, figure
from recipes.reproduce.pipo.analysis import plain_reward, reliability, reward
from recipes.reproduce.pipo.arms import DEFAULT, DISTILLED
from recipes.reproduce.pipo.jobs import BY_CHANCE, MAIN, SHARES, SWEPT, Measured

INKS = {DEFAULT: "ce", DISTILLED: "tv", BY_CHANCE: "hard_ce", "plain": "start"}  # names of colours


def draw(results: Sequence[Measured], folder: Path) -> dict[str, str]:
    """Draw all figures; return their captions by file name."""
    sweep(results, folder / "sweep.svg")
    budgets(results, folder / "budgets.svg")
    confidence(results, folder / "reliability.svg")
    return {
        "sweep.svg": "Reward (left) and total variation to the teacher of the laws that tokens were drawn from (right) "
        "by pad ratio; the dotted line is plain decoding, intervals over three seeds.",
        "budgets.svg": "Reward of the answers that end within so many passes of the backbone (left) and tokens "
        "(right), 35 % of the drafts dropped; bands over three seeds.",
        "reliability.svg": "Acceptance of drafts, 1 - TV at their place, by confidence; drafts of all seeds, 35 % of "
        "them dropped.",
    }


def sweep(results: Sequence[Measured], path: Path) -> None:
    """Draw reward and total variation over the pad ratio."""
    with figure(path, 2, 4.8, 3.4) as axes:
        for arm in (*SWEPT, BY_CHANCE):
            shares = [share for share in SHARES if (arm, share) in results[0].answers]
            own = [[m.answers[arm, share] for m in results] for share in shares]
            at = [np.mean([a.pad_ratio for a in column]) for column in own]
            for panel, value in zip(axes, (reward, lambda a: a.variation), strict=True):
                means = [across_seeds([value(a) for a in column]) for column in own]
                panel.errorbar(
                    at, [m.value for m in means], errors(means), color=color(INKS[arm]), marker="o", ms=4, capsize=3,
                    label=arm,
                )  # fmt: skip
        axes[0].axhline(np.mean([plain_reward(m, "whole answers") for m in results]), color="#9aa3ad", linestyle=":")
        axes[0].set(xlabel="pad ratio", ylabel="reward", ylim=(0, None))
        axes[1].set(xlabel="pad ratio", ylabel="TV to the teacher", ylim=(0, None))
        axes[0].legend(fontsize=8)


def budgets(results: Sequence[Measured], path: Path) -> None:
    """Draw reward over the budget, in passes and in tokens."""
    with figure(path, 2, 4.8, 3.4) as axes:
        for panel, of, most in zip(axes, ("pairs", "tokens"), (100, 160), strict=True):
            at = np.linspace(20, most, 29)
            for arm in SWEPT:
                means = [across_seeds([m.answers[arm, MAIN].within(x, of) for m in results]) for x in at]
                band(panel, at, means, INKS[arm], arm)
            means = [across_seeds([(m.plain[0] * (m.plain[1] <= x)).mean() for m in results]) for x in at]
            band(panel, at, means, INKS["plain"], "plain decoding")
            unit = "passes of the backbone" if of == "pairs" else "tokens"
            panel.set(xlabel=unit, ylabel="reward", ylim=(0, None))
        axes[0].legend(fontsize=8)


def confidence(results: Sequence[Measured], path: Path) -> None:
    """Draw the overlap of drafts over their confidence."""
    with figure(path, 1, 4.4, 3.6) as axes:
        axes.plot([0, 1], [0, 1], color="#9aa3ad", linestyle=":")
        for arm in SWEPT:
            said, true, _ = np.array(reliability([m.answers[arm, MAIN] for m in results])).T
            axes.plot(said, true, color=color(INKS[arm]), marker="o", ms=4, label=arm)
        axes.set(xlabel="confidence", ylabel="acceptance, 1 - TV", xlim=(0, 1), ylim=(0, 1))
        axes.legend(fontsize=8)
