"""``python -m recipes.reproduce.real_pays [--quick]``: compare accept length with its cost; see README.md."""

from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bebop.command import check_writable
from recipes.reproduce.cli import start
from recipes.reproduce.real.plan import PLAN
from recipes.reproduce.real_pays import prediction
from recipes.reproduce.real_pays.analysis import (
    accept_length,
    best_table,
    costs_table,
    facts,
    numbers,
    speeds_table,
)
from recipes.reproduce.real_pays.charts import draw
from recipes.reproduce.real_pays.rounds import (
    ANSWERS,
    GROUP,
    LENGTHS,
    NEW_TOKENS,
    REPEATS,
    ROUNDS,
    Sizes,
    held_out_prompts,
    measure,
    policy,
)
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import results_folder

HERE = results_folder(Path(__file__).parent)


def main() -> None:
    """Time all arms, judge the rules, draw the figures and write the results."""
    check_writable("BEBOP_REPRODUCE", HERE)
    started = begin("real_pays")
    model = policy()
    prompts = held_out_prompts(model)
    sizes = Sizes(rounds=ROUNDS, answers=ANSWERS, repeats=REPEATS)
    with tqdm(total=sizes.runs, desc="timing", unit="run") as bar:
        found = measure(model, prompts, bar.update, sizes)
    lengths = {k: float(np.mean([accept_length(r, ("bebop", k)).value for r in found.values()])) for k in LENGTHS}
    predicted = prediction.table(prediction.shape(model), float(np.mean([len(ids) for ids in prompts])), lengths)
    tables = {
        "What drafts bring, K as it was best in the other rounds": best_table(found),
        "Speeds": speeds_table(found),
        "Costs of a cycle in plain steps, sampled drafts": costs_table(found),
        prediction.WORD: predicted,
    }
    draw(found, HERE / "figures")
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


if __name__ == "__main__":
    start(main, __doc__)
