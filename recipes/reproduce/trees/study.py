"""Draft trees against chains, at equal verified positions; see README.md."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from bebop.config.tree_shape import likeliest
from bebop.trajectory import DecodeStats
from recipes.reproduce.claims import BUILT_IN
from recipes.reproduce.figures import Curve, Panel, draw
from recipes.reproduce.harness import Figure, Results, Row, Study
from recipes.reproduce.rules import Stat, gain
from recipes.reproduce.study import SEEDS, once
from recipes.reproduce.trees.decoding import (
    CALIBRATED_ON,
    MEASURED_ON,
    Chances,
    TreeArm,
    calibrate,
    chain,
)
from recipes.reproduce.trees.decoding import measure as decode

NODES = (7, 16, 32)
TEMPERATURES = (0, 1)
SHAPES = {"chain": "chain", "ranks": "tree, default ranks", "tree": "tree, calibrated"}
COLORS = {"chain": "hard_ce", "ranks": "ce", "tree": "tv"}
LENGTH = Stat(name="accept length", value=lambda stats: stats.accept_length, arm="{at}{arm}")
RULES = tuple(
    gain(
        "trees", LENGTH, f"{nodes} nodes, T = {temperature}: tree", over=f"{nodes} nodes, T = {temperature}: chain",
        says=f"At temperature {temperature} a calibrated tree of {nodes} drafts beats a chain of {nodes}.",
        also={"a tree of the default ranks": LENGTH(f"{nodes} nodes, T = {temperature}: ranks")},
    )
    for temperature in TEMPERATURES
    for nodes in NODES
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Shape of the drafts: Arm(shape="tree", nodes=16, temperature=1)."""

    shape: str
    nodes: int
    temperature: int

    @property
    def label(self) -> str:
        """Return the name of the arm in rules: 16 nodes, T = 1: tree."""
        return f"{self.nodes} nodes, T = {self.temperature}: {self.shape}"


ARMS = {
    arm.label: arm for arm in (Arm(shape=a, nodes=n, temperature=t) for a, n, t in product(SHAPES, NODES, TEMPERATURES))
}


def chances(seed: int, temperature: int) -> Chances:
    """Return the acceptance of children by depth and rank, measured once for a seed and a temperature."""
    return once("trees", f"chances-{temperature}-{seed}", CALIBRATED_ON, lambda: calibrate((seed, temperature)))


def measure(arm: Arm, seed: int) -> DecodeStats:
    """Decode with one shape of drafts."""
    known = chances(seed, arm.temperature)
    options: dict[str, Any] = {"chain": chain(arm.nodes), "ranks": {}, "tree": {"chances": known}}[arm.shape]
    return decode(TreeArm(seed=seed, temperature=arm.temperature, nodes=arm.nodes, options=options))


def row(results: Results[DecodeStats], arm: Arm) -> Row:
    """Return one row of the table of a temperature."""
    return {
        "drafts": arm.nodes,
        "shape": SHAPES[arm.shape],
        "accept length": results.mean(arm.label, LENGTH.value),
        "deepest draft tested": max(int(np.flatnonzero(one.reached).max()) + 1 for one in results.of(arm.label)),
        "passes of the head per token": results.mean(arm.label, lambda one: one.draft_forwards / one.tokens),
    }


def chance_rows(temperature: int) -> list[Row]:
    """Return the acceptance of children at the first depths, means over seeds."""
    found = [chances(seed, temperature) for seed in SEEDS]
    return [
        {"temperature": temperature, "depth": depth + 1}
        | {f"rank {r}": float(np.mean([t[depth][r] if r < len(t[depth]) else 0 for t in found])) for r in range(4)}
        for depth in range(min(3, *map(len, found)))
    ]


def tables(results: Results[DecodeStats]) -> Mapping[str, Sequence[Row]]:
    """Return one table of shapes per temperature, and the acceptance that calibrated the trees."""
    shapes = {
        f"Temperature {t}": [row(results, Arm(shape=a, nodes=n, temperature=t)) for n in NODES for a in SHAPES]
        for t in TEMPERATURES
    }
    counted = [line for temperature in TEMPERATURES for line in chance_rows(temperature)]
    return {**shapes, "Chance of a child to be accepted, by depth and rank": counted}


def draw_lengths(results: Results[DecodeStats], path: Path) -> None:
    """Draw accept length by drafts, with one panel per temperature."""

    def curve(shape: str, temperature: int) -> Curve:
        arms = [Arm(shape=shape, nodes=n, temperature=temperature).label for n in NODES]
        means = [results.mean(arm, LENGTH.value) for arm in arms]
        return Curve(label=SHAPES[shape], x=NODES, y=means, color=COLORS[shape])

    panels = [
        Panel(curves=[curve(s, t) for s in SHAPES], title=f"temperature {t}", x="drafts a cycle", y="accept length",
              legend=not t)
        for t in TEMPERATURES
    ]  # fmt: skip
    draw(path, panels, width=4.2, sharey=True)


STUDY = Study(
    name="trees",
    paper="trees of drafts, arXiv 2410.20488",
    model=BUILT_IN,
    arms=ARMS,
    measure=measure,
    prepare=tuple(partial(chances, temperature=t) for t in TEMPERATURES),
    rules=RULES,
    tables=tables,
    figures=(
        Figure(
            file="accept_length.svg",
            caption="Accept length by drafts a cycle at temperature 0 (left) and 1 (right): mean over three seeds and "
            "its 95 % interval.",
            draw=draw_lengths,
        ),
    ),
    settings={"calibrated on": CALIBRATED_ON, "measured on": MEASURED_ON},
    facts=lambda results: {
        f"shape, T = {t}, seed {s}": [list(p) for p in likeliest(chances(s, t), max(NODES))]
        for s, t in product(SEEDS, TEMPERATURES)
    },
)
