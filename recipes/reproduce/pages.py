"""``results.md`` of a study, from what is stored: its findings with their verdicts, its tables and figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bebop.bench.record import table
from recipes.reproduce.claims import REAL_STUDIES, RECIPES
from recipes.reproduce.record import Content, judged, read, substance
from recipes.reproduce.rule_hash import declared
from recipes.reproduce.scope import counted, family, scope_of
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


def write_study(folder: Path, name: str) -> None:
    """Write ``results.md`` of a study in ``folder``, with verdicts corrected for all studies beside it."""
    root = folder.parents[name.count(".")]
    known = (*REAL_STUDIES, *RECIPES)
    contents = {study: read(within(root, study) / "results.json") for study in dict.fromkeys((*known, name))}
    content = contents[name]
    assert content is not None
    (folder / "results.md").write_text(study_page(name, content, verdicts(contents)))


def within(root: Path, study: str) -> Path:
    """The folder of a study below that of all: ``real.rl`` is ``real/rl``."""
    return root.joinpath(*study.split("."))


def page_of(study: str) -> str:
    """Where a reader finds a study: a declaration has no page of results, its README leads to what there is."""
    file = "README.md" if declared(study) else "results.md"
    return f"recipes/reproduce/{study.replace('.', '/')}/{file}"


def study_page(name: str, content: Content, decided: Verdicts) -> str:
    """The text of ``results.md``."""
    lines = ["# Results", ""]
    for place, finding in enumerate(judged(content)):
        told, scope = counted(name, finding), scope_of(name, finding.statement)
        bar = "" if scope is None or told.untested is not None else f" {SAYS[scope.kind]}: {scope.why}."
        lines.append(f"- **{decided[name, place][0]}** ({finding.claim}): {sentence(told)}{bar}")
    lines += ["", *_origin(content), ""]
    for title, rows in content["tables"].items():
        lines += [f"## {title}", "", table([{k: cell(v) for k, v in row.items()} for row in rows])]
    for file, figure in content["figures"].items():
        lines += [f"![{figure['caption']}](figures/{file})", "", figure["caption"], ""]
    minutes, busy = content["seconds"] / 60, content["processor_seconds"] / 60
    lines.append(f"{minutes:.0f} minutes ({busy:.0f} of processor time) on {content['place']['device']}.")
    lines.append("Every number: `results.json`.")
    return "\n".join(lines) + "\n"


def sentence(finding: Finding, stated: bool = False) -> str:
    """Statement (unless it is ``stated`` beside it) and evidence, and why it was not tested."""
    reason = f"Not tested: {finding.untested}." if finding.untested else ""
    return " ".join(part for part in ("" if stated else finding.statement, finding.evidence, reason) if part)


def cell(value: Any) -> Any:
    """A cell of a stored table; an interval as 2.71 [2.65, 2.78]."""
    if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
        return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return value


def _origin(content: Content) -> list[str]:
    newest = substance(content)
    if not newest.get("post_hoc"):
        return ["Judged at the run, by the rule that stood before it."]
    return [f"Re-judged: the rule is younger than the run. {newest['reason']}"]
