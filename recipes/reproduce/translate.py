"""Hold a translated study against the one before it: ``python -m recipes.reproduce.translate NAME [QUICK OLD NEW]``.

The findings of both rules on the stored numbers have to be equal; then the new judgement is stored as a translation.
With two ``results.json`` of smoke runs, of the old code and of the new, all numbers and tables have to agree to 1e-6.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

from bebop.errors import UserError
from recipes.reproduce import record, rule_hash
from recipes.reproduce.pages import within
from recipes.reproduce.rule_hash import ROOT

CLOSE = 1e-6


def main(name: str, quick: list[str]) -> None:
    """Compare, then store."""
    if quick:
        old, new = (json.loads(Path(path).read_text()) for path in quick)
        for part in ("numbers", "facts", "tables"):
            count = compared(old[part], new[part], part)
            print(f"{name}: {count} values of {part} agree to {CLOSE}")
    path = within(Path(__file__).parent, name) / "results.json"
    content = record.read(path)
    assert content is not None
    if "translated" in content["judgements"][-1]:  # of an attempt before
        content["judgements"].pop()
    missing = content["numbers"].keys() - {one.name for one in quantities(name)}
    print(f"{name}: stored and not declared: {sorted(missing)}")
    commit = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
    record.write(path, record.translate(name, content, commit.stdout.strip()))
    print(f"{name}: {len(content['judgements'][-1]['findings'])} findings are the same")


def quantities(name: str) -> list[Any]:
    """What a declaration computes as sums of arms."""
    study = rule_hash.module(name).STUDY
    return [*study.stats, *(one for rule in study.rules for one in rule.asks)]


def compared(old: Any, new: Any, place: str) -> int:
    """How many values were compared; names that only the new has are allowed, none that only the old has."""
    if isinstance(old, dict):
        if lacking := [key for key in old if key not in new]:
            raise UserError(f"{place}: {lacking} is not there any more")
        return sum(compared(value, new[key], f"{place} > {key}") for key, value in old.items())
    if isinstance(old, list):
        if len(old) != len(new):
            raise UserError(f"{place}: {len(old)} lines before, {len(new)} now")
        return sum(compared(a, b, f"{place} > {i}") for i, (a, b) in enumerate(zip(old, new, strict=True)))
    if isinstance(old, float) and isinstance(new, int | float):
        both_nan = math.isnan(old) and math.isnan(new)
        if not (both_nan or math.isclose(old, new, rel_tol=CLOSE, abs_tol=CLOSE)):
            raise UserError(f"{place}: {old} before, {new} now")
    elif old != new:
        raise UserError(f"{place}: {old!r} before, {new!r} now")
    return 1


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
