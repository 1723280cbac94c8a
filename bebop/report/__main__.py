"""``python -m bebop.report RUN [RUN ...]``: one HTML page on runs; ``--from LOG`` on logs of any trainer."""

import sys
from collections.abc import Sequence
from pathlib import Path

from bebop.command import Parser, run_main
from bebop.errors import UserError
from bebop.report.page import write_log_report, write_report

__all__ = ["main", "write_report"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and print its path; raise ``UserError`` for what cannot be read or written."""
    parser = Parser(
        prog="python -m bebop.report",
        description="Write report.html from metrics.jsonl, drift.jsonl and config.yaml of a run; several runs are "
        "overlaid. With --from, explain the acceptance in JSONL logs of any trainer or engine.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="*", type=Path, help="folder of a run, for instance runs/gcd")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="where to write (default: report.html in the first RUN, LOG.html)"
    )
    parser.add_argument("--from", metavar="LOG", nargs="+", type=Path, dest="logs", default=[], help="JSONL logs")
    parser.add_argument(
        "--map", metavar="OURS=THEIRS", nargs="+", default=[], help="what a log calls it: entropy=actor/entropy"
    )
    options = parser.parse_args(arguments)
    if bool(options.runs) == bool(options.logs) or (options.map and not options.logs):
        parser.error("give one RUN or more, or --from LOG (and then, if need be, --map)")
    if options.logs:
        path = write_log_report(options.logs, _names(options.map), options.out)
    else:
        path = write_report(options.runs, options.out)
    sys.stdout.write(f"{path}\n")
    return 0


def _names(pairs: Sequence[str]) -> dict[str, str]:
    """Return ``OURS=THEIRS`` as a mapping."""
    wrong = next((pair for pair in pairs if "=" not in pair), None)
    if wrong is not None:
        raise UserError(f"--map {wrong} is not possible: give OURS=THEIRS, for instance entropy=actor/entropy")
    return dict(pair.split("=", 1) for pair in pairs)


if __name__ == "__main__":
    run_main(main)
