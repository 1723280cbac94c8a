"""``python -m bebop.report RUN [RUN ...]``: one HTML page on one or several runs from their ``metrics.jsonl``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from bebop.errors import UserError
from bebop.monitor.report.page import write_report

__all__ = ["main", "write_report"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; 0 if all is well, 2 with one line on stderr if not."""
    parser = argparse.ArgumentParser(
        prog="python -m bebop.report",
        description="Write report.html from metrics.jsonl and config.yaml of a run; several runs are overlaid.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="folder of a run, for instance runs/default")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="where to write (default: report.html in the first RUN)"
    )
    options = parser.parse_args(arguments)
    try:
        path = write_report(options.runs, options.out)
    except (UserError, OSError) as error:
        sys.stderr.write(f"bebop.report: {error}\n")
        return 2
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
