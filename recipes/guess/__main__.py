"""Teach the built-in model the game ``guess``: supervised, then its head adapted, then GRPO of several seeds.

If a run was stopped, it goes on in the same folder with the first unfinished stage:
``python -m recipes.guess [--out DIR]``.
"""

from dataclasses import fields
from pathlib import Path

from bebop.bench import record
from bebop.command import Parser, check_writable, run_main, whole
from bebop.config.fields import MAX_PROCESSES
from bebop.errors import UserError
from recipes.guess.results import keep, page, result, told
from recipes.guess.stages import Plan, carried_out
from recipes.stages import read

WHAT = {
    "seeds": "jobs of GRPO",
    "supervised_steps": "steps of the supervised part",
    "turns": "turns that the head is adapted on",
    "head_steps": "steps of the head",
    "held_out": "turns on which the head is measured",
    "games": "games in which a start is measured",
    "steps": "steps of a job",
    "groups": "prompts of a step",
    "group_size": "games of a prompt",
    "threads": "CPU threads of a process",
}
LEAST = {"held_out": 2, "group_size": 2, "supervised_steps": 2}


def main(arguments: list[str]) -> None:
    """Run the unfinished stages, then print and store the results."""
    parser = Parser(prog="python -m recipes.guess", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/guess"), help="folder of all stages (runs/guess)")
    parser.add_argument("--record", type=Path, help="folder for guess.json and guess.md (--out)")
    parser.add_argument(
        "--slips", type=float, default=Plan().slips, help="of a demonstration, a turn: 0 to 1 (%(default)s)"
    )
    for field in fields(Plan):
        if field.name in WHAT:
            limits = whole(LEAST.get(field.name, 1), MAX_PROCESSES)
            option, what = f"--{field.name.replace('_', '-')}", f"{WHAT[field.name]} (%(default)s)"
            parser.add_argument(option, type=limits, default=field.default, help=what)
    options = vars(parser.parse_args(arguments))
    out, stored = options.pop("out"), options.pop("record")
    if not 0 <= options["slips"] <= 1:
        raise UserError(f"--slips {options['slips']} is not possible: it is from 0 to 1")
    check_writable("--out", out)
    if stored is not None:
        check_writable("--record", stored)
    origin, plan = record.begin(), Plan(**options)
    jobs = carried_out(plan, out)
    record.show(f"accept length of the head: {told(read(out / 'head')['accept_length'])}\n")
    content = result(plan, out, jobs, origin)
    keep(stored or out, content)
    record.show(page(content))


if __name__ == "__main__":
    run_main(main)
