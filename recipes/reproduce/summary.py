"""``RESULTS.md``, made from the results of all studies: the verdict on each claim and the findings behind it."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import takewhile

from bebop.bench.record import table
from recipes.reproduce.claims import BUILT_IN, MODELS, PAPERS, REAL, REAL_STUDIES, Claim, model_of
from recipes.reproduce.deciding import DecidingNumber
from recipes.reproduce.record import Content
from recipes.reproduce.results import NONE_YET, UNTESTED, Judged, Results, gathered, post_hoc
from recipes.reproduce.scope import ours

INTRODUCTION = """# Results

What the recipes found about the papers' claims, on SmolLM2-135M-Instruct and the built-in model. Findings are folded
below each paper's table. The second command writes pages with evidence, rules, corrected p, tables, figures and runs.

    python -m recipes.reproduce --rebuild      # this page, from what is stored; --only NAME: one recipe
    python -m recipes.reproduce --html DIR     # the pages of all claims and studies

Brackets are 95 % intervals over three seeds or completions, on SmolLM2 over seeds and prompts. *Confirmed* and
*refuted*: the numbers tell, after corrections. *Undecided*: they do not. *Not tested*: no recipe here can test it, or
its arms were not what the claim is about. *Confirmed in part*: some findings are confirmed, none refuted; *refuted in
part*: some of both. The p of all tested findings of a claim on one model are corrected by Holm's method at 5 %. A
verdict may change while studies of its claim are to come (*so far*). Findings by bars of ours count for no claim;
[one table](recipes/reproduce/scope.py), made after the runs, names them.
"""
REJUDGED = """*Judged again* by rules that are younger than the numbers: {names}. Both judgements are in `results.json`.
"""


def page(contents: Mapping[str, Content | None]) -> str:
    """Return the text of ``RESULTS.md``, made from the results of each recipe."""
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
            looked = spoken(claim, results, models)
            titles = [
                called(model) if looked[1:] or model == REAL else "" for model in looked
            ]  # the usual one needs none
            blocks = [_block(results.of(m, claim.name), title) for m, title in zip(looked, titles, strict=True)]
            if told := _told(results, models, ours(claim.name)):
                blocks.append(f"Bars of ours: {told}.\n")
            blocks += [f"- *{UNTESTED}*: {part}\n" for part in claim.beyond_reach]
            lines += _folded(f"{claim.name}: {headline(claim, results, models)}", blocks)
        lines += [f"{title}: {told}.\n" for key, title in paper.others.items() if (told := _told(results, models, key))]
    lines += [f"[{name}]: {readme(name)}" for name, content in contents.items() if content]
    return "\n".join(lines) + "\n"


def readme(study: str) -> str:
    """Return the path of a study's README from the repository root: method and rules."""
    return f"recipes/reproduce/{study.replace('.', '/')}/README.md"


def _told(results: Results, models: Sequence[str], key: str) -> str:
    """Return the number of findings per verdict under a heading, with their studies: 6 confirmed (drift, pad)."""
    words, studies = Counter[str](), dict[str, None]()
    for one in (one for model in models for one in results.of(model, key)):
        words[one.verdict] += 1
        studies[one.study] = None
    counts = ", ".join(f"{count} {word}" for word, count in words.most_common())
    return f"{counts} ({', '.join(map(_link, studies))})" if counts else ""


def _folded(title: str, blocks: Sequence[str]) -> list[str]:
    """Return a foldable section with blocks of text; nothing where all blocks are empty."""
    told = [block for block in blocks if block]
    return [f"<details><summary>{title}</summary>", "", *told, "</details>", ""] if told else []


def headline(claim: Claim, results: Results, models: Sequence[str]) -> str:
    """Return the verdicts on a claim in one line, the real model's first.

    Example: refuted on SmolLM2, confirmed on the built-in model. With one model it is that verdict alone.
    """
    words = [results.verdict(model, claim) for model in models]
    if not models[1:]:
        return words[0]
    return ", ".join(f"{word} on {called(model)}" for word, model in zip(words, models, strict=True))


def spoken(claim: Claim, results: Results, models: Sequence[str]) -> list[str]:
    """Return the models on which a finding speaks of a claim, or may yet, and always the last one."""
    return [m for m in models if results.of(m, claim.name) or results.verdict(m, claim) == NONE_YET or m == models[-1]]


def called(model: str) -> str:
    """Return a short name of a model."""
    return model if model == REAL else MODELS[model]


def _missing(contents: Mapping[str, Content | None]) -> list[str]:
    """Return a paragraph on built-in-model studies without results, and a line on such real-model studies."""
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
    """Return a claim's row in its paper's table: the paper's regime, ours, verdicts, and what would decide it."""
    verdicts = []
    for model in spoken(claim, results, models):
        found = results.of(model, claim.name)
        name = "built-in" if model == BUILT_IN else model
        verdict, counted = results.verdict(model, claim), results.counts(model, claim)
        several = counted not in ("", f"1 {verdict}")
        told = f"{name}: **{verdict}**" + (f" ({counted})" if several else "")
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
    """Return the start of a finding's evidence, up to its first number with an interval."""
    found = re.match(r".*?\](?:[^,;:.()]|\.\d)*", one.finding.evidence)
    return f"{found[0].strip()} ({_link(one.study)})" if found else _link(one.study)


def _block(found: Sequence[Judged], title: str) -> str:
    """Return the findings of a claim on one model, by verdict and study, each with the number that decided it.

    Untested findings appear as a count with the reasons, but for those that are only not measured yet.
    """
    lines: dict[tuple[str, str], list[tuple[str, str]]] = {}
    untested: dict[str, list[str]] = {}
    for one in found:
        if one.finding.untested is not None:
            if not one.measured:
                continue
            lines.setdefault((one.verdict, one.study), [])
            untested.setdefault(one.study, []).append(one.finding.untested.partition(": ")[0])  # without its numbers
            continue
        statement = re.sub(rf"^On {REAL} and a ", "on a ", one.finding.statement)
        statement = re.sub(rf"^On {REAL},? (?!and )", "", statement).rstrip(".")
        statement = statement.replace(" (a million tokens, on a CPU)", "")
        effect = f": {one.effect.number}" if one.effect else ""
        before = f" (at the run: {one.before})" if one.before and one.before != one.verdict else ""
        lines.setdefault((one.verdict, one.study), []).append((statement, f"{effect}{before}"))
    told = []
    for (verdict, study), those in lines.items():
        why = untested.get(study, []) if verdict == UNTESTED else []
        told.append(f"- *{verdict}*, {study}" + (f", {len(why)}: {'; '.join(dict.fromkeys(why))}" if why else ""))
        told += _listed(those)
    head = [f"{title[0].upper()}{title[1:]}", ""] if title else []
    return "\n".join([*head, *told, ""]) if told else ""


def _listed(those: Sequence[tuple[str, str]]) -> list[str]:
    """Return lines with statements and their numbers; what neighbours have in common up to a comma stands once."""
    lines, place = [], 0
    while place < len(those):
        run = [those[place][0]]
        while place + len(run) < len(those) and _first_words([*run, those[place + len(run)][0]]):
            run.append(those[place + len(run)][0])
        first = _first_words(run) if len(run) > 1 else ""
        lines += [f"  - {first[0].upper()}{first[1:].rstrip()}"] if first else []
        for statement, number in those[place : place + len(run)]:
            rest = statement.removeprefix(first)
            lines.append(f"    - {rest}{number}" if first else f"  - {rest[0].upper()}{rest[1:]}{number}")
        place += len(run)
    return lines


def _first_words(statements: Sequence[str]) -> str:
    """Return the words up to a comma with which all statements begin."""
    pairs = zip(min(statements), max(statements), strict=False)
    shared = "".join(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return shared[: shared.rfind(", ") + 2] if ", " in shared else ""


def times_noise(effect: DecidingNumber | None) -> str:
    """Return an effect's distance from its bound in units of the noise; empty where no arms are compared."""
    size = effect.size if effect else None
    return "" if size is None else f"{size:.1f}"


def clean(text: str) -> str:
    """Return text escaped for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ")


def _link(study: str) -> str:
    return f"[{study}]"
