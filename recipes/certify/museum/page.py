"""Results of the runs: rows for ``museum.json``, the table of causes, and the page."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bebop.bench import record
from bebop.certify.certificate import rank_causes
from bebop.certify.evidence import Evidence
from recipes.certify.museum.damage import Damage
from recipes.certify.museum.engines import ALPHA, BoxResult, RunResult
from recipes.certify.museum.exhibits import ATTACKS, EXHIBITS, LOOK_ALIKES, Exhibit
from recipes.certify.museum.study import (
    HEATS,
    NAMED,
    Job,
    Plan,
    clean,
    faults,
    judge,
    kept,
    look_alikes,
    run_jobs,
)

Moved = Mapping[str, Mapping[float, Damage]]
Row = dict[str, Any]
LEVEL = math.log(1 / ALPHA)


def named(one: BoxResult) -> str:
    """Return the likeliest cause of a box's finding, by the current ranking."""
    evidence = [
        Evidence(name=name, group=group, log_e=log_e, weight=weight, share=one.share, tv=None)
        for group, name, log_e, weight in one.evidence
    ]
    ranked = rank_causes(evidence, odds=one.odds)
    return ranked[0][0] if ranked else "unknown"


def first_named(one: BoxResult) -> str:
    """Return the cause of the direction with the most merged evidence, as certificates named it formerly."""
    evidence = [
        Evidence(name=name, group=group, log_e=log_e, weight=weight, share=one.share, tv=None)
        for group, name, log_e, weight in one.evidence
    ]
    best = max(evidence, key=lambda each: each.merged)
    return rank_causes([best])[0][0] if best.group != "reported" else named(one)


def made(folder: Path, jobs: Sequence[Job]) -> dict[Job, RunResult]:
    """Return the runs that have been made."""
    found = {job: kept(folder, job) for job in jobs}
    return {job: run for job, run in found.items() if run is not None}


def boxes(exhibit: Exhibit, run: RunResult) -> Iterator[tuple[str, BoxResult, tuple[str, ...]]]:
    """Yield each box that found a fault, with the causes that are correct for it."""
    for box, one, right in (("black", run.black, exhibit.black), ("white", run.white, exhibit.white)):
        if one.found is not None:
            yield box, one, right


def exhibit_row(exhibit: Exhibit, runs: Mapping[Job, RunResult], moved: Mapping[float, Damage], plan: Plan) -> Row:
    """Return the row of an exhibit."""
    by_heat = {heat: [run for job, run in runs.items() if job.temperature == heat] for heat in HEATS}
    verdict = judge(by_heat, dict(moved), plan) if moved else None
    row: Row = {"exhibit": exhibit.name, "source": exhibit.source, "wrong": exhibit.wrong}
    for heat in HEATS:
        at = f"T = {heat:g}"
        if moved:
            one = moved[heat]
            row[f"TV, {at}"] = one.tv
            row[f"likelihood ratio, tokens, {at}"] = _finite(one.tokens(ALPHA))
            row[f"likelihood ratio inside, tokens, {at}"] = _finite(one.tokens(ALPHA, inside=True))
        for box in ("black", "white"):
            found = [getattr(run, box).found for run in by_heat[heat]]
            row[f"runs, {at}"] = len(found)
            row[f"found, {box}, {at}"] = sum(one is not None for one in found)
            row[f"tokens, {box}, {at}"] = sorted(one for one in found if one is not None)
    causes = [(named(one), right) for run in runs.values() for _, one, right in boxes(exhibit, run)]
    row["causes"] = dict(Counter(name for name, _ in causes).most_common())
    row["right causes"] = sorted({*exhibit.black, *exhibit.white})
    row["named rightly"], row["named"] = sum(name in right for name, right in causes), len(causes)
    row["seen"] = "-" if verdict is None else verdict.seen
    row["remedy"] = exhibit.remedy
    return row


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def confusion(parts: Sequence[tuple[Exhibit, Mapping[Job, RunResult]]]) -> list[Row]:
    """Return how often each fault was given each cause, with one row per fault and box."""
    rows = []
    for exhibit, runs in parts:
        for box, right in (("black", exhibit.black), ("white", exhibit.white)):
            found = [one for run in runs.values() for where, one, _ in boxes(exhibit, run) if where == box]
            if found:
                causes = [named(one) for one in found]
                rows.append(
                    {
                        "fault": exhibit.name,
                        "box": box,
                        "right": ", ".join(right),
                        "runs": len(found),
                        "rightly": sum(one in right for one in causes),
                        "rightly before": sum(first_named(one) in right for one in found),
                        "causes": dict(Counter(causes).most_common()),
                    }
                )
    return rows


def gather(folder: Path, moved: Moved, plan: Plan) -> tuple[list[Row], list[Row], Row]:
    """Return a row for each exhibit and look-alike, the table of causes, and the sums, over the runs made so far."""
    runs = made(folder, faults(plan, {name: dict(one) for name, one in moved.items()}))
    alike, intact = made(folder, look_alikes(plan)), made(folder, clean(plan))
    by_name = {one.name: {job: run for job, run in runs.items() if job.exhibit.name == one.name} for one in EXHIBITS}
    rows = [exhibit_row(one, by_name[one.name], moved[one.name], plan) for one in EXHIBITS]
    for one in LOOK_ALIKES:
        own = {job: run for job, run in alike.items() if job.exhibit.name == one.name}
        row = exhibit_row(one, own, {}, plan)
        row["seen"] = _passed(own, len(HEATS) * plan.seeds)
        rows.append(row)
    attacks = [(one, {j: r for j, r in runs.items() if j.exhibit.name == one.name}) for one in ATTACKS]
    causes = confusion([(one, by_name[one.name]) for one in EXHIBITS] + attacks)
    seen = Counter(row["seen"] for row in rows[: len(EXHIBITS)])
    passing = sum(row["seen"] == "passes" for row in rows)
    inside = [row for row in causes if row["fault"] in by_name]
    found, right = sum(row["runs"] for row in inside), sum(row["rightly"] for row in inside)
    sums: Row = {
        "exhibits": len(EXHIBITS),
        "seen": seen["yes"],
        "no test can": seen["no test can"],
        "missed": seen["missed"],
        "not run": seen["not run"],
        "not finished": seen["not finished"],
        "look-alikes": len(LOOK_ALIKES),
        "look-alikes that pass": passing,
        "runs of look-alikes": len(alike),
        "proofs": found,
        "named rightly": right,
        "share named rightly": right / found if found else None,
        "share needed": NAMED,
        "named rightly before": sum(row["rightly before"] for row in inside),
        "clean runs": len(intact),
        "clean runs planned": plan.clean_runs,
        "clean tokens": sum(run.black.tokens for run in intact.values()),
        "false alarms": _alarms(intact.values()),
        "highest ln E of a clean run": max((max(r.black.highest, r.white.highest) for r in intact.values()), default=0),
    }
    return rows, causes, sums


def with_clean_runs(stored: Path, folder: Path, plan: Plan) -> tuple[list[Row], list[Row], Row]:
    """Return the stored results, after making the missing clean runs in ``folder`` and adding them to the sums.

    Clean runs are made in their order, so a record of n has the first n. Nothing else is made or judged again, so a
    record can be extended even if the files of its runs are gone.
    """
    sums = json.loads((stored / "museum.json").read_text())
    causes = json.loads((stored / "museum_causes.json").read_text())["rows"]
    rows, sums = sums["rows"], dict(sums["settings"])
    jobs = clean(plan)[sums["clean runs"] :]
    run_jobs(folder, jobs, "clean")
    intact = made(folder, jobs).values()
    sums["clean runs"], sums["clean runs planned"] = sums["clean runs"] + len(intact), plan.clean_runs
    sums["clean tokens"] += sum(run.black.tokens for run in intact)
    sums["false alarms"] += _alarms(intact)
    highest = (max(run.black.highest, run.white.highest) for run in intact)
    sums["highest ln E of a clean run"] = max(sums["highest ln E of a clean run"], *highest)
    return rows, causes, sums


def _passed(runs: Mapping[Job, RunResult], planned: int) -> str:
    if _alarms(runs.values()):
        return "alarm"
    return "passes" if len(runs) >= planned else "not finished" if runs else "not run"


def _alarms(runs: Any) -> int:
    return sum(max(run.black.highest, run.white.highest) >= LEVEL for run in runs)


# ---- the page


def page(rows: Sequence[Row], causes: Sequence[Row], sums: Row, place: Mapping[str, object]) -> str:
    """Return the page in Markdown."""
    share = sums["share named rightly"]
    told = [
        f"{sums['seen']} of {sums['exhibits']} public faults are proved within the budget",
        f"{sums['no test can']} cannot be by any test",
        f"{sums['missed']} are missed",
        f"{sums['not finished']} lack runs that decide",
        f"{sums['not run']} have not been run.",
    ]
    beside = [
        f"{sums['look-alikes that pass']} of {sums['look-alikes']} exact look-alikes pass, in "
        f"{sums['runs of look-alikes']} runs.",
        f"{sums['false alarms']} of {sums['clean runs']} runs of intact engines raise an alarm; "
        f"{sums['clean runs planned']} are planned.",
        f"Of {sums['proofs']} proofs, {100 * share:.0f} % name a right cause." if share is not None else "",
    ]
    lines = [
        "# The museum of exactness faults",
        "",
        ", ".join(told),
        *beside,
        "",
        "TV: total variation a token, computed. Likelihood ratio: tokens after which the exact one has proved the",
        "fault in four of five runs, from outside / inside. Boxes: tokens at the median of the runs that proved it.",
        "",
        "| fault | what was wrong | T | TV | likelihood ratio | black box | white box | causes | seen |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for number, heat in enumerate(HEATS):
            lines.append(_line(row, heat, first=number == 0))
    lines += ["", "What no test can see, and what could see it:", ""]
    lines += [f"- {row['source']}: {row['remedy']}" for row in rows if row["remedy"]]
    lines += [
        "",
        "## Causes",
        "",
        "The right ones were written down before the runs. *Before*: by the direction with the most weighted evidence.",
        "",
        "| fault | box | proofs | right | rightly named | before | named |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in causes:
        given = ", ".join(f"{name} {count}" for name, count in row["causes"].items())
        lines.append(
            f"| {row['fault']} | {row['box']} | {row['runs']} | {row['right']} | {row['rightly']} "
            f"| {row['rightly before']} | {given} |"
        )
    lines += ["", f"Commit {str(place.get('commit'))[:12]}, torch {place.get('torch')}, {place.get('device')}.", ""]
    return "\n".join(lines)


def _line(row: Row, heat: float, *, first: bool) -> str:
    at = f"T = {heat:g}"

    def proofs(box: str) -> str:
        tokens, runs = row[f"tokens, {box}, {at}"], row[f"runs, {at}"]
        if not runs:
            return "not run"
        return f"{tokens[len(tokens) // 2]:,} ({len(tokens)} of {runs})" if tokens else f"- (0 of {runs})"

    def need(name: str) -> str:
        value = row.get(f"likelihood ratio{name}, tokens, {at}")
        return "never" if value is None else f"{value:,.0f}"

    moved = f"TV, {at}" in row
    tv = f"{row[f'TV, {at}']:.1e}" if moved else "0"
    ratio = f"{need('')} / {need(' inside')}" if moved else "never"
    given = ", ".join(row["causes"]) or "-"
    about = (row["source"], row["wrong"]) if first else ("", "")
    end = (given, row["seen"]) if first else ("", "")
    return "| " + " | ".join([*about, f"{heat:g}", tv, ratio, proofs("black"), proofs("white"), *end]) + " |"


def store(folder: Path, found: tuple[list[Row], list[Row], Row], origin: Mapping[str, object], plan: Plan) -> None:
    """Write ``museum.json`` and ``museum.md``."""
    rows, causes, sums = found
    settings = {"alpha": ALPHA, "seeds": plan.seeds, "budget": plan.budget, "other": plan.other, **sums}
    record.keep(folder, "museum", rows, settings, origin)
    record.keep(folder, "museum_causes", causes, {"alpha": ALPHA}, origin)
    (folder / "museum.md").write_text(page(rows, causes, sums, record.place(origin)))
