"""Drift of acceptance under GRPO on SmolLM2: heads for its task, runs in two directions of entropy, planted streams.

``python -m recipes.reproduce.real.rl [--stage NAME ...] [--seeds N] [--share I/N] [--stored] [--head NAME=FILE ...]
[--quick]``: takes hours and resumes where it was stopped. All files are in runs/reproduce/real/rl
($BEBOP_REPRODUCE/real/rl), and finished runs in stored/ beside the results.
"""

import argparse
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from bebop.bench.record import show
from bebop.command import Parser, check_writable, run_main, whole
from bebop.config.job import ModelConfig
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from recipes.reproduce import record
from recipes.reproduce.cli import part_of, share
from recipes.reproduce.real.plan import agree
from recipes.reproduce.real.rl import adapted, analysis, stored, texts
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Request of the command line: the plan, the heads, and the share of the runs."""

    plan: RLPlan
    origins: Mapping[str, str]  # head -> file or start of its initial weights
    part: tuple[int, int] = (1, 1)  # the i-th of n shares
    skip_stored: bool = False  # leave out runs that the folder of the results has

    @property
    def folder(self) -> Path:
        """Return the folder of the results."""
        return PLACE if QUICK else HERE


def main(given: list[str]) -> None:
    """Run the requested stages in their order."""
    options = arguments(given)
    plan = replace(RL_PLAN, seeds=options.seeds)
    origins = {**ORIGINS, **dict(options.head)}
    work = Work(plan=plan, origins=origins, part=options.share, skip_stored=options.stored)
    check_writable("BEBOP_REPRODUCE", PLACE)
    agree(PLACE / "plan.json", plan.settled(), "runs")
    for stage in [stage for stage in STAGES if stage in options.stage]:
        STAGES[stage](work)


def arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line; ``study.py`` reads ``--quick`` itself."""
    parser = Parser(prog="python -m recipes.reproduce.real.rl", description=__doc__)
    stages = ", ".join(STAGES)
    parser.add_argument("--stage", nargs="+", choices=tuple(STAGES), default=list(STAGES), metavar="NAME", help=stages)
    parser.add_argument("--seeds", type=whole(2, 16), default=RL_PLAN.seeds, help="runs of a direction (%(default)s)")
    parser.add_argument(
        "--share", type=share, default=(1, 1), metavar="I/N", help="every N-th run from the I-th, 10 GB of memory each"
    )
    others = "leave out the runs and planted streams that stored/ beside the results has, made before or elsewhere"
    parser.add_argument("--stored", action="store_true", help=others)
    heads = f"what a head begins with, of {', '.join(ORIGINS)}: a safetensors file, or a start such as fitted"
    parser.add_argument("--head", nargs="+", type=named_head, default=[], metavar="NAME=FILE", help=heads)
    parser.add_argument("--quick", action="store_true", help="a smoke run on the built-in model and next to nothing")
    return parser.parse_args(given)


def named_head(text: str) -> tuple[str, str]:
    """Parse ce=DIR/best.safetensors into a pair of head name and origin."""
    name, _, origin = text.partition("=")
    if name in ORIGINS and origin:
        return name, origin
    raise argparse.ArgumentTypeError(f"{text[:80]!r} is not possible: give NAME=FILE with one of {', '.join(ORIGINS)}")


def first_policy(plan: RLPlan) -> Policy:
    """Load the first policy without a head, and set torch to one thread."""
    torch.set_num_threads(1)
    policy = load_policy(ModelConfig(path=plan.model, device="cpu"))
    return replace(policy, mtp=None)


def place_of(direction: str, seed: int) -> Path:
    """Return the folder of a run."""
    return PLACE / f"{direction}-{seed}"


def all_runs(plan: RLPlan) -> list[tuple[str, int]]:
    """Return the direction and seed of every run, seed by seed."""
    return [(direction, seed) for seed in range(plan.seeds) for direction in directions(plan)]


def write_texts(work: Work) -> None:
    """Sample all completions that heads are trained and evaluated on; all shares use the same ones."""
    model = first_policy(work.plan)
    texts.fixed_texts(work.plan, PLACE, model)
    adapted.task_text(work.plan, PLACE, model)


def train_heads(work: Work) -> None:
    """Train the heads of a share before RL."""
    runs = part_of(adapted.head_runs(work.plan, work.origins), work.part)
    adapted.train(runs, work.plan, PLACE, first_policy(work.plan))


def carry_out(work: Work) -> None:
    """Carry out every unfinished run of a share, and remove the checkpoints of finished ones."""
    plan, questions, heads = work.plan, PLACE / "questions.jsonl", adapted.trained(PLACE, work.origins)
    write_questions(questions, plan.questions)
    for direction, seed in part_of(all_runs(plan), work.part):
        place = place_of(direction, seed)
        if (place / DONE).is_file() or (work.skip_stored and stored.run_file(work.folder, direction, seed).is_file()):
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


def plant(work: Work) -> None:
    """Compute the confusion table of every seed of a share that has none."""
    plan, left = work.plan, []
    for seed in part_of(range(plan.seeds), work.part):
        had = work.skip_stored and stored.planted_file(work.folder, seed).is_file()
        if not had and not rows_file(seed).is_file():
            left.append(seed)
    if not left:
        return
    model = first_policy(plan)
    fixed = texts.fixed_texts(plan, PLACE, model)
    files = adapted.trained(PLACE, work.origins)
    heads = {other: with_head(model, files["other" if other else analysis.MAIN], fixed) for other in (False, True)}
    for seed in left:
        count = wanted(plan)
        answers = {t: texts.planted_texts(plan, PLACE, model, seed, t, n) for t, n in count.items()}
        keep(rows_file(seed), confusion(Streams(plan, heads, answers, fixed), plan))


def rows_file(seed: int) -> Path:
    """Return the file to which the confusion table of a seed is first written."""
    return PLACE / f"planted-{seed}.json"


def store(work: Work) -> None:
    """Copy finished runs and confusion tables beside the results, to judge them with those of other machines."""
    for direction, seed in all_runs(work.plan):
        place = place_of(direction, seed)
        if (place / DONE).is_file():
            content = stored.as_left(place, adapted.curves(PLACE))
            stored.put(stored.run_file(work.folder, direction, seed), work.plan, content)
    for seed in range(work.plan.seeds):
        if rows_file(seed).is_file():
            content = {"rows": json.loads(rows_file(seed).read_text())}
            stored.put(stored.planted_file(work.folder, seed), work.plan, content)


def judge(work: Work) -> None:
    """Write the numbers, verdicts, tables and figures of the runs stored beside the results.

    Raises:
        UserError: A run or a confusion table is missing.
    """
    plan, folder = work.plan, work.folder
    if work.part != (1, 1):
        share = "/".join(map(str, work.part))
        show(f"verdicts are about all runs, not share {share}: run --stage judge when all have ended\n")
        return
    started = record.begin(STUDY)
    runs = stored.runs(folder, plan, all_runs(plan))
    planted = {seed: stored.get(stored.planted_file(folder, seed), plan)["rows"] for seed in range(plan.seeds)}
    tables = {
        "Heads before RL": analysis.head_rows(runs),
        "Runs": analysis.run_rows(runs),
        "Accept length at both ends": analysis.arm_rows(runs),
        "Change of the first draft's acceptance": analysis.part_rows(runs),
        "What the monitor said of planted streams": [{"seed": s, **row} for s, rows in planted.items() for row in rows],
    }
    told = {"seeds": plan.seeds, **plan.settled()}
    told["heads"] = {name: Path(origin).name for name, origin in work.origins.items()}
    record.keep(folder, started, analysis.numbers(runs, planted), tables, draw(runs, folder / "figures"), told)


STAGES: Mapping[str, Callable[[Work], None]] = {
    "texts": write_texts,
    "heads": train_heads,
    "runs": carry_out,
    "planted": plant,
    "keep": store,
    "judge": judge,
}

if __name__ == "__main__":
    run_main(main)
