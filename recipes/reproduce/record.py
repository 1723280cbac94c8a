"""Reading, writing and checking ``results.json``: a study's numbers, their origin, and the rules that judged them.

``judgements`` is a list. The first was made at the run. Each later one is a *re-judgement*, by a rule that is younger
than the numbers, and is marked ``post_hoc``; or it is the translation of a rule into a declaration. Stored p-values are
those of each rule alone. Pages correct them for the other findings of a claim, which come from several studies.
"""

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bebop.bench import record
from bebop.errors import UserError
from bebop.metrics.intervals import Interval
from recipes.reproduce import rule_hash
from recipes.reproduce.measured import Number
from recipes.reproduce.verdicts import Finding, Rule, judge

Content = dict[str, Any]  # of a results.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """A study that has begun: everything that must be known before its first measurement."""

    name: str
    origin: dict[str, object]
    code: rule_hash.RuleCode
    rules: tuple[Rule, ...]
    at: float


def begin(name: str) -> Started:
    """Record commit, command and rule of a study. Its ``main`` calls this first."""
    origin, code = record.begin(), rule_hash.of_study(name)
    return Started(name=name, origin=origin, code=code, rules=rules_of(name), at=time.time())


def rules_of(name: str) -> tuple[Rule, ...]:
    """Return the rules of a study."""
    rules: tuple[Rule, ...] = rule_hash.module(name).RULES
    return rules


def keep(
    folder: Path,
    started: Started,
    numbers: Mapping[str, Number],
    tables: Mapping[str, Sequence[Mapping[str, Any]]],
    figures: Mapping[str, str],
    settings: Mapping[str, Any],
    facts: Mapping[str, object] | None = None,
) -> None:
    """Judge the numbers and write ``results.json``; ``figures`` maps a file in ``figures/`` to its caption.

    The rules test ``numbers``. Their evidence may quote ``facts``, which are not tested.
    """
    folder.mkdir(parents=True, exist_ok=True)
    content: Content = {
        "seconds": round(time.time() - started.at),
        "processor_seconds": round(processor_seconds()),
        "settings": dict(settings),
        "place": record.place(started.origin),
        "numbers": {name: stored(number) for name, number in numbers.items()},
        "facts": dict(facts or {}),
        "judgements": [judgement(started.code, judge(started.rules, numbers, facts))],
        "figures": {file: drawn(folder / "figures" / file, sentence) for file, sentence in figures.items()},
        "tables": {name: [dict(row) for row in rows] for name, rows in tables.items()},
    }
    write(folder / "results.json", content)


def judgement(code: rule_hash.RuleCode, findings: Sequence[Finding], **more: object) -> dict[str, Any]:
    """Return an entry of ``judgements``."""
    rule = {"hash": code.hash, "derived": False, "files": list(code.files)}
    return {"rule": rule, **more, "findings": [asdict(finding) for finding in findings]}


def drawn(path: Path, sentence: str) -> dict[str, str]:
    """Return a figure's entry in ``results.json``: caption and file hash; the data of a figure are not all stored."""
    return {"caption": sentence, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def stored(number: Number) -> dict[str, Any]:
    """Return a number's entry in ``results.json``, without optional fields that are None or 0."""
    return {k: v for k, v in asdict(number).items() if v not in (None, 0.0) or k in ("value", "low", "high")}


def write(path: Path, content: Content) -> None:
    """Write a ``results.json``."""
    path.write_text(json.dumps(content, indent=1, default=_plain) + "\n")


def read(path: Path) -> Content | None:
    """Return the stored results of a study; None where there are none yet."""
    content: Content | None = json.loads(path.read_text()) if path.is_file() else None
    return content


def numbers_of(content: Content) -> dict[str, Number]:
    """Return the numbers that rules refer to, by name."""
    return {name: Number(**number) for name, number in content["numbers"].items()}


def judged(content: Content) -> list[Finding]:
    """Return the findings of the newest judgement."""
    return [Finding(**finding) for finding in content["judgements"][-1]["findings"]]


def substance(content: Content) -> dict[str, Any]:
    """Return the newest judgement that is not a translation: a translated rule gives the same verdicts."""
    made: dict[str, Any] = [one for one in content["judgements"] if "translated" not in one][-1]
    return made


def check(name: str, content: Content, folder: Path) -> None:
    """Check that the current rule judged a result, and that judging again gives the same findings.

    Raises:
        UserError: The rule has changed, the findings differ, or a figure is not the one of the run.
    """
    code, newest = rule_hash.of_study(name), content["judgements"][-1]
    if newest["rule"]["hash"] != code.hash:
        raise UserError(
            f"the rule of {name} is {code.hash}, but its results were judged by {newest['rule']['hash']}: the rule was "
            "changed after its results; run the study again, or judge them again with --rejudge REASON"
        )
    again = judge(rules_of(name), numbers_of(content), content["facts"])
    if len(again) != len(judged(content)) or not all(map(same, again, judged(content))):
        raise UserError(f"the findings stored for {name} are not what its rule makes of the numbers stored beside them")
    for file, figure in content["figures"].items():
        if drawn(folder / "figures" / file, figure["caption"]) != figure:
            raise UserError(f"figures/{file} of {name} is not the one that its results came with: run the study again")


def same(one: Finding, other: Finding) -> bool:
    """Return whether two findings are equal up to the last digits of p and floor, which differ between machines."""
    a, b = asdict(one), asdict(other)
    close = [math.isclose(a[k] or 0.0, b[k] or 0.0, rel_tol=1e-6, abs_tol=1e-12) for k in ("p", "floor")]
    return all(close) and all(a[k] == b[k] for k in a if k not in ("p", "floor"))


def rejudge(name: str, content: Content, reason: str, origin: Mapping[str, object]) -> Content:
    """Return the results with one more judgement, by the current rule; ``origin`` comes from ``record.begin``."""
    code = rule_hash.of_study(name)
    if content["judgements"][-1]["rule"]["hash"] == code.hash:
        return content
    findings = judge(rules_of(name), numbers_of(content), content["facts"])
    made = judgement(code, findings, post_hoc=True, reason=reason, origin=dict(origin))
    return {**content, "judgements": [*content["judgements"], made]}


def translate(name: str, content: Content, commit: str) -> Content:
    """Return the results with a judgement by a rule that became a declaration; ``commit`` holds the rule before.

    Raises:
        UserError: The new rule does not judge the stored numbers as the one before did.
    """
    code, before = rule_hash.of_study(name), content["judgements"][-1]
    made = judge(rules_of(name), numbers_of(content), content["facts"])
    if difference := [one for one in zip(judged(content), made, strict=True) if not equal_verdicts(*one)]:
        old, new = difference[0]
        raise UserError(f"{name} would be judged anew: {old.statement!r} p {old.p}, by the new rule p {new.p}")
    # Paths of the older rule in that commit: files may have moved since its judgement.
    files = [f"recipes/reproduce/{name.replace('.', '/')}/findings.py", *code.files[-2:]]
    rule = {"from": before["rule"]["hash"], "to": code.hash, "commit": commit, "files": files}
    return {**content, "judgements": [*content["judgements"], judgement(code, made, translated=rule)]}


def equal_verdicts(one: Finding, other: Finding) -> bool:
    """Return whether two findings agree apart from the wording of rule and evidence."""
    return same(replace(one, rule="", evidence=""), replace(other, rule="", evidence=""))


def processor_seconds() -> float:
    """Return processor seconds of this process and its ended children, which a busy machine does not distort."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _plain(value: Any) -> Any:
    if isinstance(value, Interval | Number):
        return asdict(value)
    raise TypeError(f"{type(value).__name__} does not belong into a results file")
