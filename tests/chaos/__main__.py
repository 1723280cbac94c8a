"""Faults upon real jobs, and whether anything was lost: ``python -m tests.chaos``.

Jobs that are finished are kept in the folder and not run again, so that a run that was interrupted goes on.
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bebop.bench import record
from bebop.command import INTERRUPTED
from tests.chaos import served, table
from tests.chaos.faults import FAULTS
from tests.chaos.job import BUGS
from tests.chaos.ledger import Books
from tests.chaos.plan import JOBS, Plan, plans, planted, reference
from tests.chaos.runner import STOPPING, Run

REFERENCES = ("sync", "pull", "reward", "sglang")


def arguments(given: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="of the schedule")
    parser.add_argument("--faults", type=int, default=216, help="how many (default 216)")
    parser.add_argument("--kinds", nargs="*", default=[], choices=sorted(FAULTS), help="of these kinds alone")
    parser.add_argument("--jobs", nargs="*", default=[], choices=JOBS, help="upon these kinds of job alone")
    parser.add_argument("--folder", type=Path, default=Path("runs/chaos"), help="where the jobs run and are kept")
    parser.add_argument("--out", type=Path, help="where chaos_JOBS.json and .md go (default: the folder)")
    parser.add_argument("--beside", type=int, default=2, help="jobs at a time (default 2)")
    parser.add_argument("--planted", action="store_true", help="bugs in the job's code instead: each must be found")
    parser.add_argument("--steps", type=int, default=40, help="of the undisturbed jobs")
    return parser.parse_args(given)


def main(given: Sequence[str]) -> int:
    """Run what is planned; the exit code."""
    options = arguments(given)
    before = {number: signal.signal(number, lambda *_: STOPPING.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        return bugs(options) if options.planted else chaos(options)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; the same command goes on\n")
        return INTERRUPTED
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def chaos(options: argparse.Namespace) -> int:
    """The schedule; 1 if anything was found."""
    origin, before = record.begin(), set(os.listdir("/dev/shm"))
    chosen = plans(options.seed, options.faults, options.kinds, options.jobs)
    if any(plan.job == "sglang" for plan in chosen):
        served.here()
    needed = {plan.job if plan.job in REFERENCES else "pull" for plan in chosen}
    others = [reference(job, options.steps) for job in REFERENCES if job in needed]
    faults = sum(len(plan.faults) for plan in chosen)
    folder = options.folder.resolve()
    sys.stderr.write(f"{faults} faults in {len(chosen)} jobs, {len(others)} undisturbed ones; in {folder}\n")
    references = {plan.job: folder / plan.name for plan in others}

    def run(plan: Plan) -> dict[str, Any]:
        """One job, unless it was run before."""
        if not (folder / plan.name / "done.json").exists():
            Run(folder / plan.name, plan).run()
        return table.judged(folder / plan.name, references) if plan.faults else {}

    with ThreadPoolExecutor(options.beside) as beside:
        list(tqdm(beside.map(run, others), total=len(others), desc="undisturbed jobs", unit="job"))
        for plan in others:
            undisturbed(folder / plan.name)
        jobs = list(tqdm(beside.map(run, chosen), total=len(chosen), desc="jobs", unit="job"))
    summary = {"seed": options.seed, **table.summary(jobs)}
    left = sorted(set(os.listdir("/dev/shm")) - before)
    summary["findings"] += [f"left in shared memory: {', '.join(left)}"] if left else []
    name = "_".join(["chaos", *options.jobs])
    rows = table.rows(jobs)
    table.write((options.out or folder) / name, rows, summary, origin)
    sys.stdout.write(f"{record.table(rows)}\n")
    sys.stdout.write("".join(f"{name}: {value}\n" for name, value in summary.items() if name != "findings"))
    sys.stdout.write("".join(f"FINDING {line}\n" for line in summary["findings"]))
    return int(bool(summary["findings"]))


def bugs(options: argparse.Namespace) -> int:
    """Jobs with a bug each; 1 if one shows nowhere."""
    origin, folder = record.begin(), options.folder.resolve()
    plans_ = [planted(bug, number) for number, bug in enumerate(BUGS)]

    def run(plan: Plan) -> list[str]:
        if not (folder / plan.name / "done.json").exists():
            Run(folder / plan.name, plan).run()
        found = table.judge(Books(folder / plan.name, table.staleness_of(plan.job)), None, exact=False)
        return sorted({finding.check for finding in found})

    with ThreadPoolExecutor(options.beside) as pool:
        found = list(tqdm(pool.map(run, plans_), total=len(plans_), desc="planted bugs", unit="job"))
    rows = [
        {"bug": plan.bug, "found by": ", ".join(checks) or "nothing"}
        for plan, checks in zip(plans_, found, strict=True)
    ]
    table.write((options.out or folder) / "chaos_planted", rows, {}, origin)
    sys.stdout.write(f"{record.table(rows)}\n")
    return int(not all(found))


def undisturbed(folder: Path) -> None:
    """Nothing else can be judged if this job is not in order."""
    stuck = json.loads((folder / "done.json").read_text())["stuck"]
    if stuck:
        raise SystemExit(f"the undisturbed job in {folder} failed: {stuck}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
