"""From the results of all studies to one page: each claim of a paper with its verdict and all findings behind it."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from bebop.bench.record import table
from recipes.reproduce.claims import BUILT_IN, MODELS, PAPERS, REAL, REAL_STUDIES, RECIPES, Claim, model_of
from recipes.reproduce.deciding import DecidingNumber
from recipes.reproduce.pages import page_of
from recipes.reproduce.record import Content
from recipes.reproduce.results import UNTESTED, Judged, Results, gathered, post_hoc
from recipes.reproduce.scope import ours

INTRODUCTION = """# Results

What the recipes found about the claims of the papers. Two models were looked at: SmolLM2-135M-Instruct (30 layers,
vocabulary 49,152), whose verdicts stand first wherever its studies have results, and the built-in model (12 layers,
vocabulary 512), whose studies take hours instead of days. A table per paper has its claims; the findings behind a claim
are folded below it. Evidence, rule, corrected p and figures of every finding are on the pages of claims and studies,
which the third of these commands writes:

    make reproduce                                  # every recipe on the built-in model, then this page
    python -m recipes.reproduce --only real         # everything on SmolLM2, then this page; --only NAME: one recipe
    python -m recipes.reproduce --html DIR          # the pages of all claims and studies, from what is stored
    python -m recipes.reproduce --rebuild           # this page, from what is stored

Brackets are 95 % intervals over three seeds or over completions, on SmolLM2 over seeds and prompts together.
*Confirmed* and *refuted*: the numbers tell, after all corrections. *Undecided*: they do not. *Not tested*: the arms
were not what the claim is about, or no recipe here can test it. A claim is *confirmed* if every finding is, *confirmed
in part* if some are and none is refuted, *refuted in part* if some are confirmed and some refuted, *refuted* if some
are and none is confirmed.

**What is corrected together.** The p of all findings that were tested of one claim on one model are corrected by Holm's
method at 5 %, whichever studies they come from, the two models apart; so are the findings under one further heading. A
verdict may change while studies of its claim are still to come (*so far*).

**Whose bar it is.** A finding counts for a claim only if the paper makes that claim, and makes it there. Findings whose
bar is ours are listed as such, corrected apart. Which these are was decided after the runs, by one table for both
models ([scope](recipes/reproduce/scope.py)); it takes findings away from a claim and confirms none.
"""
REJUDGED = """**Re-judged.** The correction, the noise and the checks of the arms came after the runs of {names}: their
verdicts are made by rules that are younger than the numbers. Both judgements are in each `results.json`.
"""


def page(contents: Mapping[str, Content | None]) -> str:
    """``RESULTS.md`` from the results of each recipe."""
    results = gathered(contents)
    lines = [INTRODUCTION]
    if late := [name for name, content in contents.items() if content and post_hoc(content)]:
        lines.append(REJUDGED.format(names=", ".join(late)))
    lines += _missing(contents)
    for paper in PAPERS:
        models = results.models(paper)
        lines += [f"## {paper.title}", "", *([paper.reference + ".", ""] if paper.reference else [])]
        lines.append(table([_claim(claim, results, models) for claim in paper.claims]))
        for claim in paper.claims:
            keys = {claim.name: "", ours(claim.name): "bars of ours, "}
            blocks = [
                _block(results.of(model, key), whose + called(model)) for key, whose in keys.items() for model in models
            ]
            blocks += [f"- *{UNTESTED}*: {part}\n" for part in claim.beyond_reach]
            lines += _folded(f"{claim.name}: {headline(claim, results, models)}", blocks)
        for key, title in paper.others.items():
            lines += _folded(title, [_block(results.of(model, key), called(model)) for model in models])
    lines += ["## Runs", "", table([_run(name, one) for name, one in contents.items() if one or name in RECIPES])]
    lines += _gaps(contents)
    return "\n".join(lines)


def _folded(title: str, blocks: Sequence[str]) -> list[str]:
    """Blocks of text that a reader opens; nothing where all are empty."""
    told = [block for block in blocks if block]
    return [f"<details><summary>{title}</summary>", "", *told, "</details>", ""] if told else []


def headline(claim: Claim, results: Results, models: Sequence[str]) -> str:
    """The verdicts on a claim in one line, the real model's first: refuted on SmolLM2, confirmed on the built-in model.

    With the built-in model alone its verdict by itself.
    """
    words = [results.verdict(model, claim) for model in models]
    if not models[1:]:
        return words[0]
    return ", ".join(f"{word} on {called(model)}" for word, model in zip(words, models, strict=True))


def called(model: str) -> str:
    """A model as a short line calls it."""
    return model if model == REAL else MODELS[model]


def _missing(contents: Mapping[str, Content | None]) -> list[str]:
    """What has no results: a paragraph for what ought to have some, a line for what takes days."""
    absent = [study for study, content in contents.items() if content is None]
    lines = []
    if here := [study for study in absent if model_of(study) == BUILT_IN]:
        commands = ", ".join(f"`python -m recipes.reproduce.{study}`" for study in here)
        lines.append(f"**Results are missing** of {commands}: what they say about a claim is not in its verdict yet.\n")
    if long := [study for study in absent if model_of(study) != BUILT_IN]:
        known = "further " if any(contents.get(study) for study in REAL_STUDIES) else ""
        lines.append(f"No {known}results of {MODELS[REAL]} yet: {', '.join(long)}.\n")
    return lines


def _claim(claim: Claim, results: Results, models: Sequence[str]) -> dict[str, str]:
    """A line of a paper's table: where the paper makes the claim, where we looked, what was found, what is open."""
    verdicts = []
    for model in models:
        found = results.of(model, claim.name)
        counted = results.counts(model, claim)
        told = f"{called(model)}: **{results.verdict(model, claim)}**" + (f" ({counted})" if counted else "")
        number = next((_number(one) for one in found if one.finding.untested is None), "")
        verdicts.append(f"{told}. {number}".strip())
    return {
        "claim": f"**{claim.name}** {clean(claim.text)}",
        "the paper": clean(claim.paper),
        "here": clean(claim.here),
        "verdict and first number": clean("<br>".join(verdicts)),
        "what would decide it": clean(claim.decides),
    }


def _number(one: Judged) -> str:
    """The beginning of the evidence of a finding, up to its first number with an interval."""
    found = re.match(r".*?\](?:[^,;:.()]|\.\d)*", one.finding.evidence)
    return f"{found[0].strip()} ({_link(one.study)})" if found else _link(one.study)


def _block(found: Sequence[Judged], title: str) -> str:
    """The findings of a claim on one model, by verdict and study, each with the number that decided it."""
    lines: dict[tuple[str, str], list[str]] = {}
    for one in found:
        statement = one.finding.statement.removeprefix(f"On {REAL}, ").rstrip(".")
        effect = f": {one.effect.number}" if one.effect and one.finding.untested is None else ""
        why = f" ({one.finding.untested})" if one.finding.untested else ""
        before = f" (at the run: {one.before})" if one.before and one.before != one.verdict else ""
        line = f"  - {statement[0].upper()}{statement[1:]}{effect}{why}{before}"
        lines.setdefault((one.verdict, one.study), []).append(line)
    told = [line for (verdict, study), those in lines.items() for line in (f"- *{verdict}*, {study}", *those)]
    return "\n".join([f"{title[0].upper()}{title[1:]}", "", *told, ""]) if told else ""


def times_noise(effect: DecidingNumber | None) -> str:
    """How far an effect lies from its bound in units of the noise; empty where no arms are compared."""
    size = effect.size if effect else None
    return "" if size is None else f"{size:.1f}"


def clean(text: str) -> str:
    """Text as a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _link(recipe: str) -> str:
    return f"[{recipe}]({page_of(recipe)})"


def _run(recipe: str, content: Content | None) -> dict[str, Any]:
    """Where and when a recipe ran, and by which rules it was judged."""
    readme = f"[{recipe}](recipes/reproduce/{recipe.replace('.', '/')}/README.md)"
    if content is None:
        return {"recipe": readme, "device": "no results yet"}
    place, (first, *later) = content["place"], content["judgements"]
    late = [one for one in later if "translated" not in one]
    rule = f"`{later[-1]['rule']['hash']}`" if later else "the same"
    return {
        "recipe": readme,
        "device": place["device"],
        "minutes": round(content["seconds"] / 60, 1),
        "of processor time": round(content["processor_seconds"] / 60, 1),
        "torch": place["torch"],
        "commit": place["commit"][:7] + (" (dirty)" if place.get("dirty") else ""),
        "rule at the run": f"`{first['rule']['hash']}`" + (" (derived)" if first["rule"]["derived"] else ""),
        "rule of the verdicts": rule + (", post hoc" if late else "") + (", translated" if later[len(late) :] else ""),
    }


def _gaps(contents: Mapping[str, Content | None]) -> list[str]:
    """What was not recorded at the runs, each gap once with the recipes that have it."""
    gaps: dict[str, list[str]] = {}
    for name, content in contents.items():
        for gap in (content or {}).get("missing", ()):
            gaps.setdefault(gap, []).append(name)
    lines = [f"- {', '.join(names)}: {gap}" for gap, names in gaps.items()]
    return ["What was not recorded, or cannot be shown:", "", *lines, ""] if lines else []
