"""From the results of all studies to one page: each claim of a paper with its verdict and all findings behind it."""

from collections.abc import Mapping
from typing import Any

from bebop.bench.record import table
from recipes.reproduce.claims import PAPERS, Claim, heading
from recipes.reproduce.pages import Verdicts, sentence, verdicts
from recipes.reproduce.record import Content, judged
from recipes.reproduce.verdicts import Finding, overall

UNTESTED = "not tested"


INTRODUCTION = """# Results

What the recipes found about the claims of the papers, on the built-in model (12 layers, vocabulary 512), and what it
takes to find it again:

    make reproduce                                  # everything, one recipe after another, then this page
    python -m recipes.reproduce --only objectives   # one recipe, then this page
    python -m recipes.reproduce --rebuild           # this page alone, from what is stored

Numbers in brackets are 95 % intervals: Student's t over three seeds, or a bootstrap over answers. Verdicts:

- *confirmed*, *refuted*: the numbers tell, after all corrections; *undecided*: they do not;
- *not tested*: the arms were not what the claim is about (runs of rising entropy whose entropy fell, a converged head
  that had not converged), or no recipe here can test it.

p is two-sided, from the stored intervals: an interval of Student's t has a half width of its quantile times the
standard error, a bootstrap is taken for normal, and where only rounded text is left, the rounding counts against the
finding. A finding that says several things at once has the p of the weakest. Within each claim the p of all findings
that were tested are corrected by Holm's method (level 0.05 for the claim). Arms that are compared must differ by more
than their *noise*: how far two runs of one arm that differ by their seed alone lie apart (root mean square, of the
noisier arm, taken from its spread over seeds). With three seeds and so many findings much stays undecided that a
single interval would have called confirmed.

The verdict on a claim follows from all of its findings: *confirmed* if every one is; *refuted* if one is and none is
confirmed; *refuted in part* if some are confirmed and some refuted; *confirmed in part* if some are confirmed and the
rest is undecided or not tested; *undecided* if none is confirmed or refuted; *not tested* if nothing of it was.
"""
REJUDGED = """**Re-judged.** The correction, the noise and the checks of the arms came after the runs, so the verdicts
here are post hoc: made by rules that are younger than the numbers. What the rules of the run had said stands behind
each finding and, whole, under `judgements` in each `results.json`. This holds for {names}.
"""


def page(contents: Mapping[str, Content | None]) -> str:
    """``RESULTS.md`` from the results of each recipe."""
    missing = [name for name, content in contents.items() if content is None]
    decided = verdicts(contents)
    lines = [INTRODUCTION]
    if post_hoc := [name for name, content in contents.items() if content and _post_hoc(content)]:
        lines.append(REJUDGED.format(names=", ".join(post_hoc)))
    if missing:
        commands = ", ".join(f"`python -m recipes.reproduce.{name}`" for name in missing)
        lines.append(f"**Results are missing** of {commands}: what they say about a claim is not in its verdict yet.\n")
    for paper in PAPERS:
        lines += [f"## {paper.title}", "", table([_summary(claim, contents, decided) for claim in paper.claims])]
        for claim in paper.claims:
            lines += [f"### {claim.name}: {_verdict(claim, contents, decided)}", "", claim.text, ""]
            lines += [_line(*one, contents, decided) for one in of(claim.name, contents)]
            lines += [f"- **{UNTESTED}**: {part}" for part in claim.beyond_reach]
            lines.append("")
        for name, title in paper.others.items():
            if found := of(name, contents):
                lines += [f"### {title}", "", *(_line(*one, contents, decided) for one in found), ""]
    lines += ["## Runs", "", table([_run(name, content) for name, content in contents.items()])]
    lines += _gaps(contents)
    return "\n".join(lines)


def of(claim: str, contents: Mapping[str, Content | None]) -> list[tuple[str, int, Finding]]:
    """All findings about a claim: recipe, place, finding."""
    return [
        (recipe, place, f)
        for recipe, content in contents.items()
        for place, f in enumerate(judged(content) if content else ())
        if heading(recipe, f.claim) == claim
    ]


def _post_hoc(content: Content) -> bool:
    return bool(content["judgements"][-1].get("post_hoc"))


def _verdict(claim: Claim, contents: Mapping[str, Content | None], decided: Verdicts) -> str:
    """As ``overall``, or that its recipes have not run."""
    findings = [decided[recipe, place][0] for recipe, place, _ in of(claim.name, contents)]
    if not findings and None in contents.values():
        return "no results yet"
    verdict = overall([*findings, *(UNTESTED for _ in claim.beyond_reach)])
    return f"{verdict}, so far" if None in contents.values() else verdict


def _summary(claim: Claim, contents: Mapping[str, Content | None], decided: Verdicts) -> dict[str, Any]:
    """A line of the first table: the number is that of the claim's first finding that was tested."""
    findings = of(claim.name, contents)
    words = [decided[recipe, place][0] for recipe, place, _ in findings] + [UNTESTED for _ in claim.beyond_reach]
    counts = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
    tested = [finding for _, _, finding in findings if finding.untested is None]
    return {
        "claim": f"**{claim.name}** {claim.text}",
        "verdict": f"**{_verdict(claim, contents, decided)}**",
        "findings": counts,
        "first number": tested[0].evidence if tested else "",
        "recipes": ", ".join(_link(recipe) for recipe in dict.fromkeys(recipe for recipe, _, _ in findings)),
    }


def _line(recipe: str, place: int, finding: Finding, contents: Mapping[str, Content | None], decided: Verdicts) -> str:
    verdict, p = decided[recipe, place]
    details = [_link(recipe), finding.rule]
    if p is not None:
        details.append(f"p = {finding.p:.2g}, corrected {p:.2g}")
    if finding.floor is not None:
        details.append(f"noise {finding.floor:.2g}")
    if (before := _before(finding, contents[recipe])) is not None:
        details.append(f"at the run: {before}")
    return f"- **{verdict}**: {sentence(finding)} ({'; '.join(details)})"


def _before(finding: Finding, content: Content | None) -> str | None:
    """What the rule of the run had said, if it was another rule and had this finding."""
    if content is None or not _post_hoc(content):
        return None
    first = [old for old in content["judgements"][0]["findings"] if old["statement"] == finding.statement]
    return first[0].get("verdict") if first else None


def _link(recipe: str) -> str:
    return f"[{recipe}](recipes/reproduce/{recipe}/results.md)"


def _run(recipe: str, content: Content | None) -> dict[str, Any]:
    """Where and when a recipe ran, and by which rules it was judged."""
    readme = f"[{recipe}](recipes/reproduce/{recipe}/README.md)"
    if content is None:
        return {"recipe": readme, "device": "no results yet"}
    place, (first, *later) = content["place"], content["judgements"]
    return {
        "recipe": readme,
        "device": place["device"],
        "minutes": round(content["seconds"] / 60, 1),
        "of processor time": round(content["processor_seconds"] / 60, 1),
        "torch": place["torch"],
        "commit": place["commit"][:7] + (" (dirty)" if place.get("dirty") else ""),
        "rule at the run": f"`{first['rule']['hash']}`" + (" (derived)" if first["rule"]["derived"] else ""),
        "rule of the verdicts": f"`{later[-1]['rule']['hash']}`, post hoc" if later else "the same",
    }


def _gaps(contents: Mapping[str, Content | None]) -> list[str]:
    """What was not recorded at the runs, each gap once with the recipes that have it."""
    gaps: dict[str, list[str]] = {}
    for name, content in contents.items():
        for gap in (content or {}).get("missing", ()):
            gaps.setdefault(gap, []).append(name)
    lines = [f"- {', '.join(names)}: {gap}" for gap, names in gaps.items()]
    return ["What was not recorded, or cannot be shown:", "", *lines, ""] if lines else []
