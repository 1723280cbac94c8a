"""All recipes one after another, and ``RESULTS.md`` from what they found: ``python -m recipes.reproduce [--quick]``."""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bebop.benchmarks.record import show
from bebop.command import Parser, run_main
from recipes.common.study import FOLDER, QUICK, results_folder
from recipes.common.summary import page, read

ROOT = Path(__file__).resolve().parents[1]
RECIPES = ("objectives", "budget", "temperature", "boundary", "top_k", "drift", "throughput", "beyond")


def main(given: list[str]) -> int:
    """Run what was asked for, then write the page; the status is 1 if a recipe failed."""
    options = arguments(given)
    failed = [] if options.rebuild else [name for name in options.only if not run(name, options.only)]
    target = FOLDER / "RESULTS.md" if QUICK else ROOT / "RESULTS.md"
    target.parent.mkdir(parents=True, exist_ok=True)
    found = {name: read(results_folder(ROOT / "recipes" / name) / "results.json") for name in RECIPES}
    target.write_text(page(found))
    missing = [name for name, content in found.items() if content is None]
    show(f"{os.path.relpath(target)} written" + (f"; no results of {', '.join(missing)}" if missing else "") + "\n")
    if failed:
        show(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def arguments(given: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = Parser(prog="python -m recipes.reproduce", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=RECIPES, default=RECIPES, metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--quick", action="store_true", help="smoke runs, which overwrite no results")
    parser.add_argument(
        "--rebuild", action="store_true", help="run nothing: RESULTS.md from the results that are there"
    )
    return parser.parse_args(given)


def run(name: str, among: Sequence[str]) -> bool:
    """One recipe in a process of its own, with its own progress bars between two lines; whether it succeeded."""
    label = f"[{list(among).index(name) + 1}/{len(among)}] {name}"
    if not (ROOT / "recipes" / name / "__main__.py").is_file():
        show(f"{label}: there is no such recipe yet\n")
        return False
    show(f"{label} ...\n")
    began = time.time()
    command = [sys.executable, "-m", f"recipes.{name}", *(["--quick"] if QUICK else [])]
    done = subprocess.run(command, cwd=ROOT, check=False)
    took = f"{(time.time() - began) / 60:.1f} minutes"
    show(f"{label}: {'done' if done.returncode == 0 else f'failed with status {done.returncode}'} after {took}\n")
    return done.returncode == 0


if __name__ == "__main__":
    run_main(main)
