"""Total variation on K tokens: two readings, two starts, three seeds; README.md states the rules."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from recipes.reproduce.claims import BUILT_IN
from recipes.reproduce.figures import Curve, Panel, draw
from recipes.reproduce.harness import Figure, Results, Row, Study
from recipes.reproduce.rules import Stat, every, rise
from recipes.reproduce.study import HELD_OUT, SEEDS, prepare
from recipes.reproduce.top_k.arms import LEARNING_RATE, ROWS, SIZES, SKIP, STARTS, STEPS, RunResult, labels, run
from recipes.reproduce.top_k.curves import numbers
from recipes.reproduce.top_k.losses import MODES

COLORS = {"K = 4": "hard_ce", "K = 16": "ce", "K = 64": "nla", "all": "e2e_tv"}  # names of colours in reproduce.figures
CUT = ("K = 4, full", "K = 4, renormalised", "K = 64, full", "K = 64, renormalised")
SPIKED = [(start, f"K = 4, {mode}") for start in ("built-in", "fresh") for mode in ("full", "renormalised")]
LENGTH = Stat(name="accept length", value=lambda run: run.sampled, arm="{at}length {arm}")
SPREAD = Stat(
    name="spread of the step-to-step change of the log loss",
    value=lambda run: numbers(run.curves, SKIP)["loss spread"],
    arm="{at}spread {arm}",
    gains="{at}spread {a} - {b}",
)
RULES = (
    *(
        every(
            "Fig 14b", f"From the {start} head, TV on the whole vocabulary beats TV on the K largest draft logits.",
            *(rise(LENGTH, f"{start}: all", f"{start}: {label}") for label in CUT),
        )
        for start in ("built-in", "fresh")
    ),
    every(
        "Fig 14b", "With few tokens the training curve has spikes, as the set of tokens changes between steps.",
        *(rise(SPREAD, f"{start}: {label}", f"{start}: all") for start, label in SPIKED),
    ),
)  # fmt: skip
SUMMED = ("loss spread", "largest rise", "gradient spread", "churn", "final full TV")
ARMS = {f"{start}: {label}": (start, label) for start in STARTS for label in labels()}
TRAINED = [name for name, (_, label) in ARMS.items() if label != "start"]
SHORT = [name for name, (_, label) in ARMS.items() if label.startswith("K")]


def whole(name: str) -> str:
    """Return the name of the whole-vocabulary arm with the same start."""
    return f"{ARMS[name][0]}: all"


def measure(arm: tuple[str, str], seed: int) -> RunResult:
    """Train one head and probe it."""
    return run((*arm, seed))


def summed(run: RunResult, name: str) -> float:
    """Return one of the numbers that sum up the curves of a trained head."""
    assert run.curves is not None
    return numbers(run.curves, SKIP)[name]


def row(results: Results[RunResult], name: str) -> Row:
    """Return one row of the table of a start."""
    line: dict[str, Any] = {"tokens": ARMS[name][1], "accept length": results.mean(name, LENGTH.value)}
    line["greedy drafts"] = results.mean(name, lambda one: one.greedy)
    if name in TRAINED:
        line |= results.row(name, {one: partial(summed, name=one) for one in SUMMED})
    return line


def tables(results: Results[RunResult]) -> Mapping[str, Sequence[Row]]:
    """Return one table per start."""
    return {f"From the {start} head": [row(results, f"{start}: {label}") for label in labels()] for start in STARTS}


def draw_lengths(results: Results[RunResult], path: Path) -> None:
    """Draw the change in accept length with few tokens, relative to the whole vocabulary."""

    def curve(start: str, i: int, mode: str) -> Curve:
        gains = [LENGTH.gain(f"{start}: K = {k}, {mode}", f"{start}: all") for k in SIZES]
        means = [results.interval(one) for one in gains]
        x = [place + 0.12 * i - 0.06 for place in range(len(SIZES))]
        return Curve(label=mode, x=x, y=means, color=("tv", "hard_ce")[i], style={"marker": "os"[i]})

    panels = [
        Panel(curves=[curve(start, i, mode) for i, mode in enumerate(MODES)], title=f"from the {start} head",
              x="tokens in the loss (K)", y="change of accept length", ticks=[str(k) for k in SIZES], level=0.0,
              legend=start == STARTS[0])
        for start in STARTS
    ]  # fmt: skip
    draw(path, panels, height=3.4)


def draw_curves(results: Results[RunResult], path: Path) -> None:
    """Draw the loss as trained, for the first seed."""

    def curve(start: str, name: str) -> Curve:
        curves = results[f"{start}: {name if name == 'all' else f'{name}, full'}", SEEDS[0]].curves
        assert curves is not None
        steps = range(len(curves.loss))
        return Curve(label=name, x=steps, y=curves.loss.tolist(), color=COLORS[name], style={"marker": "", "lw": 1.2})

    names = (*(f"K = {k}" for k in SIZES), "all")
    panels = [
        Panel(curves=[curve(start, name) for name in names], title=f"from the {start} head", x="step",
              y="loss as trained, fixed text", legend=start != STARTS[0])
        for start in STARTS
    ]  # fmt: skip
    draw(path, panels, height=3.4)


STUDY = Study(
    name="top_k",
    paper="Fig 14b of arXiv 2606.12370",
    model=BUILT_IN,
    arms=ARMS,
    measure=measure,
    prepare=(prepare,),
    stats=(
        *(LENGTH(name) for name in ARMS),
        *(SPREAD(name) for name in TRAINED),
        *(LENGTH.gain(whole(name), name) for name in SHORT),
        *(SPREAD.gain(name, whole(name)) for name in SHORT),
    ),
    rules=RULES,
    tables=tables,
    figures=(
        Figure(
            file="accept_length.svg",
            caption="What the K largest draft logits alone cost in accept length (sampled drafts, three a cycle), "
            "beside the whole vocabulary (dashed). Mean of paired seeds and its 95 % interval.",
            draw=draw_lengths,
        ),
        Figure(
            file="curves.svg",
            caption="Loss as trained, on the same three answers after every step (first seed): reading full, from the "
            "built-in head (left) and from a fresh one (right).",
            draw=draw_curves,
        ),
    ),
    settings={"steps": STEPS, "rows_per_step": ROWS, "lr": LEARNING_RATE, "K": SIZES, "probed": HELD_OUT},
)
