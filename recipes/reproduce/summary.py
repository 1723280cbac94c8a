"""From the results of all studies to one page: each claim of a paper with its verdict and all findings behind it."""

from collections.abc import Mapping, Sequence
from typing import Any

from bebop.bench.record import table
from recipes.reproduce.claims import BUILT_IN, MODELS, PAPERS, REAL, REAL_STUDIES, RECIPES, Claim, Paper, model_of
from recipes.reproduce.deciding import DecidingNumber
from recipes.reproduce.pages import page_of, sentence
from recipes.reproduce.record import Content
from recipes.reproduce.results import NONE_YET, UNTESTED, Judged, Results, gathered, post_hoc
from recipes.reproduce.scope import ours

INTRODUCTION = """# Results

What the recipes found about the claims of the papers, and what it takes to find it again. Two models were looked at:
SmolLM2-135M-Instruct (30 layers, vocabulary 49,152), whose verdicts stand first wherever its studies have results, and
the built-in model (12 layers, vocabulary 512), whose studies take hours instead of days.

    make reproduce                                  # every recipe on the built-in model, then this page
    python -m recipes.reproduce --only real         # everything on SmolLM2, from the corpus on, then this page
    python -m recipes.reproduce --only objectives   # one recipe, then this page
    python -m recipes.reproduce --rebuild           # this page alone, from what is stored
    python -m recipes.reproduce --html DIR          # a page for each claim, with its figures, in DIR

Numbers in brackets are 95 % intervals: Student's t over three seeds, or a bootstrap over answers; on SmolLM2 over seeds
and prompts together ([effects](recipes/reproduce/real/effects.py)). Verdicts:

- *confirmed*, *refuted*: the numbers tell, after all corrections; *undecided*: they do not;
- *not tested*: the arms were not what the claim is about (runs of rising entropy whose entropy fell, a converged head
  that had not converged, a regime that is not the paper's), or no recipe here can test it.

**Whose bar it is.** A finding counts for a claim of a paper only if the paper makes that claim and makes it there.
Findings whose bar is ours stand below the claim under *bars of ours*, corrected apart. Which these are, and which lie
outside the paper's regime, was decided after the runs, by one table for both models
([scope](recipes/reproduce/scope.py)); it takes findings away from a claim and confirms none.

p is two-sided, from the stored intervals: an interval of Student's t has a half width of its quantile times the
standard error, a bootstrap is taken for normal, and where only rounded text is left, the rounding counts against the
finding. A finding that says several things at once has the p of the weakest. Arms that are compared must differ by more
than their *noise*: how far two runs of one arm that differ by their seed alone lie apart (root mean square, of the
noisier arm, taken from its spread over seeds). *Effect* is the number that a verdict hangs on, *x noise* how many times
the noise it lies from the bound that it is held against. With three seeds and so many findings much stays undecided
that a single interval would have called confirmed.

**What is corrected together.** The p of all findings that were tested of one claim on one model are corrected by Holm's
method (level 0.05 for the claim on that model), whichever studies they come from; so are those under one further
heading, such as all that goes beyond a paper. The two models are corrected apart: each rule speaks of one of them, and
no verdict on the one may depend on whether the other was studied. Studies of one claim are *not* corrected apart, so a
verdict may change while studies of its claim are still to come.

The verdict on a claim follows from all of its findings on that model: *confirmed* if every one is; *refuted* if one is
and none is confirmed; *refuted in part* if some are confirmed and some refuted; *confirmed in part* if some are
confirmed and the rest is undecided or not tested; *undecided* if none is confirmed or refuted; *not tested* if nothing
of it was.
"""
REJUDGED = """**Re-judged.** The correction, the noise and the checks of the arms came after the runs, so the verdicts
here are post hoc: made by rules that are younger than the numbers. What the rules of the run had said stands behind
each finding and, whole, under `judgements` in each `results.json`. This holds for {names}.
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
        lines.append(table([_summary(claim, results, models) for claim in paper.claims]))
        for claim in paper.claims:
            lines += [f"### {claim.name}: {headline(claim, results, models)}", "", claim.text, "", *_settings(claim)]
            for model in models:
                verdict = results.verdict(model, claim)
                lines += _block(results.of(model, claim.name), f"{MODELS[model]}: {verdict}" if models[1:] else "")
            for model in models:
                lines += _block(results.of(model, ours(claim.name)), f"bars of ours, on {called(model)}")
            lines += [f"- **{UNTESTED}**: {part}" for part in claim.beyond_reach]
            lines += [""] if claim.beyond_reach else []
        lines += _others(paper, results, models)
    lines += ["## Runs", "", table([_run(name, one) for name, one in contents.items() if one or name in RECIPES])]
    lines += _gaps(contents)
    return "\n".join(lines)


def _settings(claim: Claim) -> list[str]:
    """Where the paper makes a claim, where it was looked at here, and what would decide it."""
    told = (("The paper", claim.paper), ("Here", claim.here), ("What would decide it", claim.decides))
    return [*(f"- *{name}*: {text}" for name, text in told if text), *([""] if claim.paper else [])]


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


def _summary(claim: Claim, results: Results, models: Sequence[str]) -> dict[str, Any]:
    """A line of the first table: for each model verdict, counts, and evidence of the first finding that was tested."""
    cells, studies = {}, dict[str, None]()
    for model in models:
        found = results.of(model, claim.name)
        tested = [one.finding.evidence for one in found if one.finding.untested is None]
        verdict = f"**{results.verdict(model, claim)}**"
        counted = results.counts(model, claim)
        told = [f"{verdict} ({counted})" if counted else verdict, *tested[:1]]
        cells[MODELS[model]] = clean(". ".join(told))
        studies |= dict.fromkeys(one.study for one in found)
    return {"claim": f"**{claim.name}** {clean(claim.text)}", **cells, "recipes": ", ".join(map(_link, studies))}


def _others(paper: Paper, results: Results, models: Sequence[str]) -> list[str]:
    """What is no claim of the paper, under its headings."""
    lines = []
    for key, title in paper.others.items():
        if any(results.of(model, key) for model in models):
            lines += [f"### {title}", ""]
            for model in models:
                lines += _block(results.of(model, key), MODELS[model] if models[1:] else "")
    return lines


def _block(found: Sequence[Judged], title: str) -> list[str]:
    """The findings of a claim on one model."""
    if not found:
        return [f"**{title}**", ""] if title.endswith((NONE_YET, UNTESTED)) else []
    return [*([f"**{title[0].upper()}{title[1:]}**", ""] if title else []), table([_row(one) for one in found])]


def _row(one: Judged) -> dict[str, str]:
    finding = one.finding
    rule = [_link(one.study), finding.rule, *([f"at the run: {one.before}"] if one.before else [])]
    rule += [one.scope.why] if one.scope is not None and one.scope.kind != "outside" else []
    return {
        "verdict": f"**{one.verdict}**",
        "finding": clean(finding.statement),
        "effect": str(one.effect.number) if one.effect else "",
        "x noise": times_noise(one.effect),
        "p": f"{finding.p:.2g}" if one.p is not None else "",
        "corrected": f"{one.p:.2g}" if one.p is not None else "",
        "evidence and rule": clean(f"{sentence(finding, stated=True)} ({'; '.join(rule)})".strip()),
    }


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
