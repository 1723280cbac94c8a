"""What became of all faults, by kind; stored with commit and machine."""

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bebop.bench import record
from tests.chaos.ledger import MEMBERS, Books, Finding, check, lineage
from tests.chaos.plan import JOBS

AGAIN = re.compile(r"; (\d+) prompts start again")  # as the pool says of a worker that died


def judged(folder: Path, references: Mapping[str, Path]) -> dict[str, Any]:
    """What there is to say of a finished job: its findings, its faults, its work that was done again.

    Its checkpoints go afterwards, as they are large; so it is judged once.
    """
    place = folder / "judged.json"
    if not place.exists():
        plan = json.loads((folder / "plan.json").read_text())
        job, kind = plan["job"], plan["job"] if plan["job"] in references else "pull"
        books, other = Books(folder, staleness_of(job)), Books(references[kind], staleness_of(kind))
        trained, again, _ = lineage(books.journal)
        found = {
            "name": plan["name"],
            "commit": plan["commit"],
            "job": job,
            "faults": json.loads((folder / "faults.json").read_text()),
            "findings": judge(books, other, job == "sync"),
            "prompts again": sum(map(int, AGAIN.findall((folder / "out.txt").read_text(errors="replace")))),
            "sessions": len(json.loads((folder / "sessions.json").read_text())),
            "steps": len(trained),
            "steps again": again,
            "answers": sum(len(group) for rows in trained.values() for _, group in rows),
        }
        place.write_text(json.dumps(found, indent=1))
        shutil.rmtree(folder / "job" / "checkpoints", ignore_errors=True)
    found = json.loads(place.read_text())
    return {**found, "findings": [Finding(*finding) for finding in found["findings"]]}


def judge(books: Books, other: Books | None, exact: bool) -> list[Finding]:
    """The findings; books that cannot be read are one."""
    try:
        return check(books, other, exact)
    except Exception as error:
        return [Finding("books", f"{type(error).__name__}: {error}")]


def staleness_of(job: str) -> int:
    """That a kind of job allows."""
    return int(next(o for o in JOBS[job] if o.startswith("rollout.staleness=")).rpartition("=")[2])


def rows(jobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a kind of fault, and one for all. A fault is survived if its job went on and its books are in order."""
    faults = [{**fault, "job": job} for job in jobs for fault in job["faults"]]
    kinds = sorted({fault["kind"] for fault in faults})
    found = [_row(kind, [f for f in faults if f["kind"] == kind]) for kind in kinds]
    return [*found, _row("all", faults)]


def _row(kind: str, faults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    survived = [f for f in faults if "recovered" in f and not f["job"]["findings"]]
    row: dict[str, Any] = {"fault": kind, "number": len(faults), "survived": len(survived)}
    for name in ("noticed", "recovered"):
        seconds = [f[name] for f in faults if f.get("alone") and f.get(name)]
        row[f"{name}, median s"] = round(median(seconds), 1) if seconds else ""
        row[f"{name}, longest s"] = round(max(seconds), 1) if seconds else ""
    return row


def summary(jobs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers that all this is about."""
    faults = [fault for job in jobs for fault in job["faults"]]
    lost = sum(f.check in ("order", "stored", "steps") for job in jobs for f in job["findings"])
    waiting = [f["noticed"] for job in jobs if job["job"] == "hangs" for f in job["faults"] if f.get("noticed")]
    steps = sum(job["steps"] for job in jobs)
    return {
        "faults": len(faults),
        "jobs": len(jobs),
        "jobs with findings": sum(bool(job["findings"]) for job in jobs),
        "findings about answers lost, doubled or out of order": lost,
        "answers": sum(job["answers"] for job in jobs),
        "steps": steps,
        "steps done again": sum(job["steps again"] for job in jobs),
        "answers decoded again, of workers that died": MEMBERS * sum(job["prompts again"] for job in jobs),
        "commits": sorted({job["commit"] for job in jobs}),
        "hangs at default settings, alone": len(waiting),
        "noticed within, s": max(waiting, default=0.0),
        "synchronous jobs, bit for bit": sum(job["job"] == "sync" and not job["findings"] for job in jobs),
        "synchronous jobs": sum(job["job"] == "sync" for job in jobs),
        "findings": [f"{job['name']}, {f.check}: {f.what}" for job in jobs for f in job["findings"]],
    }


def write(
    stem: Path, found: Sequence[Mapping[str, Any]], about: Mapping[str, Any], origin: Mapping[str, object]
) -> None:
    """``stem.json`` and ``stem.md``."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    kept = {"place": record.place(origin), "summary": about, "rows": found}
    stem.with_suffix(".json").write_text(json.dumps(kept, indent=1) + "\n")
    lines = [f"- {name}: {value}" for name, value in about.items() if name != "findings"]
    text = [record.table(found), "", *lines, *about.get("findings", ())]
    stem.with_suffix(".md").write_text("\n".join(text).rstrip() + "\n")
