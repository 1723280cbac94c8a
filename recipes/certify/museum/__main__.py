"""Certify planted public faults, exact look-alikes and intact engines: ``bebop certify --museum``.

If it was stopped, it goes on in the same folder. ``python -m recipes.certify.museum`` does the same.
"""

import dataclasses
import json
from pathlib import Path

from tqdm import tqdm

from bebop.bench import record
from bebop.command import Parser, check_writable, run_main, whole
from recipes.certify.museum import page, study
from recipes.certify.museum.damage import Damage
from recipes.certify.museum.exhibits import EXHIBITS


def main(arguments: list[str]) -> int:
    """Make the missing runs, and write ``museum.json``, ``museum_causes.json`` and ``museum.md``."""
    parser = Parser(prog="bebop certify --museum", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/museum"), help="folder of the runs (%(default)s)")
    parser.add_argument("--record", type=Path, help="folder of the page and its numbers (--out)")
    parser.add_argument("--smoke", action="store_true", help="a minute: everything happens, on next to nothing")
    parser.add_argument("--clean-runs", type=whole(0, 10_000), help=f"runs of intact engines ({study.CLEAN_RUNS})")
    parser.add_argument("--page-only", action="store_true", help="make no run: the page of those that are there")
    parser.add_argument("--rest", action="store_true", help="make the clean runs that --record lacks, and add them")
    options = parser.parse_args(arguments)
    check_writable("--out", options.out)
    if options.record is not None:
        check_writable("--record", options.record)
    plan = study.SMOKE if options.smoke else study.Plan()
    if options.clean_runs is not None:
        plan = dataclasses.replace(plan, clean_runs=options.clean_runs)
    origin = record.begin()
    if options.rest:
        if options.record is None or not (options.record / "museum.json").is_file():
            parser.error("--rest adds to a record that is there: give its folder with --record")
        found = page.with_clean_runs(options.record, options.out, plan)
        page.store(options.record, found, origin, plan)
        return 0
    moved = damages(options.out, plan)
    if not options.page_only:
        study.run_jobs(options.out, study.faults(plan, moved), "faults")
        study.run_jobs(options.out, study.look_alikes(plan), "look-alikes")
        study.run_jobs(options.out, study.clean(plan), "clean")
    found = page.gather(options.out, moved, plan)
    page.store(options.record or options.out, found, origin, plan)
    record.show(page.page(*found, record.place(origin)))
    return 0


def damages(folder: Path, plan: study.Plan) -> dict[str, dict[float, Damage]]:
    """Return the damage of each exhibit by temperature, computed once and kept."""
    path = folder / f"damage-{plan.rows}-{study.VERSION}.json"
    if path.is_file():
        stored = json.loads(path.read_text())
        return {name: {float(heat): Damage(**one) for heat, one in own.items()} for name, own in stored.items()}
    moved = {
        one.name: {heat: study.damage_of(one, heat, plan.rows) for heat in study.HEATS}
        for one in tqdm(EXHIBITS, desc="damage", unit="exhibit", disable=None)
    }
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({name: {heat: dataclasses.asdict(d) for heat, d in own.items()} for name, own in moved.items()})
    )
    return moved


if __name__ == "__main__":
    run_main(main)
