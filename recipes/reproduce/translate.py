"""Check that rewritten rules judge as before: ``python -m recipes.reproduce.translate FOLDER|- NAME ...``.

A rule became a declaration. On the stored numbers, the old and the new rule must give equal findings. Then the new
judgement is stored as a translation. FOLDER holds NAME-old.json and NAME-new.json, made by the old and the new code
from the same measurements. All their numbers, facts and table cells must agree to 1e-6. A dash skips that comparison.
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


def main(names: list[str], files: str) -> None:
    """Compare, then store; ``files``: a folder with NAME-old.json and NAME-new.json, or "" to skip the comparison."""
    for name in names:
        if files:
            old, new = (json.loads((Path(files) / f"{name}-{age}.json").read_text()) for age in ("old", "new"))
            for part in ("numbers", "facts", "tables"):
                print(f"{name}: {compared(old[part], new[part], part)} values of {part} agree to {CLOSE}")
        translate(name)


def translate(name: str) -> None:
    """Store the judgement of a study's new rule beside the previous one."""
    path = within(Path(__file__).parent, name) / "results.json"
    content = record.read(path)
    assert content is not None
    commit = head()
    if "translated" in content["judgements"][-1]:  # an earlier attempt: keep the commit of the older rule
        commit = content["judgements"].pop()["translated"]["commit"]
    missing = content["numbers"].keys() - {one.name for one in quantities(name)}
    print(f"{name}: stored and not declared: {sorted(missing)}")
    record.write(path, record.translate(name, content, commit))
    print(f"{name}: {len(content['judgements'][-1]['findings'])} findings are the same")


def head() -> str:
    """Return the newest commit, which holds the rule before a translation that is not committed yet."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def quantities(name: str) -> list[Any]:
    """Return the quantities that a declaration computes from its arms."""
    study = rule_hash.module(name).STUDY
    return [*study.stats, *(one for rule in study.rules for one in rule.asks)]


def compared(old: Any, new: Any, place: str) -> int:
    """Return the number of values compared; names that only ``new`` has are allowed.

    Raises:
        UserError: A value differs by more than 1e-6, or ``new`` lacks a name.
    """
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
    main(sys.argv[2:], "" if sys.argv[1] == "-" else sys.argv[1])
