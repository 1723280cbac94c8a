"""Plant faults and see that the tests notice: ``python -m tests.mutants [NAME ...] [--every N] [--list] [--jobs N]``.

A NAME is that of a fault or the beginning of one. Exit status 1 if a fault survived (or a test of it fails without).
"""

import argparse
import sys
import time

from tests.mutants.fault import Misaimed
from tests.mutants.running import Result, judge_all, preload, without_fault
from tests.mutants.tables import FAULTS


def main() -> int:
    """Run, and sum up."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault, or the beginning of several; all if none")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only every N-th of them: a sample")
    parser.add_argument("--list", action="store_true", help="print the table and do nothing")
    parser.add_argument("--jobs", type=int, default=2, help="faults at a time")
    asked = parser.parse_args()
    unknown = [name for name in asked.names if not any(f.name.startswith(name) for f in FAULTS)]
    if unknown:
        parser.error(f"no fault begins with {unknown[0]!r}: see --list")
    if asked.every < 1:
        parser.error(f"--every {asked.every}: at least 1")
    chosen = [f for f in FAULTS if not asked.names or f.name.startswith(tuple(asked.names))][:: asked.every]
    if asked.list:
        for f in chosen:
            print(f"{f.name:34} {f.file:34} {f.old!r} -> {f.new!r}{'  # ' + f.immortal if f.immortal else ''}")
        return 0
    started = time.perf_counter()
    try:
        for f in chosen:
            f.mutated()
    except Misaimed as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    preload()
    found = [_told(result) for result in without_fault(chosen, asked.jobs)]
    if all(result.good for result in found):
        found += [_told(result) for result in judge_all(chosen, asked.jobs)]
    print(_summary(found, time.perf_counter() - started))
    return int(not all(result.good for result in found))


def _told(result: Result) -> Result:
    """One line as it happens; more where it matters."""
    mark = "" if result.good else "  <-- not as it should be"
    said = result.fault.immortal if result.fault.immortal and result.good else result.said
    print(f"{result.outcome:9}{result.seconds:6.1f} s  {result.fault.name:34} {said}{mark}", flush=True)
    return result


def _summary(found: list[Result], seconds: float) -> str:
    rows = [result for result in found if result.fault.file]
    areas = sorted({result.fault.name.split("/")[0] for result in rows})
    lines = ["", f"{'area':14}{'killed':>8}{'survived':>10}{'of which known':>16}{'error':>8}"]
    for area in [*areas, "all"]:
        own = [r for r in rows if area == "all" or r.fault.name.split("/")[0] == area]
        killed, survived, error = (sum(r.outcome == o for r in own) for o in ("killed", "survived", "error"))
        known = sum(r.outcome == "survived" and r.good for r in own)
        lines.append(f"{area:14}{killed:8}{survived:10}{known:16}{error:8}")
    lines += [f"{r.fault.name}: {r.outcome}: {r.said}" for r in found if not r.good]
    return "\n".join([*lines, f"{len(rows)} faults in {seconds:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
