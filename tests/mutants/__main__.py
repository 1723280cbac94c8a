"""Plant faults and check that the tests notice: ``python -m tests.mutants [NAME ...] [--every N] [--list] [--jobs N]``.

A NAME is the name of a fault or its beginning. The exit status is 1 if a fault survived, or if one of the tests fails
without a fault; it is 2 if a row does not fit the sources or the tests.
"""

import argparse
import sys
import time
from collections.abc import Sequence

from tests.mutants.fault import PatternNotUnique, UnresolvedTest, load
from tests.mutants.running import Result, judge_all, preload, without_fault


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the faults asked for, print a line for each and a summary, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a fault, or the beginning of several; default: all")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="run only every N-th of them, as a sample")
    parser.add_argument("--list", action="store_true", help="print the rows without running them")
    parser.add_argument("--jobs", type=int, default=2, help="number of faults that run at a time")
    options = parser.parse_args(arguments)
    faults = load()
    unknown = [name for name in options.names if not any(fault.name.startswith(name) for fault in faults)]
    if unknown:
        parser.error(f"no fault begins with {unknown[0]!r}: see --list")
    if options.every < 1:
        parser.error(f"--every {options.every}: must be at least 1")
    chosen = [f for f in faults if not options.names or f.name.startswith(tuple(options.names))][:: options.every]
    if options.list:
        for f in chosen:
            print(f"{f.name:34} {f.address:34} {f.old!r} -> {f.new!r}{f.equivalent and f'  # {f.equivalent}'}")
        return 0
    started = time.perf_counter()
    try:
        for fault in chosen:
            fault.place()
            fault.node_ids()
    except (PatternNotUnique, UnresolvedTest) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    preload()
    results = [print_result(result) for result in without_fault(chosen, options.jobs)]
    if all(result.expected for result in results):
        results += [print_result(result) for result in judge_all(chosen, options.jobs)]
    print(_summary(results, time.perf_counter() - started))
    return int(not all(result.expected for result in results))


def print_result(result: Result) -> Result:
    """Print one line for a result as soon as it is there, and return it."""
    mark = "" if result.expected else "  <-- unexpected"
    detail = result.fault.equivalent if result.fault.equivalent and result.expected else result.detail
    print(f"{result.outcome:9}{result.seconds:6.1f} s  {result.fault.name:34} {detail}{mark}", flush=True)
    return result


def _summary(results: list[Result], seconds: float) -> str:
    rows = [result for result in results if result.fault.address]
    areas = sorted({result.fault.name.split("/")[0] for result in rows})
    lines = ["", f"{'area':18}{'killed':>8}{'survived':>10}{'equivalent':>12}{'error':>8}"]
    for area in [*areas, "all"]:
        own = [r for r in rows if area == "all" or r.fault.name.split("/")[0] == area]
        killed, survived, error = (sum(r.outcome == o for r in own) for o in ("killed", "survived", "error"))
        equivalent = sum(r.outcome == "survived" and r.expected for r in own)
        lines.append(f"{area:18}{killed:8}{survived:10}{equivalent:12}{error:8}")
    lines += [f"{r.fault.name}: {r.outcome}: {r.detail}" for r in results if not r.expected]
    return "\n".join([*lines, f"{len(rows)} faults in {seconds:.0f} s"])


if __name__ == "__main__":
    sys.exit(main())
