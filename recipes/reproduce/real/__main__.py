"""Study on SmolLM2-135M-Instruct: make the corpus and states, train the heads, evaluate them on held-out prompts.

``python -m recipes.reproduce.real [--stage NAME ...] [--heads NAME ...] [--share I/N] [--quick]``: each stage takes
hours and resumes where it was stopped. All results are in runs/reproduce/real ($BEBOP_REPRODUCE/real).
"""

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import torch

from bebop.bench.record import show, table
from bebop.command import Parser, check_writable, run_main
from bebop.errors import UserError
from bebop.model.mtp import MTPHead
from recipes.reproduce.claims import REAL_STAGES
from recipes.reproduce.cli import part_of, share
from recipes.reproduce.real.corpus import make_corpus
from recipes.reproduce.real.evaluation import evaluate
from recipes.reproduce.real.fused import compare_losses
from recipes.reproduce.real.heads import Training, done
from recipes.reproduce.real.plan import HERE, PLAN, load
from recipes.reproduce.real.runs import HeadRun, all_runs
from recipes.reproduce.real.states import make_states, read_text
from recipes.reproduce.study import QUICK

ROOT = Path(__file__).resolve().parents[3]
CLAIMS = ("real_entropy", "real_drafts", "real_losses")  # studies that read the results of the other stages


def main(given: list[str]) -> None:
    """Run the requested stages in their order."""
    options = arguments(given)
    check_writable("BEBOP_REPRODUCE", HERE)
    runs = chosen(all_runs(), options.heads)
    for stage in [stage for stage in STAGES if stage in options.stage]:
        show(f"{stage} ...\n")
        STAGES[stage](part_of(runs, options.share), options)


def arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line; ``study.py`` reads ``--quick`` itself."""
    parser = Parser(prog="python -m recipes.reproduce.real", description=__doc__)
    names = ", ".join(STAGES)
    parser.add_argument("--stage", nargs="+", choices=tuple(STAGES), default=list(STAGES), metavar="NAME", help=names)
    parser.add_argument(
        "--heads", nargs="+", default=["*"], metavar="NAME", help="only these heads, such as shared or 'e2e_tv-*'"
    )
    parser.add_argument(
        "--share", type=share, default=(1, 1), metavar="I/N", help="every N-th shard and head from the I-th"
    )
    parser.add_argument(
        "--threads", type=int, choices=range(1, 65), default=1, metavar="N", help="of a head's training (1)"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run on the built-in model and next to nothing")
    return parser.parse_args(given)


def chosen(runs: Sequence[HeadRun], patterns: Sequence[str]) -> list[HeadRun]:
    """Return the runs whose names match a pattern.

    Raises:
        UserError: A pattern matches no run.
    """
    for pattern in patterns:
        if not any(fnmatch(run.name, pattern) for run in runs):
            names = ", ".join(run.name for run in runs)
            raise UserError(f"--heads {pattern!r} is not possible: there are {names}")
    return [run for run in runs if any(fnmatch(run.name, pattern) for pattern in patterns)]


def train_heads(runs: Sequence[HeadRun], options: argparse.Namespace) -> None:
    """Train every unfinished head, one after the other."""
    left = [run for run in runs if not done(run, HERE)]
    if not left:
        return
    model, text = load(PLAN), read_text(HERE, PLAN)
    torch.set_num_threads(options.threads)
    for run in left:
        told = Training(run, HERE, model, text).fit()
        show(f"{run.name}: " + ", ".join(f"{name} {value}" for name, value in told.items()) + "\n")


def look_at_heads(runs: Sequence[HeadRun], options: argparse.Namespace) -> None:
    """Evaluate every finished head."""
    model, text = load(PLAN), read_text(HERE, PLAN)
    evaluate([run for run in runs if done(run, HERE)], HERE, replace(model, mtp=MTPHead(model.backbone)), text)


def fused_losses(runs: Sequence[HeadRun], options: argparse.Namespace) -> None:
    """Measure time and memory of the losses, and print a table."""
    lines = compare_losses(HERE, load(PLAN), read_text(HERE, PLAN))
    show(
        table(
            [{name: cell if isinstance(cell, str) else f"{cell:.4g}" for name, cell in line.items()} for line in lines]
        )
    )


def judge_claims(runs: Sequence[HeadRun], options: argparse.Namespace) -> None:
    """Run each study of the claims in its own process, even if an earlier one failed.

    Raises:
        UserError: One of them failed.
    """
    if options.share != (1, 1):
        part, parts = options.share
        show(f"claims are about all heads, not share {part}/{parts}: run --stage claims when all have ended\n")
        return
    failed = [name for name in CLAIMS if not judge_claim(name)]
    if failed:
        raise UserError(f"failed: {', '.join(failed)}")


def judge_claim(name: str) -> bool:
    """Run one study; return whether it succeeded or does not exist yet."""
    if not (ROOT / "recipes" / "reproduce" / name / "__main__.py").is_file():
        show(f"{name}: nothing computes its numbers yet\n")
        return True
    show(f"{name} ...\n")
    command = [sys.executable, "-m", f"recipes.reproduce.{name}", *(["--quick"] if QUICK else [])]
    return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


STAGES: Mapping[str, Callable[[Sequence[HeadRun], argparse.Namespace], None]] = {
    "corpus": lambda _, options: make_corpus(HERE, PLAN, share=options.share),
    "states": lambda _, options: make_states(HERE, PLAN, share=options.share),
    "fused": fused_losses,
    "heads": train_heads,
    "evaluation": look_at_heads,
    "claims": judge_claims,
}
assert (*REAL_STAGES, "claims") == tuple(STAGES)


if __name__ == "__main__":
    run_main(main)
