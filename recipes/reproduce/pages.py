"""What all pages on studies share: the verdict on every finding, and how findings and cells are worded."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.reproduce.record import Content, judged
from recipes.reproduce.scope import counted, family
from recipes.reproduce.verdicts import Finding, Verdict, corrected

Verdicts = Mapping[
    tuple[str, int], tuple[Verdict, float | None]
]  # (study, place of the finding) -> verdict, adjusted p


SAYS = {"ours": "A bar of ours", "further": "Beside the claim"}  # of findings that do not count for a claim


def verdicts(contents: Mapping[str, Content | None]) -> Verdicts:
    """The verdict on every finding of all studies, corrected within each ``family``."""
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
    """The folder of a study below that of all: ``real.rl`` is ``real/rl``."""
    return root.joinpath(*study.split("."))


def sentence(finding: Finding, stated: bool = False) -> str:
    """Statement (unless it is ``stated`` beside it) and evidence, and why it was not tested."""
    reason = f"Not tested: {finding.untested}." if finding.untested else ""
    return " ".join(part for part in ("" if stated else finding.statement, finding.evidence, reason) if part)


def cell(value: Any) -> Any:
    """A cell of a stored table; an interval as 2.71 [2.65, 2.78]."""
    if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
        return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return value
