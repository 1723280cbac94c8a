"""All bad inputs, counted: ``python -m tests.bad_input --out FOLDER`` writes bad_input.json and bad_input.md there."""

import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from bebop.bench.record import begin, keep, table
from bebop.command import Parser, check_writable, run_main, writing
from tests.bad_input.fixtures import working_folder
from tests.bad_input.running import KINDS, faults, run_case
from tests.bad_input.tables import CASES

Row = dict[str, str | int]


def main(arguments: list[str]) -> int:
    """Run every case; 1 if a command took one otherwise than in one line, exit code 2 and nothing written."""
    parser = Parser(prog="python -m tests.bad_input", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="where to write")
    options = parser.parse_args(arguments)
    check_writable("--out", options.out)
    origin = begin()
    counts, wrong = counted()
    rows = rows_of(counts)
    settings = {"cases": len(CASES), "in": "one process, each in a working folder of files that are wrong"}
    keep(options.out, "bad_input", rows, settings, origin)
    with writing(options.out):
        (options.out / "bad_input.md").write_text(table(rows))
    sys.stdout.write("".join(f"{line}\n" for line in wrong) + table(rows[-1:]))
    return 1 if wrong else 0


def counted() -> tuple[Mapping[tuple[str, str], Counter[str]], list[str]]:
    """For each command and kind, how many cases there are and how many have which fault; a line for each fault."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    wrong = []
    with tempfile.TemporaryDirectory() as folder, working_folder(Path(folder, "here")) as here:
        temp = Path(folder, "temp")
        temp.mkdir()
        for case in CASES:
            filled = case.filled(here.put)
            found = faults(run_case(filled, here.folder, temp), filled.names)
            counts.setdefault((case.command, case.kind), Counter()).update(["cases", *{kind for kind, _ in found}])
            wrong += [f"{case.id}: {kind}: {told}" for kind, told in found]
    return counts, wrong


def rows_of(counts: Mapping[tuple[str, str], Counter[str]]) -> Sequence[Row]:
    """A row for each command and kind, and one of all."""
    total: Counter[str] = sum(counts.values(), Counter())
    named = [(*key, count) for key, count in counts.items()] + [("all", "all", total)]
    return [
        {"command": command, "kind": kind, "cases": count["cases"], **{fault: count[fault] for fault in KINDS}}
        for command, kind, count in named
    ]


if __name__ == "__main__":
    run_main(main)
