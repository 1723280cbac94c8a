"""``results.md`` of a study, from what is stored: its findings with their verdicts, its tables and figures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bebop.bench.record import table
from recipes.reproduce.claims import heading
from recipes.reproduce.record import Content, judged, read
from recipes.reproduce.verdicts import Finding, Verdict, corrected

Verdicts = Mapping[
    tuple[str, int], tuple[Verdict, float | None]
]  # (study, place of the finding) -> verdict, adjusted p


def verdicts(contents: Mapping[str, Content | None]) -> Verdicts:
    """The verdict on every finding of all studies, corrected within each claim."""
    claims: dict[str, list[tuple[str, int, Finding]]] = {}
    for name, content in contents.items():
        for place, finding in enumerate(judged(content) if content else ()):
            claims.setdefault(heading(name, finding.claim), []).append((name, place, finding))
    verdicts_of: dict[tuple[str, int], tuple[Verdict, float | None]] = {}
    for listed in claims.values():
        decided = corrected([finding for _, _, finding in listed])
        verdicts_of |= {(name, place): pair for (name, place, _), pair in zip(listed, decided, strict=True)}
    return verdicts_of


def write_study(folder: Path) -> None:
    """Write ``results.md`` of the study in ``folder``, with verdicts corrected for all studies beside it."""
    contents = {path.parent.name: read(path) for path in sorted(folder.parent.glob("*/results.json"))}
    content = contents[folder.name]
    assert content is not None
    (folder / "results.md").write_text(study_page(folder.name, content, verdicts(contents)))


def study_page(name: str, content: Content, decided: Verdicts) -> str:
    """The text of ``results.md``."""
    lines = ["# Results", ""]
    for place, finding in enumerate(judged(content)):
        lines.append(f"- **{decided[name, place][0]}** ({finding.claim}): {sentence(finding)}")
    lines += ["", *_origin(content), ""]
    for title, rows in content["tables"].items():
        lines += [f"## {title}", "", table([{k: cell(v) for k, v in row.items()} for row in rows])]
    for file, figure in content["figures"].items():
        lines += [f"![{figure['caption']}](figures/{file})", "", figure["caption"], ""]
    minutes, busy = content["seconds"] / 60, content["processor_seconds"] / 60
    lines.append(f"{minutes:.0f} minutes ({busy:.0f} of processor time) on {content['place']['device']}.")
    lines.append("Every number: `results.json`.")
    return "\n".join(lines) + "\n"


def sentence(finding: Finding) -> str:
    """Statement and evidence, and why it was not tested."""
    reason = f"Not tested: {finding.untested}." if finding.untested else ""
    return " ".join(part for part in (finding.statement, finding.evidence, reason) if part)


def cell(value: Any) -> Any:
    """A cell of a stored table; an interval as 2.71 [2.65, 2.78]."""
    if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
        return f"{value['value']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"
    return value


def _origin(content: Content) -> list[str]:
    newest = content["judgements"][-1]
    if not newest.get("post_hoc"):
        return ["Judged at the run, by the rule that stood before it."]
    return [f"Re-judged: the rule is younger than the run. {newest['reason']}"]
