"""Run all recipes one after another and write ``RESULTS.md``: ``python -m recipes.reproduce [--quick]``.

A result whose rule was changed after it is refused. ``--rejudge REASON`` judges the stored numbers by the committed
rules. It keeps the older judgement and stores the new one beside it, marked as made after the run.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from bebop.bench.record import begin, show
from bebop.command import Parser, run_main
from bebop.errors import UserError
from recipes.reproduce import record, rule_hash
from recipes.reproduce.claim_pages import write_pages
from recipes.reproduce.claims import REAL_STAGES, REAL_STUDIES, RECIPES
from recipes.reproduce.pages import within
from recipes.reproduce.study import FOLDER, QUICK
from recipes.reproduce.summary import page

ROOT = Path(__file__).resolve().parents[2]
WHOLE = "real"  # the stages that the studies on a real model share; ``--only real`` also runs all these studies
LONG = (WHOLE, *REAL_STUDIES)  # these take hours or days, so they run only when named by ``--only``
NEED_GPU = ("real_pays_gpu",)
STUDIES = (*RECIPES, *REAL_STUDIES)  # all studies that have rules and results


def main(given: list[str]) -> int:
    """Run the requested recipes, then write the pages.

    Return 0, or 1 if a recipe failed.

    Raises:
        UserError: A stored result does not match its rule (exit status 2).
    """
    options = arguments(given)
    resting = options.rebuild or options.rejudge is not None or options.html is not None
    failed = [] if resting else run_all(with_studies(options.only or RECIPES))
    if options.rejudge is not None:
        rejudge([name for name in with_studies(options.only or STUDIES) if name != WHOLE], options.rejudge)
    folders = {name: folder_of(name) for name in STUDIES}
    if options.html is not None:
        show(f"{write_pages(checked(folders), folders, options.html)} written\n")
        return 0
    target = FOLDER / "RESULTS.md" if QUICK else ROOT / "RESULTS.md"
    missing = rebuild(folders, target)
    show(f"{os.path.relpath(target)} written" + (f"; no results of {', '.join(missing)}" if missing else "") + "\n")
    if failed:
        show(f"failed: {', '.join(failed)}\n")
    return 1 if failed else 0


def folder_of(name: str) -> Path:
    """Return the folder of a study's results; a smoke run has a folder of its own, so that it overwrites nothing."""
    return within(FOLDER if QUICK else ROOT / "recipes" / "reproduce", name)


def with_studies(names: Sequence[str]) -> list[str]:
    """Return the names, each once, with all studies on the real model added behind ``real``."""
    return list(dict.fromkeys(one for name in names for one in ((name, *REAL_STUDIES) if name == WHOLE else (name,))))


def run_all(names: Sequence[str]) -> list[str]:
    """Run every recipe in order and return the names of those that failed.

    If ``real``, the stages that several studies share, failed, its studies are not started and count as failed.
    """
    failed: list[str] = []
    for name in names:
        if name in NEED_GPU and len(names) > 1 and not (QUICK or torch.cuda.is_available()):
            show(f"{name}: left out, as there is no GPU\n")  # when it runs alone, it reports this itself and fails
        elif name in REAL_STUDIES and WHOLE in failed:
            show(f"{name}: not begun, as {WHOLE} failed\n")
            failed.append(name)
        elif not run(name, names):
            failed.append(name)
    return failed


def rebuild(folders: Mapping[str, Path], target: Path) -> list[str]:
    """Write the page of all studies from the stored results; return the short studies that have no results.

    Raises:
        UserError: A stored result is not what its current rule makes of its numbers; nothing is written.
    """
    text = page(checked(folders))
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text)
    short = [name for name in folders if name not in LONG]
    return [name for name in short if not (folders[name] / "results.json").is_file()]


def checked(folders: Mapping[str, Path]) -> dict[str, record.Content | None]:
    """Return the results of each study, None where there are none, after a check of each against its current rule.

    Raises:
        UserError: A stored result does not match its rule.
    """
    contents = {name: record.read(folder / "results.json") for name, folder in folders.items()}
    for name, content in contents.items():
        if content is not None:
            record.check(name, content, folders[name])
    return contents


def rejudge(names: Sequence[str], reason: str) -> None:
    """Add a judgement by the committed rules to the stored results: no commit holds both a rule and its result.

    Raises:
        UserError: A file of a rule differs from the last commit.
    """
    for name in names:
        files = rule_hash.of_study(name).files
        command = ["git", "-C", str(ROOT), "status", "--porcelain", "--", *files]
        if changed := subprocess.run(command, capture_output=True, text=True, check=False).stdout.split():
            raise UserError(
                f"{changed[-1]} holds a rule of {name} and is not committed: commit the rule by itself first"
            )
    origin = begin()  # before the first write, which makes the tree dirty
    for name in names:
        path = folder_of(name) / "results.json"
        if (content := record.read(path)) is not None:
            record.write(path, record.rejudge(name, content, reason, origin))


def arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = Parser(prog="python -m recipes.reproduce", description=__doc__)
    names = f"{', '.join(RECIPES)}; by name alone, as they take days: {', '.join(LONG)} ({WHOLE}: all of these)"
    parser.add_argument("--only", nargs="+", choices=RECIPES + LONG, metavar="NAME", help=names)
    parser.add_argument("--quick", action="store_true", help="smoke runs, which overwrite no results")
    parser.add_argument("--rebuild", action="store_true", help="run nothing: RESULTS.md from what is stored")
    parser.add_argument("--rejudge", metavar="REASON", help="run nothing: judge what is stored by changed rules")
    parser.add_argument("--html", type=Path, metavar="DIR", help="run nothing: pages of all claims and studies")
    options = parser.parse_args(given)
    if options.html is not None and (options.only or options.rebuild or options.rejudge is not None):
        parser.error("--html shows all that is stored: give it without --only, --rebuild and --rejudge")
    return options


def run(name: str, among: Sequence[str]) -> bool:
    """Run one recipe in a child process, print a line before and after it, and return whether it succeeded."""
    label = f"[{list(among).index(name) + 1}/{len(among)}] {name}"
    if not (within(ROOT / "recipes" / "reproduce", name) / "__main__.py").is_file():
        show(f"{label}: there is no such recipe yet\n")
        return False
    show(f"{label} ...\n")
    began = time.time()
    command = [sys.executable, "-m", f"recipes.reproduce.{name}", *(["--quick"] if QUICK else [])]
    if name == WHOLE:  # the studies run afterwards, each in a process of its own
        command += ["--stage", *REAL_STAGES]
    done = subprocess.run(command, cwd=ROOT, check=False)
    took = f"{(time.time() - began) / 60:.1f} minutes"
    show(f"{label}: {'done' if done.returncode == 0 else f'failed with status {done.returncode}'} after {took}\n")
    return done.returncode == 0


if __name__ == "__main__":
    run_main(main)
