"""What a recipe leaves behind: ``results.json`` with every number, and ``results.md`` for readers."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from bebop.benchmarks.record import begin, place, table
from bebop.intervals import Interval

Verdict = Literal["confirmed", "refuted", "undecided"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A claim, the rule that was written down before the run, and what the numbers say by that rule."""

    claim: str  # of SPEC 1.1: C1..C5, or "beyond"
    statement: str  # the claim in words
    rule: str  # what counts as confirmed, what as refuted
    verdict: Verdict
    evidence: str  # the numbers, with intervals


def verdict(interval: Interval, above: float = 0.0) -> Verdict:
    """Confirmed if the whole interval lies above a number, refuted if below it, else undecided."""
    if interval.low > above:
        return "confirmed"
    return "refuted" if interval.high < above else "undecided"


def within(interval: Interval, bound: float) -> Verdict:
    """Confirmed if the whole interval lies within +-bound, refuted if it lies outside altogether, else undecided."""
    if -bound <= interval.low and interval.high <= bound:
        return "confirmed"
    return "refuted" if interval.low > bound or interval.high < -bound else "undecided"


def keep(
    folder: Path,
    findings: Sequence[Finding],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    figures: Mapping[str, str],
    seconds: float,
    settings: Mapping[str, Any],
) -> None:
    """Write both files; ``figures`` maps a file in ``figures/`` to the sentence below it."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "seconds": round(seconds),
        "processor_seconds": round(busy := processor_seconds()),
        "settings": dict(settings),
        "place": (where := place(begin())),
        "findings": [asdict(finding) for finding in findings],
        "tables": {name: [dict(row) for row in rows] for name, rows in tables.items()},
    }
    (folder / "results.json").write_text(json.dumps(content, indent=1, default=_plain) + "\n")
    lines = ["# Results", "", *(f"- {_line(finding)}" for finding in findings), ""]
    for name, rows in tables.items():
        lines += [f"## {name}", "", table([{k: _cell(v) for k, v in row.items()} for row in rows])]
    for file, sentence in figures.items():
        lines += [f"![{sentence}](figures/{file})", "", sentence, ""]
    lines.append(f"{seconds / 60:.0f} minutes ({busy / 60:.0f} of processor time) on {where['device']}.")
    lines.append("Every number: `results.json`.")
    (folder / "results.md").write_text("\n".join(lines) + "\n")


def processor_seconds() -> float:
    """Processor time of this process and of its children that have ended: what a busy machine does not distort."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _line(finding: Finding) -> str:
    return f"**{finding.verdict}** ({finding.claim}): {finding.statement} {finding.evidence}"


def _cell(value: Any) -> Any:
    return str(value) if isinstance(value, Interval) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Interval):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} does not belong into a results file")
