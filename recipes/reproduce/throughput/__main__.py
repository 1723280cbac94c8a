"""``python -m recipes.reproduce.throughput``: tokens per second against acceptance; README.md states the rules."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.metrics.intervals import across_seeds
from recipes.reproduce.cli import start
from recipes.reproduce.figures import color, errors, figure
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import SEEDS, Arm, everywhere, prepare, results_folder
from recipes.reproduce.throughput.analysis import (
    Accepted,
    Results,
    costs_table,
    facts,
    fits_table,
    gains,
    heads_table,
    lengths_table,
    model_of,
    numbers,
    speed_up,
    speed_up_modelled,
)
from recipes.reproduce.throughput.heads import BEST, DRAFTS, HEADS, NOISE, arms, bench, make
from recipes.reproduce.throughput.timing import ARMS, BATCHES, LENGTHS, PLAIN, ROUNDS, Measured, measure

HERE = results_folder(Path(__file__).parent)
COLORS = {"start": "start", "hard_ce": "hard_ce", "e2e_tv": "e2e_tv"} | dict(
    zip(HEADS[3:], ("e2e_tv_corrected", "nla", "ce"), strict=True)
)  # head -> name of a colour in reproduce.figures
TICKS = ("o", "s")  # a marker a batch size


def main() -> None:
    """Train on both cores, time on one, judge, draw and store the results."""
    started = begin("throughput")
    everywhere(prepare, SEEDS, "sequences")
    everywhere(make, arms(), "heads")
    results: dict[tuple[int, int], Measured] = {}
    accepted: dict[int, dict[str, float]] = {}
    with tqdm(total=len(SEEDS) * len(BATCHES) * ROUNDS * len(ARMS), desc="timing", unit="run") as bar:
        for seed in SEEDS:
            heads = bench(seed)
            accepted[seed] = heads.accepted
            results |= {(seed, batch): m for batch, m in measure(heads, seed, bar.update).items()}
    tables = {
        "Heads": heads_table(results),
        "Draft length, best head": lengths_table(results),
        "Costs, in plain steps": costs_table(results),
        "Throughput gain on gain in accept length": fits_table(results, accepted),
        "Accepted drafts on held-out text": accepted_table(accepted),
    }
    draw(results, accepted)
    figures = {
        "gain.svg": "Relative gain in tokens/s over that in accept length, both over the head as it came; a point per "
        "head and seed. Dashed: a cycle costs the same whatever the head.",
        "speedup.svg": "Left: speed-up over plain decoding by number of drafts, measured (points, mean of three seeds "
        "and its 95 % interval) and modelled (lines). Right: measured against modelled, every arm and seed.",
    }
    plan: dict[str, Any] = {"arm": asdict(Arm(objective="", seed=0)), "noise": NOISE, "seeds": SEEDS}
    plan |= {"rounds": ROUNDS, "batches": BATCHES}
    HERE.mkdir(parents=True, exist_ok=True)
    keep(HERE, started, numbers(results, accepted), tables, figures, plan, facts(results))


def accepted_table(accepted: Accepted) -> list[dict[str, Any]]:
    """Return the expected accepted drafts of each head."""
    return [{"head": n, f"accepted of {DRAFTS}": across_seeds([accepted[s][n] for s in SEEDS])} for n in HEADS]


def draw(results: Results, accepted: Accepted) -> None:
    """Draw both figures."""
    with figure(HERE / "figures" / "gain.svg", 2, 4.6, 3.6, sharey=True) as panels:
        for axes, batch in zip(panels, BATCHES, strict=True):
            draw_gain(axes, results, accepted, batch)
        panels[0].legend(fontsize=8)
    with figure(HERE / "figures" / "speedup.svg", 2, 4.6, 3.6) as (left, right):
        for batch, tick, shade in zip(BATCHES, TICKS, ("#2563a8", "#d1603d"), strict=True):
            draw_lengths(left, results, batch, tick, shade)
            runs = [m for (_, b), m in results.items() if b == batch]
            pairs = [(model_of(m, arm), m.ratio(arm, PLAIN)) for m in runs for arm in ARMS[1:]]
            right.plot(*np.array(pairs).T, tick, markersize=4, color=shade, alpha=0.6, label=f"batch {batch}")
        low, high = min(right.get_xlim()[0], right.get_ylim()[0]), max(right.get_xlim()[1], right.get_ylim()[1])
        right.plot([low, high], [low, high], color="#6b7280", linestyle="--", linewidth=1)
        right.set(xlabel="modelled speed-up", ylabel="measured speed-up")
        right.legend()
        left.axhline(1, color="#6b7280", linestyle="--", linewidth=1)
        left.set(xlabel="drafts K", ylabel="speed-up over plain", xticks=LENGTHS)
        left.legend()


def draw_gain(axes: Any, results: Results, accepted: Accepted, batch: int) -> None:
    """Draw the points of every head and seed, and the line where both gains are equal."""
    points = np.stack([gains(results, accepted, seed, batch) for seed in SEEDS])  # [seeds, 2, heads]
    for i, name in enumerate(HEADS[1:]):
        axes.plot(*points[:, :, i].T, "o", markersize=5, color=color(COLORS[name]), label=name)
    ends = np.array([points[:, 0].min(), points[:, 0].max()])
    axes.plot(ends, ends, color="#6b7280", linestyle="--", linewidth=1)
    axes.plot([0], [0], "+", markersize=9, color=color("start"), label="start")
    axes.set(title=f"batch {batch}", xlabel="relative gain in accept length", ylabel="relative gain in tokens/s")


def draw_lengths(axes: Any, results: Results, batch: int, tick: str, shade: str) -> None:
    """Draw measured and modelled speed-up over K."""
    means = [speed_up(results, batch, (BEST, "bebop", k)) for k in LENGTHS]
    lines = [speed_up_modelled(results, batch, (BEST, "bebop", k)).value for k in LENGTHS]
    style = {"fmt": tick, "capsize": 3, "color": shade, "label": f"batch {batch}"}
    axes.errorbar(LENGTHS, [i.value for i in means], errors(means), **style)
    axes.plot(LENGTHS, lines, color=shade, linewidth=1.2)


if __name__ == "__main__":
    start(main, __doc__)
