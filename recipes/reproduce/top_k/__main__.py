"""``python -m recipes.reproduce.top_k``: total variation on K tokens: two readings, two starts, three seeds.

README.md says what counts.
"""

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from recipes.reproduce.cli import start
from recipes.reproduce.figures import color, errors, figure
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import HELD_OUT, SEEDS, everywhere, prepare, results_folder
from recipes.reproduce.top_k.analysis import gain, row, rule_numbers
from recipes.reproduce.top_k.arms import LEARNING_RATE, ROWS, SIZES, STARTS, STEPS, Results, labels, run
from recipes.reproduce.top_k.losses import MODES

HERE = results_folder(Path(__file__).parent)
COLORS = {"K = 4": "hard_ce", "K = 16": "ce", "K = 64": "nla", "all": "e2e_tv"}  # names of colours in reproduce.figures


def main() -> None:
    """Run all arms, judge, draw, write."""
    started = begin("top_k")
    everywhere(prepare, SEEDS, "sequences")
    listed = list(product(STARTS, labels(), SEEDS))
    results: Results = dict(zip(listed, everywhere(run, listed, "top-K"), strict=True))
    tables = {f"From the {start} head": [row(results, start, label) for label in labels()] for start in STARTS}
    draw(results)
    figures = {
        "accept_length.svg": "What the K largest draft logits alone cost in accept length (sampled drafts, three a "
        "cycle), beside the whole vocabulary (dashed). Mean of paired seeds and its 95 % interval.",
        "curves.svg": "Loss as trained, on the same three answers after every step (first seed): reading full, from "
        "the built-in head (left) and from a fresh one (right).",
    }
    plan = {"steps": STEPS, "rows_per_step": ROWS, "lr": LEARNING_RATE, "K": SIZES, "probed": HELD_OUT, "seeds": SEEDS}
    HERE.mkdir(parents=True, exist_ok=True)
    keep(HERE, started, rule_numbers(results), tables, figures, plan)


def draw(results: Results) -> None:
    """Both figures."""
    with figure(HERE / "figures" / "accept_length.svg", 2, 4.6, 3.4) as panels:
        for axes, start in zip(panels, STARTS, strict=True):
            for i, mode in enumerate(MODES):
                means = [gain(results, start, f"K = {k}, {mode}") for k in SIZES]
                style: dict[str, Any] = {"marker": "os"[i], "capsize": 3, "color": ("#2563a8", "#d1603d")[i]}
                places = np.arange(len(SIZES)) + 0.12 * i - 0.06
                axes.errorbar(places, [-m.value for m in means], errors(means)[::-1], label=mode, **style)
            axes.axhline(0, color="#6b7280", linestyle="--", linewidth=1)
            axes.set_xticks(range(len(SIZES)), [str(k) for k in SIZES])
            axes.set(title=f"from the {start} head", xlabel="tokens in the loss (K)", ylabel="change of accept length")
        panels[0].legend(title="reading", loc="lower right")
    with figure(HERE / "figures" / "curves.svg", 2, 4.6, 3.4) as panels:
        for axes, start in zip(panels, STARTS, strict=True):
            for name in (*(f"K = {k}" for k in SIZES), "all"):
                curves = results[start, name if name == "all" else f"{name}, full", SEEDS[0]].curves
                assert curves is not None
                axes.plot(curves.loss, color=color(COLORS[name]), label=name, linewidth=1.2)
            axes.set(title=f"from the {start} head", xlabel="step", ylabel="loss as trained, fixed text")
        panels[1].legend()


if __name__ == "__main__":
    start(main, __doc__)
