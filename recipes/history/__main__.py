"""Drafts from past completions over several epochs: train the jobs, then decode the same prompts with all arms.

If a run was stopped, it goes on in the same folder with the first unfinished job or measurement:
``python -m recipes.history [--out DIR]``.
"""

from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bebop.bench import record
from bebop.command import Parser, check_writable, run_main, whole
from bebop.config.fields import MAX_INT
from bebop.errors import UserError
from recipes.history.jobs import Plan, carried_out
from recipes.history.replay import measured
from recipes.history.results import keep, page, result
from recipes.stages import once, read

WHAT = {
    "seeds": "jobs",
    "questions": "of the set that a job goes through",
    "epochs": "times that it does",
    "groups": "prompts of a step",
    "group_size": "answers to a prompt",
    "points": "of an epoch, at which all arms decode",
}
LEAST = {"group_size": 2, "epochs": 2}


def main(arguments: list[str]) -> None:
    """Run the unfinished stages, then print and store the results."""
    parser = Parser(prog="python -m recipes.history", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/history"), help="folder of all stages (runs/history)")
    parser.add_argument("--record", type=Path, help="folder for history_epochs.json, .md and .svg (--out)")
    parser.add_argument("--jobs-only", action="store_true", help="leave the measurement for a time that is quiet")
    parser.add_argument("--looks", type=whole(1, MAX_INT), help="points of an epoch at which arms do decode (--points)")
    for field in fields(Plan):
        limits, option = whole(LEAST.get(field.name, 1), MAX_INT), f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=limits, default=field.default, help=f"{WHAT[field.name]} (%(default)s)")
    options = vars(parser.parse_args(arguments))
    out, stored, jobs_only, looks = (options.pop(name) for name in ("out", "record", "jobs_only", "looks"))
    plan = checked(Plan(**options))
    if looks is not None and plan.points % looks:
        raise UserError(f"--looks {looks} is not possible: it must divide the {plan.points} --points")
    check_writable("--out", out)
    if stored is not None:
        check_writable("--record", stored)
    origin = record.begin()
    runs = carried_out(plan, out)
    if jobs_only:
        return
    torch.set_num_threads(1)
    places = [out / f"measured-{seed}" for seed in range(plan.seeds)]
    for seed, (run, place) in enumerate(zip(runs, places, strict=True)):
        once(place, partial(_measured, plan, run, seed, looks))
    content = result(plan, [read(place) for place in places], origin, looks)
    keep(stored or out, content)
    record.show(page(content))


def _measured(plan: Plan, run: Path, seed: int, looks: int | None, folder: Path) -> dict[str, Any]:
    folder.mkdir(parents=True)
    return measured(plan, run, seed, looks)


def checked(plan: Plan) -> Plan:
    """Return the plan; raise ``UserError`` if the steps of an epoch, or the points among them, do not divide evenly."""
    if plan.questions % plan.groups:
        raise UserError(f"--questions {plan.questions} is not possible: give a multiple of --groups {plan.groups}")
    if plan.epoch_steps % (2 * plan.points):
        steps = plan.epoch_steps
        raise UserError(
            f"--points {plan.points} is not possible: twice as many must divide the {steps} steps of an epoch"
        )
    return plan


if __name__ == "__main__":
    run_main(main)
