"""FIRP, PAD, BlockPilot and PIPO on SmolLM2: ``python -m recipes.reproduce.real_systems [--stage NAME ...] [--quick]``.

Stages take hours and resume where they were stopped; README.md says how long each takes. All files are in
runs/reproduce/real_systems ($BEBOP_REPRODUCE/real_systems).
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from bebop.bench import record
from bebop.bench.record import show
from bebop.command import Parser, check_writable, run_main
from recipes.reproduce.figures import errors, figure
from recipes.reproduce.measured import Number
from recipes.reproduce.real_systems import firp_arms
from recipes.reproduce.real_systems.analysis import (
    SEEN,
    WIDTHS,
    Rounds,
    ablations,
    of_block,
    of_pad,
    of_rounds,
    table,
    transfer,
)
from recipes.reproduce.real_systems.parts import part_path, train_parts, trained
from recipes.reproduce.real_systems.plan import GROUPS, OPEN, SIZES, STUDENT, WORD, WORDS, Group
from recipes.reproduce.real_systems.rounds import measure, settings
from recipes.reproduce.record import Started, begin, keep, numbers_of, read, stored, write
from recipes.reproduce.study import FOLDER, results_folder

HERE = results_folder(Path(__file__).parent)
PLACE = FOLDER / "real_systems"
MEASURED = HERE / "measured"
FIRP, BLOCK, PAD = "firp", "block", "pad"  # groups that are judged by more than their parts and rounds
Tables = dict[str, list[dict[str, Any]]]  # lines by title
STAGES = ("parts", "arms", "transfer", "ablations", "rounds", "claims")


def main(given: list[str]) -> None:
    """Run the requested stages in order. Each that measures writes a file of its own; ``claims`` judges them all."""
    options = arguments(given)
    check_writable("BEBOP_REPRODUCE", HERE)
    started = begin("real_systems")
    groups = {name: group for name, group in GROUPS.items() if name in options.system}
    if "parts" in options.stage:
        names = [name for group in groups.values() for name in group.parts]
        train_parts(PLACE, SIZES, names, lambda name: show(f"{name} ...\n"))
    made = {"arms": (FIRP, made_arms), "transfer": (BLOCK, made_transfer), "ablations": (BLOCK, made_ablations)}
    for stage, (group, make) in made.items():
        if stage in options.stage and group in groups:
            show(f"{stage} ...\n")
            keep_measured(f"{group}_{stage}", started, *make())
    if "rounds" in options.stage:
        found = made_rounds(groups)  # round by round of all groups, so that what slows the machine slows all of them
        for name, group in groups.items():
            if any(part_path(PLACE, part).is_file() for part in group.parts):
                own = {setting: found[setting] for setting in group.settings}
                keep_measured(name, started, *measured(name, group, own))
    if "claims" not in options.stage:
        return
    files = [read(file) for file in sorted(MEASURED.glob("*.json"))]
    numbers: dict[str, Number] = {}
    tables: dict[str, Any] = {}
    places: dict[str, Any] = {}
    for one in files:
        assert one is not None
        numbers |= numbers_of(one)
        places[one["group"]] = one["place"]
        for title, lines in one["tables"].items():
            tables[title] = [*tables.get(title, []), *lines]
    draw(numbers)
    caption = "Speed over plain decoding, tokens a cycle, and reward of every arm; intervals are over rounds."
    plan: dict[str, Any] = {"model": SIZES.model, "rounds": SIZES.rounds, "answers": dict(SIZES.answers)}
    plan |= {"temperatures": {"open": OPEN, "words": WORDS, "word": WORD}, "student's layers": STUDENT}
    plan |= {"sequences": dict(SIZES.sequences), "options": {name: dict(one) for name, one in SIZES.options.items()}}
    keep(HERE, started, numbers, tables, {"arms.svg": caption}, plan | {"places of the groups": places})


def keep_measured(name: str, started: Started, numbers: Mapping[str, Number], tables: Tables) -> None:
    """Write the numbers and tables of a stage, with the place of the measurement; write nothing if there are none.

    Stages of a group take hours each, so they may run on several machines. Their files meet in ``claims``.
    """
    if not numbers and not any(tables.values()):
        return
    MEASURED.mkdir(parents=True, exist_ok=True)
    content = {
        "group": name,
        "place": {"dtype": SIZES.dtype, **record.place(started.origin)},
        "numbers": {label: stored(number) for label, number in numbers.items()},
        "tables": tables,
    }
    write(MEASURED / f"{name}.json", content)


def measured(name: str, group: Group, found: Rounds) -> tuple[dict[str, Number], Tables]:
    """Return the numbers and tables of a group's rounds and parts."""
    numbers = of_rounds(found)
    if name == PAD:
        numbers |= of_pad(PLACE, SIZES)
    if name == BLOCK:
        numbers |= of_block(PLACE, SIZES)
    return numbers, {"Arms in turns": table(found), "What parts cost": costs(group)}


def arguments(given: list[str]) -> argparse.Namespace:
    """Parse the command line; ``study.py`` reads ``--quick`` itself."""
    parser = Parser(prog="python -m recipes.reproduce.real_systems", description=__doc__)
    parser.add_argument(
        "--stage", nargs="+", choices=STAGES, default=list(STAGES), metavar="NAME", help=", ".join(STAGES)
    )
    parser.add_argument(
        "--system",
        nargs="+",
        choices=tuple(GROUPS),
        default=list(GROUPS),
        metavar="NAME",
        help=f"train and measure only these: {', '.join(GROUPS)}; groups may run on several machines",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run on the built-in model and next to nothing")
    return parser.parse_args(given)


def made_rounds(groups: Mapping[str, Group]) -> Rounds:
    """Return all rounds of the groups' arms whose parts are trained."""
    names = [name for group in groups.values() for name in group.settings]
    with tqdm(total=SIZES.rounds * len(names), desc="rounds", unit="round") as bar:
        return measure(PLACE, SIZES, bar.update, names=names)


def made_transfer() -> tuple[dict[str, Number], Tables]:
    """Measure or read the gains of block sizes that were chosen on other completions."""
    options = SIZES.options["block_length"]
    sizes = 2 * (int(options["largest"]) - int(options["smallest"]) + 1)
    with tqdm(total=sizes, desc="transfer", unit="sweep") as bar:
        return transfer(PLACE, SIZES, bar.update), {}


def made_arms() -> tuple[dict[str, Number], Tables]:
    """Train and measure FIRP and its rivals, or read their results."""
    own = firp_arms.RealSeed(PLACE, SIZES)
    with tqdm(total=len(firp_arms.arms(own.depth)), desc="arms", unit="arm") as bar:
        found = firp_arms.compare(own, bar.update)
    title = "FIRP beside heads, equal answers and updates"
    return firp_arms.numbers(found, own.depth), {title: firp_arms.rows(found)}


def made_ablations() -> tuple[dict[str, Number], Tables]:
    """Train or read the choices of block sizes with other inputs and other widths."""
    with tqdm(total=len(SEEN) + len(WIDTHS), desc="ablations", unit="network") as bar:
        return {}, {"BlockPilot: what the choice sees, and how wide it is": ablations(PLACE, SIZES, bar.update)}


def costs(group: Group) -> list[dict[str, Any]]:
    """Return one line per part: hours of processor time, and its size in MiB."""
    return [
        {"part": one.name, "hours": one.hours, "MiB": part_path(PLACE, one.name).stat().st_size / 2**20}
        for one in trained(PLACE)
        if one.name in group.parts
    ]


def draw(numbers: Mapping[str, Number]) -> None:
    """Draw speed-ups, tokens per cycle and rewards, one column per setting that was measured."""
    rows = {"x plain": "speed over plain", "length": "tokens a cycle", "reward": "reward"}
    shown = {
        name: arms
        for name, setting in settings(SIZES).items()
        if (arms := [arm for arm in setting.arms if f"{name}, {arm}: length" in numbers])
    }
    with figure(HERE / "figures" / "arms.svg", max(1, len(shown)), 4.2, 2.8, len(rows), squeeze=False) as panels:
        for column, (setting, arms) in enumerate(shown.items()):
            for line, (what, label) in enumerate(rows.items()):
                panel = panels[line][column]
                given = [numbers.get(f"{setting}, {arm}: {what}") for arm in arms]
                for place, one in enumerate(given):
                    if one is not None:
                        reach = errors([one])  # type: ignore[list-item]
                        panel.errorbar([place], [one.value], reach, fmt="o", capsize=3, color="#16407a")
                panel.set_xticks(
                    range(len(arms)), arms if line == len(rows) - 1 else [""] * len(arms), rotation=60, ha="right"
                )
                panel.set(title=setting if line == 0 else "", ylabel=label if column == 0 else "")
                if what == "x plain":
                    panel.axhline(1, color="#6b7280", linestyle="--", linewidth=1)


if __name__ == "__main__":
    run_main(main)
