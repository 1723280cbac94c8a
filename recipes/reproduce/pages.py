"""Shared parts of the pages on studies: the verdict on every finding, and the wording of findings and cells."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.reproduce.record import Content, judged
from recipes.reproduce.scope import counted, family
from recipes.reproduce.verdicts import Finding, Verdict, corrected

Verdicts = Mapping[
    tuple[str, int], tuple[Verdict, float | None]
]  # (study, place of the finding) -> verdict, adjusted p


SAYS = {"ours": "A bar of ours", "further": "Beside the claim"}  # findings that do not count for a claim


def verdicts(contents: Mapping[str, Content | None]) -> Verdicts:
    """Return the verdict on every finding of all studies, corrected within each ``family``."""
    families: dict[tuple[str, str], list[tuple[str, int, Finding]]] = {}
    for name, content in contents.items():
        for place, finding in enumerate(judged(content) if content else ()):
            families.setdefault(family(name, finding), []).append((name, place, counted(name, finding)))
    verdicts_of: dict[tuple[str, int], tuple[Verdict, float | None]] = {}
    for listed in families.values():
        decided = corrected([finding for _, _, finding in listed])
        verdicts_of |= {(name, place): pair for (name, place, _), pair in zip(listed, decided, strict=True)}
    return verdicts_of


def within(root: Path, study: str) -> Path:
    """Return the folder of a study below ``root``: ``real.rl`` is ``real/rl``."""
    return root.joinpath(*study.split("."))


def sentence(finding: Finding, stated: bool = False) -> str:
    """Return a finding's statement and evidence, and why it was not tested; ``stated`` leaves out the statement."""
    reason = f"Not tested: {finding.untested}." if finding.untested else ""
    return " ".join(part for part in ("" if stated else finding.statement, finding.evidence, reason) if part)


def cell(value: Any) -> Any:
    """Return a cell of a stored table; an interval becomes text such as 2.71 [2.65, 2.78]."""
    if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
        return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return value
