"""From the results of all recipes to one page: each claim of the paper with its verdict and all findings behind it."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.benchmarks.record import table
from recipes.common.record import Finding

UNTESTABLE = "not testable here"
Content = dict[str, Any]  # of a results.json


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of the paper, as SPEC 1.1 puts it."""

    name: str
    text: str
    beyond_reach: tuple[str, ...] = ()  # parts that no recipe can test, and why


CLAIMS = (
    Claim(
        name="C1",
        text="Acceptance falls linearly with policy entropy, for greedy drafts and for sampled drafts of "
        "a head trained by cross-entropy.",
    ),
    Claim(name="C2", text="Rejection sampling (sampled drafts) beats target-only verification (greedy drafts)."),
    Claim(
        name="C3",
        text="Training the head on total variation, end to end over several steps, raises acceptance under rejection "
        "sampling and removes most of its dependence on entropy.",
    ),
    Claim(
        name="C4",
        text="Drift of the policy's weights contributes almost nothing, so one adaptation before RL is enough.",
    ),
    Claim(
        name="C5",
        text="End-to-end asynchronous RL up to 1.8 times as fast (rollouts 2.4 times), about 10 % relative gain "
        "in acceptance, up to 25 % more throughput.",
        beyond_reach=(
            "The sizes 1.8 (end-to-end RL) and 2.4 (rollouts) are those of large models on GPUs, where a pass over a "
            "few tokens costs hardly more than a pass over one.",
        ),
    ),
)
OTHERS = {"Fig 14b": "Further findings of the paper", "beyond": "Beyond the paper"}

INTRODUCTION = """# Results

What the recipes found about the claims of the paper, on the built-in model (12 layers, vocabulary 512), and what it
takes to find it again:

    make reproduce                                  # everything, one recipe after another, then this page
    python -m recipes.reproduce --only objectives   # one recipe, then this page
    python -m recipes.reproduce --rebuild           # this page alone

Each recipe's README states what would count as confirmed and as refuted; it was written before the run. Numbers in
brackets are 95 % intervals, as a rule over three seeds. The verdict on a claim follows from all of its findings:

- *confirmed*: every finding is; *refuted*: at least one is refuted and none confirmed;
- *refuted in part*: some are confirmed, some refuted; *confirmed in part*: some are confirmed, the rest is undecided
  or not testable here;
- *undecided*: none is confirmed or refuted; *not testable here*: nothing of it can be tested on this machine.
"""


def overall(verdicts: Sequence[str]) -> str:
    """The verdict on a claim from those on its parts: it claims all of them."""
    found = set(verdicts)
    if not found - {UNTESTABLE}:
        return UNTESTABLE
    if found == {"confirmed"}:
        return "confirmed"
    if "refuted" in found:
        return "refuted in part" if "confirmed" in found else "refuted"
    return "confirmed in part" if "confirmed" in found else "undecided"


def read(path: Path) -> Content | None:
    """The results of a recipe; None where there are none yet."""
    content: Content | None = json.loads(path.read_text()) if path.is_file() else None
    return content


def page(contents: Mapping[str, Content | None]) -> str:
    """``RESULTS.md`` from the results of each recipe."""
    missing = [name for name, content in contents.items() if content is None]
    lines = [INTRODUCTION]
    if missing:
        commands = ", ".join(f"`python -m recipes.{name}`" for name in missing)
        lines.append(f"**Results are missing** of {commands}: what they say about a claim is not in its verdict yet.\n")
    lines += ["## Claims of the paper", "", table([_summary(claim, contents) for claim in CLAIMS])]
    for claim in CLAIMS:
        lines += [f"### {claim.name}: {_verdict(claim, contents)}", "", claim.text, ""]
        lines += [_line(recipe, f) for recipe, f in of(claim.name, contents)]
        lines += [f"- **{UNTESTABLE}**: {part}" for part in claim.beyond_reach]
        lines.append("")
    for name, title in OTHERS.items():
        lines += [f"## {title}", "", *(_line(recipe, f) for recipe, f in of(name, contents)), ""]
    lines += ["## Runs", "", table([_run(name, content) for name, content in contents.items()])]
    return "\n".join(lines)


def of(claim: str, contents: Mapping[str, Content | None]) -> list[tuple[str, Finding]]:
    """All findings about a claim, with the recipe of each; what fits no heading counts as beyond the paper."""
    known = {*OTHERS, *(c.name for c in CLAIMS)}
    return [(recipe, f) for recipe, f in _all(contents) if (f.claim if f.claim in known else "beyond") == claim]


def _all(contents: Mapping[str, Content | None]) -> Iterator[tuple[str, Finding]]:
    for recipe, content in contents.items():
        for finding in (content or {}).get("findings", ()):
            yield recipe, Finding(**finding)


def _verdict(claim: Claim, contents: Mapping[str, Content | None]) -> str:
    """As ``overall``, or that its recipes have not run."""
    findings = [f.verdict for _, f in of(claim.name, contents)]
    if not findings and None in contents.values():
        return "no results yet"
    found = overall([*findings, *(UNTESTABLE for _ in claim.beyond_reach)])
    return f"{found}, so far" if None in contents.values() else found


def _summary(claim: Claim, contents: Mapping[str, Content | None]) -> dict[str, Any]:
    """A line of the first table: the number is that of the claim's first finding."""
    found = of(claim.name, contents)
    verdicts = [f.verdict for _, f in found] + [UNTESTABLE for _ in claim.beyond_reach]
    counts = ", ".join(f"{verdicts.count(v)} {v}" for v in dict.fromkeys(sorted(verdicts)))
    return {
        "claim": f"**{claim.name}** {claim.text}",
        "verdict": f"**{_verdict(claim, contents)}**",
        "findings": counts,
        "first number": found[0][1].evidence if found else "",
        "recipes": ", ".join(_link(recipe) for recipe in dict.fromkeys(recipe for recipe, _ in found)),
    }


def _line(recipe: str, finding: Finding) -> str:
    return f"- **{finding.verdict}**: {finding.statement} {finding.evidence} ({_link(recipe)}; {finding.rule})"


def _link(recipe: str) -> str:
    return f"[{recipe}](recipes/{recipe}/results.md)"


def _run(recipe: str, content: Content | None) -> dict[str, Any]:
    """Where and when a recipe ran."""
    readme = f"[{recipe}](recipes/{recipe}/README.md)"
    if content is None:
        return {"recipe": readme, "device": "no results yet"}
    place = content["place"]
    return {
        "recipe": readme,
        "device": place["device"],
        "minutes": round(content["seconds"] / 60, 1),
        "of processor time": round(content.get("processor_seconds", 0) / 60, 1) or None,
        "torch": place["torch"],
        "commit": place["commit"],
    }
