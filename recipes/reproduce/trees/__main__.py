"""``python -m recipes.reproduce.trees``: trees of drafts against chains, at equal verified positions; see README.md."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bebop.config.tree_shape import likeliest
from bebop.metrics.intervals import across_seeds
from bebop.trajectory import DecodeStats
from recipes.reproduce.cli import start
from recipes.reproduce.figures import errors, figure
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import SEEDS, everywhere, results_folder
from recipes.reproduce.trees.decoding import CALIBRATED_ON, MEASURED_ON, Chances, TreeArm, calibrate, chain, measure
from recipes.reproduce.trees.findings import NODES, TEMPERATURES

HERE = results_folder(Path(__file__).parent)
ARMS = ("chain", "ranks", "tree")
SHAPED = {"chain": "chain", "ranks": "tree, default ranks", "tree": "tree, calibrated"}
COLORS = {"chain": "#d1603d", "ranks": "#c79a1e", "tree": "#2563a8"}
Key = tuple[str, int, int, int]  # arm, nodes, temperature, seed
Results = Mapping[Key, DecodeStats]


def main() -> None:
    """Calibrate, decode, judge, draw, write."""
    started = begin("trees")
    places = list(product(SEEDS, TEMPERATURES))
    known = dict(zip(places, everywhere(calibrate, places, "calibration"), strict=True))
    keys: list[Key] = list(product(ARMS, NODES, TEMPERATURES, SEEDS))
    arms = [TreeArm(seed=s, temperature=t, nodes=n, options=options(arm, n, known[s, t])) for arm, n, t, s in keys]
    results = dict(zip(keys, everywhere(measure, arms, "trees"), strict=True))
    tables: dict[str, list[Any]] = {
        f"Temperature {t}": [row(results, arm, n, t) for n in NODES for arm in ARMS] for t in TEMPERATURES
    }
    tables["Chance of a child to be accepted, by depth and rank"] = [
        line for t in TEMPERATURES for line in chances([known[s, t] for s in SEEDS], t)
    ]
    draw(results)
    figures = {
        "accept_length.svg": "Accept length by drafts a cycle at temperature 0 (left) and 1 (right): mean over three "
        "seeds and its 95 % interval.",
    }
    shapes = {f"T = {t}, seed {s}": [list(p) for p in likeliest(known[s, t], max(NODES))] for s, t in known}
    plan = {"calibrated on": CALIBRATED_ON, "measured on": MEASURED_ON, "seeds": SEEDS, "shapes": shapes}
    keep(HERE, started, numbers(results), tables, figures, plan)


def options(arm: str, nodes: int, known: Chances) -> dict[str, Any]:
    """``decoding.options`` of an arm."""
    return {"chain": chain(nodes), "ranks": {}, "tree": {"chances": known}}[arm]


def numbers(results: Results) -> dict[str, Number]:
    """What the rules speak of."""
    found: dict[str, Number] = {}
    for nodes, temperature in product(NODES, TEMPERATURES):
        name = f"{nodes} nodes, T = {temperature}"
        lengths = {arm: np.array([results[arm, nodes, temperature, s].accept_length for s in SEEDS]) for arm in ARMS}
        found |= {f"{name}: {arm}": over_seeds(values) for arm, values in lengths.items()}
        found[f"{name}: tree - chain"] = over_seeds(lengths["tree"] - lengths["chain"])
    return found


def row(results: Results, arm: str, nodes: int, temperature: int) -> dict[str, Any]:
    """A line of a table."""
    runs = [results[arm, nodes, temperature, seed] for seed in SEEDS]
    return {
        "drafts": nodes,
        "shape": SHAPED[arm],
        "accept length": across_seeds([run.accept_length for run in runs]),
        "deepest draft tested": max(int(np.flatnonzero(run.reached).max()) + 1 for run in runs),
        "passes of the head per token": across_seeds([run.draft_forwards / run.tokens for run in runs]),
    }


def chances(tables: list[Chances], temperature: int) -> list[dict[str, Any]]:
    """Means over seeds at the first depths."""
    lines = []
    for depth in range(min(3, *(len(table) for table in tables))):
        shares = {
            f"rank {r}": float(np.mean([t[depth][r] if r < len(t[depth]) else 0 for t in tables])) for r in range(4)
        }
        lines.append({"temperature": temperature, "depth": depth + 1} | shares)
    return lines


def draw(results: Results) -> None:
    """The figure."""
    with figure(HERE / "figures" / "accept_length.svg", 2, 4.2, 3.2, sharey=True) as panels:
        for axes, temperature in zip(panels, TEMPERATURES, strict=True):
            for arm in ARMS:
                means = [
                    across_seeds([results[arm, nodes, temperature, s].accept_length for s in SEEDS]) for nodes in NODES
                ]
                style: dict[str, Any] = {"marker": "o", "capsize": 3, "color": COLORS[arm]}
                axes.errorbar(NODES, [m.value for m in means], errors(means), label=SHAPED[arm], **style)
            axes.set_xticks(NODES)
            axes.set(title=f"temperature {temperature}", xlabel="drafts a cycle")
        panels[0].set(ylabel="accept length")
        panels[0].legend(fontsize=8)


if __name__ == "__main__":
    start(main, __doc__)
