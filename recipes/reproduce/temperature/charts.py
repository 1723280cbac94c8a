"""The figures of the temperature recipe."""

from pathlib import Path

import numpy as np

from recipes.reproduce.figures import color, figure
from recipes.reproduce.harness import Results
from recipes.reproduce.study import DEPTH
from recipes.reproduce.temperature.slopes import bin_names, by_entropy, pairs
from recipes.reproduce.temperature.sweep import ARMS, DRAFTS, TEMPERATURES, HeadResult


def average(results: Results[HeadResult], arm: str, temperature: float, name: str) -> float:
    """Return a mean over the seeds at one temperature."""
    return float(np.mean([one.means[temperature][name] for one in results.of(arm)]))


def curve(results: Results[HeadResult], arm: str, name: str) -> list[float]:
    """Return a mean over the seeds at every temperature."""
    return [average(results, arm, t, name) for t in TEMPERATURES]


def temperatures(results: Results[HeadResult], path: Path) -> None:
    """Draw acceptance over entropy, with one point per temperature."""
    with figure(path, 2, 5.2, 3.6, sharey=True) as axes:
        for panel, (drafts, name) in zip(axes, DRAFTS.items(), strict=True):
            for arm in ARMS:
                x, y = curve(results, arm, "target_entropy"), curve(results, arm, name)
                panel.plot(x, y, marker="o", markersize=4, color=color(arm), label=arm)
            panel.set(title=f"{drafts} drafts", xlabel="entropy of the target, nats")
        for t, place in zip(TEMPERATURES, curve(results, ARMS[0], "target_entropy"), strict=True):
            axes[0].annotate(f"T={t}", (place, 0.01), xycoords=("data", "axes fraction"), fontsize=7, ha="center")
        axes[0].set(ylabel="acceptance")
        axes[1].legend(fontsize=8)


def positions(results: Results[HeadResult], path: Path) -> None:
    """Draw acceptance of sampled drafts over entropy, with one panel per draft position."""
    with figure(path, DEPTH, 3.8, 3.4, sharey=True) as axes:
        for k, panel in enumerate(axes, start=1):
            for arm in ARMS:
                x, y = curve(results, arm, f"target_entropy/{k}"), curve(results, arm, f"overlap/{k}")
                panel.plot(x, y, marker="o", markersize=3, color=color(arm), label=arm)
            panel.set(title=f"position {k}", xlabel="entropy of the target, nats")
        axes[0].set(ylabel="acceptance")
        axes[-1].legend(fontsize=7)


def bins(results: Results[HeadResult], path: Path) -> None:
    """Draw acceptance in bins of tokens by entropy."""
    with figure(path, 2, 5.2, 3.6, sharey=True) as axes:
        for panel, (drafts, name) in zip(axes, DRAFTS.items(), strict=True):
            for arm in ARMS:
                bins = [by_entropy(*pairs(one.plain, name)[1:]) for one in results.of(arm)]
                y = [np.mean([value for _, value, count in column if count]) for column in zip(*bins, strict=True)]
                panel.plot(range(len(y)), y, marker="o", markersize=4, color=color(arm), label=arm)
            panel.set_xticks(range(len(bin_names())), bin_names(), rotation=30)
            panel.set(title=f"{drafts} drafts", xlabel="entropy of the target at the token, nats")
        axes[0].set(ylabel="acceptance")
        axes[0].legend(fontsize=8)


def split(results: Results[HeadResult], path: Path) -> None:
    """Draw both parts of the overlap over temperature."""
    titles = {"alpha_p_gt_q": "p > q: mass of the draft", "alpha_q_ge_p": "q >= p: mass of the target"}
    with figure(path, 2, 5.2, 3.4) as axes:
        for panel, (name, title) in zip(axes, titles.items(), strict=True):
            for arm in ARMS:
                panel.plot(TEMPERATURES, curve(results, arm, name), marker="o", ms=4, color=color(arm), label=arm)
            panel.set(title=title, xlabel="temperature")
        axes[0].set(ylabel="part of the overlap")
        axes[1].legend(fontsize=8)
