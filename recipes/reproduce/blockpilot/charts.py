"""Figures of the BlockPilot study."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bebop.metrics.intervals import across_seeds
from recipes.reproduce.blockpilot.comparison import ARMS, SCORES, Found
from recipes.reproduce.blockpilot.costs import SPENT, TIMED
from recipes.reproduce.blockpilot.sweeps import CANDIDATES, CYCLES, FULL, SIZES
from recipes.reproduce.figures import band, bars, color, figure
from recipes.reproduce.study import TASKS

UNITS = {"tau": "tokens a cycle", "speed": "tokens per processor second"}
LABELS = {"draft": "draft", "verify": "verify", "cycle": "whole cycle"}
INKS = {"draft": "ce", "verify": "tv", "cycle": "start"}  # names of colours
TASK_INKS = dict(zip(TASKS, ("ce", "tv", "nla"), strict=True))


def draw(results: Sequence[Found], folder: Path) -> dict[str, str]:
    """Draw all figures; return the caption of each file."""
    sizes(results, folder / "sizes.svg")
    cost_curves(results, folder / "costs.svg")
    arms(results, folder / "arms.svg")
    return {
        "sizes.svg": "Tokens a cycle by block size, temperature 0, by task (left; the band is Student's t over three "
        "seeds), and by the number of the cycle, all tasks (right).",
        "costs.svg": "Processor time of a cycle by block size, one request (left), and tokens a second that follow "
        "from it (right); bands over three seeds.",
        "arms.svg": "Ways to choose one of five candidates on held-out prompts, in tokens a cycle (left) and tokens "
        "per processor time (right); intervals over three seeds.",
    }


def sizes(results: Sequence[Found], path: Path) -> None:
    """Draw tokens per cycle by block size, and by the number of the cycle."""
    with figure(path, 2, 5.0, 3.6) as (left, right):
        for task in TASKS:
            means = []
            for one in results:
                own = np.array([t == task for t in one.swept.tasks])
                means.append(np.nanmean((one.swept.tokens / one.swept.cycles)[:FULL][own[:FULL]], 0))
            over = [across_seeds(column) for column in np.array(means).T]
            band(left, SIZES, over, TASK_INKS[task], task, marker="o", ms=3)
        left.set(xlabel="block size b", ylabel="tokens a cycle")
        left.legend(fontsize=8)
        for size, ink in zip((CANDIDATES[0], CANDIDATES[2], CANDIDATES[-1]), ("ce", "tv", "nla"), strict=True):
            sums = np.sum([one.swept.by_cycle[SIZES.index(size)] for one in results], 0)
            seen = sums[:, 1] > 10
            at = np.arange(1, CYCLES + 1)[seen]
            right.plot(at, sums[seen, 0] / sums[seen, 1], color=color(ink), label=f"b = {size}", marker="o", ms=3)
        right.set(xlabel="cycle of an answer", ylabel="tokens in that cycle")
        right.legend(fontsize=8)


def cost_curves(results: Sequence[Found], path: Path) -> None:
    """Draw the processor time of drafts, verification and the whole cycle by block size, and tokens per second."""
    curves = 1e3 * np.array([one.timed.curves for one in results])  # [seeds, sizes, 3]
    with figure(path, 2, 5.0, 3.6) as (left, right):
        for i, name in enumerate(SPENT):
            band(left, TIMED, [across_seeds(c) for c in curves[:, :, i].T], INKS[name], LABELS[name], marker="o", ms=3)
        left.set(xlabel="block size b", ylabel="processor time of a cycle, ms", ylim=(0, None))
        left.legend(fontsize=8)
        at = [TIMED.index(size) for size in SIZES]
        rates = [
            (one.swept.tokens / one.swept.cycles)[:FULL].mean(0) / one.timed.curves[at, SPENT.index("cycle")]
            for one in results
        ]
        plain = [1 / one.timed.curves[0, SPENT.index("cycle")] for one in results]
        band(right, SIZES, [across_seeds(c) for c in np.array(rates).T], "e2e_tv", "blocks of b", marker="o", ms=3)
        right.axhline(np.mean(plain), color="#9aa3ad", linewidth=1, label="plain decoding")
        right.set(xlabel="block size b", ylabel="tokens a second", ylim=(0, None))
        right.legend(fontsize=8)


def arms(results: Sequence[Found], path: Path) -> None:
    """Draw every arm by both scores."""
    with figure(path, 2, 5.0, 3.8) as axes:
        for panel, score in zip(axes, SCORES, strict=True):
            means = [across_seeds([one.compared[score][arm].mean() for one in results]) for arm in ARMS]
            bars(panel, ARMS, means)
            panel.set(ylabel=UNITS[score])
