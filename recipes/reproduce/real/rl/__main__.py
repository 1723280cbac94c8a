"""Drift of acceptance under GRPO on SmolLM2: heads for its task, runs in two directions of entropy, planted streams.

``python -m recipes.reproduce.real.rl [--stage NAME ...] [--seeds N] [--share I/N] [--head NAME=FILE ...] [--quick]``:
hours, which go on where they were stopped. All is kept in runs/reproduce/real/rl ($BEBOP_REPRODUCE/real/rl).
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bebop.bench.record import show
from bebop.command import Parser, check_writable, run_main, whole
from bebop.config import ModelConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from recipes.reproduce import record
from recipes.reproduce.cli import part_of, share
from recipes.reproduce.real.plan import agree
from recipes.reproduce.real.rl import adapted, analysis, texts
from recipes.reproduce.real.rl.beside import Beside, keep, with_head
from recipes.reproduce.real.rl.charts import draw
from recipes.reproduce.real.rl.jobs import RUN, run_until
from recipes.reproduce.real.rl.plan import ORIGINS, PLACE, RL_PLAN, RLPlan, directions
from recipes.reproduce.real.rl.planted import Streams, confusion, wanted
from recipes.reproduce.real.rl.task import write_questions
from recipes.reproduce.study import QUICK

HERE = Path(__file__).parent
DONE = "done.json"
STUDY = "real.rl"


def main(given: list[str]) -> None:
    """Carry out the stages that were asked for, in their order."""
    options = arguments(given)
    plan, origins = replace(RL_PLAN, seeds=options.seeds), {**ORIGINS, **dict(options.head)}
    check_writable("BEBOP_REPRODUCE", PLACE)
    settled = {name: value for name, value in vars_of(plan).items() if name != "seeds"}
    agree(PLACE / "plan.json", settled, "runs")
    for stage in [stage for stage in STAGES if stage in options.stage]:
        STAGES[stage](plan, origins, options.share)


def arguments(given: list[str]) -> argparse.Namespace:
    """The command line; ``--quick`` itself is read in ``study.py``."""
    parser = Parser(prog="python -m recipes.reproduce.real.rl", description=__doc__)
    stages = ", ".join(STAGES)
    parser.add_argument("--stage", nargs="+", choices=tuple(STAGES), default=list(STAGES), metavar="NAME", help=stages)
    parser.add_argument("--seeds", type=whole(2, 16), default=RL_PLAN.seeds, help="runs of a direction (%(default)s)")
    parser.add_argument(
        "--share", type=share, default=(1, 1), metavar="I/N", help="every N-th run from the I-th, 9 GB of memory each"
    )
    heads = f"what a head begins with, of {', '.join(ORIGINS)}: a safetensors file, or a start such as fitted"
    parser.add_argument("--head", nargs="+", type=named_head, default=[], metavar="NAME=FILE", help=heads)
    parser.add_argument("--quick", action="store_true", help="a smoke run on the built-in model and next to nothing")
    return parser.parse_args(given)


def named_head(text: str) -> tuple[str, str]:
    """ce=DIR/best.safetensors as a pair."""
    name, _, origin = text.partition("=")
    if name in ORIGINS and origin:
        return name, origin
    raise argparse.ArgumentTypeError(f"{text[:80]!r} is not possible: give NAME=FILE with one of {', '.join(ORIGINS)}")


def vars_of(plan: RLPlan) -> dict[str, Any]:
    """The fields of a plan."""
    return {name: getattr(plan, name) for name in RLPlan.__slots__}


def first_policy(plan: RLPlan) -> Policy:
    """Without a head, on one thread."""
    torch.set_num_threads(1)
    policy = load_policy(ModelConfig(path=plan.model, device="cpu"))
    return replace(policy, mtp=None)


def place_of(direction: str, seed: int) -> Path:
    """Of a run with all that belongs to it."""
    return PLACE / f"{direction}-{seed}"


def all_runs(plan: RLPlan) -> list[tuple[str, int]]:
    """Direction and seed of every run, seed by seed."""
    return [(direction, seed) for seed in range(plan.seeds) for direction in directions(plan)]


def write_texts(plan: RLPlan, origins: Mapping[str, str], part: tuple[int, int]) -> None:
    """All answers that heads are trained on and looked at with; shares have the same."""
    model = first_policy(plan)
    texts.fixed_texts(plan, PLACE, model)
    adapted.task_text(plan, PLACE, model)


def train_heads(plan: RLPlan, origins: Mapping[str, str], part: tuple[int, int]) -> None:
    """The heads of a share, before RL."""
    adapted.train(part_of(adapted.head_runs(plan, origins), part), plan, PLACE, first_policy(plan))


def carry_out(plan: RLPlan, origins: Mapping[str, str], part: tuple[int, int]) -> None:
    """Every run of a share that has not ended; the checkpoints of one that has are removed."""
    questions, heads = PLACE / "questions.jsonl", adapted.trained(PLACE, origins)
    write_questions(questions, plan.questions)
    for direction, seed in part_of(all_runs(plan), part):
        place = place_of(direction, seed)
        if (place / DONE).is_file():
            continue
        agree(place / "heads.json", {name: heads[name] for name in sorted(heads)}, "a run beside heads")
        model = first_policy(plan)
        beside = Beside(plan, place, model, heads, texts.fixed_texts(plan, PLACE, model))
        with tqdm(total=plan.steps, initial=beside.done, desc=f"{direction}, seed {seed}", unit="step") as bar:
            while beside.done < plan.steps:
                until = min(beside.done + plan.segment, plan.steps)
                run_until(plan, direction, seed, place, questions, until)
                beside.follow(until, bar)
        keep(place / DONE, {"steps": plan.steps})
        for folder in (place / RUN, place):
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)


def plant(plan: RLPlan, origins: Mapping[str, str], part: tuple[int, int]) -> None:
    """The confusion table of every seed of a share that has none."""
    left = [seed for seed in part_of(range(plan.seeds), part) if not (PLACE / f"planted-{seed}.json").is_file()]
    if not left:
        return
    model = first_policy(plan)
    fixed = texts.fixed_texts(plan, PLACE, model)
    files = adapted.trained(PLACE, origins)
    heads = {other: with_head(model, files["other" if other else analysis.MAIN], fixed) for other in (False, True)}
    for seed in left:
        count = wanted(plan)
        answers = {t: texts.planted_texts(plan, PLACE, model, seed, t, n) for t, n in count.items()}
        keep(PLACE / f"planted-{seed}.json", confusion(Streams(plan, heads, answers, fixed), plan))


def judge(plan: RLPlan, origins: Mapping[str, str], part: tuple[int, int]) -> None:
    """Numbers, verdicts, tables and the figure.

    Raises:
        UserError: A run has not ended, or nothing was planted.
    """
    if part != (1, 1):
        show(f"verdicts are about all runs, not share {part[0]}/{part[1]}: run --stage judge when all have ended\n")
        return
    pairs = all_runs(plan)
    needed = [place_of(*pair) / DONE for pair in pairs] + [PLACE / f"planted-{s}.json" for s in range(plan.seeds)]
    if lacking := [path for path in needed if not path.is_file()]:
        raise UserError(f"{lacking[0]} is not there: run --stage runs and --stage planted first")
    started = record.begin(STUDY)
    runs = [analysis.read_run(place_of(*pair), *pair) for pair in pairs]
    planted = {seed: json.loads((PLACE / f"planted-{seed}.json").read_text()) for seed in range(plan.seeds)}
    curves = adapted.curves(PLACE)
    tables = {
        "Heads before RL": [{"head": name, **told} for name, told in curves.items()],
        "Runs": analysis.run_rows(runs),
        "Accept length at both ends": analysis.arm_rows(runs),
        "Change of the first draft's acceptance": analysis.part_rows(runs),
        "What the monitor said of planted streams": [{"seed": s, **row} for s, rows in planted.items() for row in rows],
    }
    folder = PLACE if QUICK else HERE
    figures = draw(runs, folder / "figures")
    told = {**vars_of(plan), "heads": {name: Path(origin).name for name, origin in origins.items()}}
    record.keep(folder, started, analysis.numbers(runs, planted, curves), tables, figures, told)


STAGES: Mapping[str, Callable[[RLPlan, Mapping[str, str], tuple[int, int]], None]] = {
    "texts": write_texts,
    "heads": train_heads,
    "runs": carry_out,
    "planted": plant,
    "judge": judge,
}

if __name__ == "__main__":
    run_main(main)
