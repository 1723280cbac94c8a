"""``python -m recipes.reproduce.real_pays [--quick]``: accept length against what it costs; see README.md."""

from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.command import check_writable
from recipes.reproduce.cli import start
from recipes.reproduce.figures import errors, figure
from recipes.reproduce.real.plan import PLAN
from recipes.reproduce.real_pays import prediction
from recipes.reproduce.real_pays.analysis import (
    accept_length,
    best_table,
    break_even,
    costs_table,
    facts,
    numbers,
    over_rounds,
    speeds_table,
)
from recipes.reproduce.real_pays.rounds import (
    ANSWERS,
    ARMS,
    DRAFTING,
    GROUP,
    LENGTHS,
    NEW_TOKENS,
    REPEATS,
    ROUNDS,
    Rounds,
    held_out_prompts,
    measure,
    policy,
)
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import results_folder

HERE = results_folder(Path(__file__).parent)
SHADES = {"bebop": "#16407a", "target_only": "#d1603d"}


def main() -> None:
    """Time, judge, draw, write."""
    check_writable("BEBOP_REPRODUCE", HERE)
    started = begin("real_pays")
    model = policy()
    prompts = held_out_prompts(model)
    with tqdm(total=ROUNDS * len(ANSWERS) * (len(ARMS) + 1), desc="timing", unit="run") as bar:
        found = measure(model, prompts, bar.update)
    lengths = {k: float(np.mean([accept_length(r, ("bebop", k)).value for r in found.values()])) for k in LENGTHS}
    predicted = prediction.table(prediction.shape(model), float(np.mean([len(ids) for ids in prompts])), lengths)
    tables = {
        "What drafts bring, K as it was best in the other rounds": best_table(found),
        "Speeds": speeds_table(found),
        "Costs of a cycle in plain steps, sampled drafts": costs_table(found),
        prediction.WORD: predicted,
    }
    draw(found)
    figures = {
        "pays.svg": "Top: tokens per processor second over those of plain decoding, by number of drafts; mean of the "
        "rounds and its 95 % interval. Bottom: the accept length that is there, and the one that pays for the passes "
        "of a cycle.",
    }
    plan: dict[str, Any] = {
        "model": PLAN.model,
        "rounds": ROUNDS,
        "answers": ANSWERS,
        "group": GROUP,
        "new tokens": NEW_TOKENS,
    }
    plan |= {"repeats": REPEATS, "prompts": len(prompts)}
    keep(HERE, started, numbers(found), tables, figures, plan, facts(found))


def draw(found: Rounds) -> None:
    """Speed-ups above, accept lengths below; a column a batch size."""
    with figure(HERE / "figures" / "pays.svg", len(found), 3.4, 2.8, 2, squeeze=False) as panels:
        for (batch, rounds), above, below in zip(found.items(), *panels, strict=True):
            for system, lengths in DRAFTING.items():
                style = {"capsize": 3, "marker": "o", "color": SHADES[system], "label": system}
                speeds = [over_rounds(rounds, lambda one, arm=(system, k): one.ratio(arm)) for k in lengths]  # type: ignore[misc]
                above.errorbar(lengths, [i.value for i in speeds], errors(speeds), **style)
                there = [accept_length(rounds, (system, k)) for k in lengths]
                below.errorbar(lengths, [i.value for i in there], errors(there), **style)
            needed = [over_rounds(rounds, lambda one, k=k: break_even(one, k)).value for k in LENGTHS]  # type: ignore[misc]
            above.axhline(1, color="#6b7280", linestyle="--", linewidth=1)
            below.plot(LENGTHS, needed, color="#6b7280", linestyle="--", label="break-even")
            above.set(title=f"batch {batch}", xticks=LENGTHS)
            below.set(xlabel="drafts K", xticks=LENGTHS)
        panels[0][0].set(ylabel="speed-up over plain")
        panels[1][0].set(ylabel="accept length")
        panels[1][0].legend(fontsize=8)


if __name__ == "__main__":
    start(main, __doc__)
