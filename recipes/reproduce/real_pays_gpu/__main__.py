"""Compare accept length with its cost on a GPU: ``python -m recipes.reproduce.real_pays_gpu``; see README.md."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from bebop.command import Parser, check_writable, run_main, whole, writing
from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from recipes.reproduce.real.plan import PLAN, load, require_shipped_head
from recipes.reproduce.real.prompts import make_prompts
from recipes.reproduce.real_pays import prediction
from recipes.reproduce.real_pays.analysis import best_table, costs_table, speeds_table
from recipes.reproduce.real_pays.charts import draw
from recipes.reproduce.real_pays.rounds import GROUP, LENGTHS, NEW_TOKENS, Rounds, Sizes, held_out_prompts, measure
from recipes.reproduce.real_pays_gpu.analysis import Predicted, facts, numbers, prediction_table
from recipes.reproduce.real_pays_gpu.findings import BATCHES
from recipes.reproduce.real_regime.rollouts import of_split, read_prompts, write_prompts
from recipes.reproduce.record import Started, begin, keep
from recipes.reproduce.study import QUICK, results_folder

HERE = results_folder(Path(__file__).parent)
DTYPE = "bfloat16"
FULL = Sizes(rounds=6, answers={1: 1, 8: 8, 32: 32, 256: 256}, repeats=5)
SIZES = Sizes(rounds=2, answers=dict.fromkeys(BATCHES, 2), repeats=2) if QUICK else FULL


def policy() -> Policy:
    """Load the model with the head that Bebop ships for it, on the GPU; a smoke run without a GPU uses the CPU.

    Raises:
        UserError: There is no GPU, or the head that Bebop ships is missing.
    """
    there = torch.cuda.is_available()
    if not (there or QUICK):
        raise UserError("real_pays_gpu needs a GPU, and torch finds none; on a processor: recipes.reproduce.real_pays")
    require_shipped_head(PLAN.model)
    torch.set_num_threads(1)
    return load_policy(ModelConfig(path=PLAN.model, device="cuda" if there else "cpu", dtype=DTYPE, init_mtp=True))


def predict(model: Policy, prompt: float) -> Predicted:
    """Return the roofline's seconds per cycle, for prompts of ``prompt`` tokens."""
    shape = prediction.shape(model)
    return {b: {k: prediction.cycle(shape, b, prompt, k) for k in (0, *LENGTHS)} for b in BATCHES}


def arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line; ``study.py`` reads ``--quick`` itself."""
    parser = Parser(prog="python -m recipes.reproduce.real_pays_gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run on next to nothing; overwrites no results")
    ends = "after which no further round begins; two are always made (default: all, some ten minutes)"
    parser.add_argument("--seconds", type=whole(1), default=math.inf, help=ends)
    parser.add_argument("--out", type=Path, default=HERE, metavar="DIR", help="of results and figures (default: here)")
    parser.add_argument(
        "--write-prompts", type=Path, metavar="FILE", help="only write the prompts, for a machine that cannot make them"
    )
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="use the prompts of --write-prompts")
    return parser.parse_args(given)


def main(given: list[str]) -> None:
    """Time all arms; judge the rules, draw the figures and write the results after each round."""
    options = arguments(given)
    if options.write_prompts is not None:
        with writing(options.write_prompts):
            write_prompts(options.write_prompts, make_prompts(PLAN, load(PLAN)))
        return
    sizes = replace(SIZES, seconds=options.seconds)
    check_writable("--out", options.out)
    started = begin("real_pays_gpu")
    known = None if options.prompts is None else of_split(read_prompts(options.prompts), "test")
    model = policy()
    prompts = held_out_prompts(model) if known is None else [one.token_ids for one in known]
    with tqdm(total=sizes.runs, desc="timing", unit="run") as bar:
        measure(model, prompts, bar.update, sizes, partial(conclude, options.out, started, model, prompts, sizes))


def conclude(
    out: Path, started: Started, model: Policy, prompts: Sequence[tuple[int, ...]], sizes: Sizes, found: Rounds
) -> None:
    """Judge the rounds so far, and write results and figures to ``out``."""
    predicted = predict(model, float(np.mean([len(ids) for ids in prompts])))
    tables = {
        "What drafts bring, K as it was best in the other rounds": best_table(found),
        "Speeds": speeds_table(found, "tokens per second"),
        "Costs of a cycle in plain steps, sampled drafts": costs_table(found),
        "Beside what the roofline of an H100 predicted": prediction_table(found, predicted),
    }
    draw(found, out / "figures")
    figures = {
        "pays.svg": "Top: tokens per second over those of plain decoding, by number of drafts; mean of the rounds and "
        "its 95 % interval. Bottom: the accept length that is there, and the one that pays for the passes of a cycle.",
    }
    plan: dict[str, Any] = {"model": PLAN.model, "dtype": DTYPE, "rounds": len(found[1])}
    plan |= {"answers": dict(sizes.answers), "repeats": sizes.repeats}
    plan |= {"group": GROUP, "new tokens": NEW_TOKENS, "prompts": len(prompts)}
    keep(out, started, numbers(found, predicted), tables, figures, plan, facts(found, predicted))


if __name__ == "__main__":
    run_main(main)
