"""What a page says of a claim, from what is stored: the words that ``recipes.docs`` fills in."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from bebop.bench.record import table
from bebop.errors import UserError
from recipes.reproduce.claims import MODELS, PAPERS, REAL_STUDIES, RECIPES, Claim, Paper
from recipes.reproduce.pages import within
from recipes.reproduce.record import Content, read
from recipes.reproduce.results import Judged, Results, gathered
from recipes.reproduce.summary import called, clean, readme, times_noise

FORMS = ("verdict", "counts", "told", "table")
TOLD = ("confirmed", "refuted")


def stored(studies: Path) -> Results:
    """All findings of the studies in a folder."""
    contents: Mapping[str, Content | None] = {
        name: read(within(studies, name) / "results.json") for name in (*REAL_STUDIES, *RECIPES)
    }
    return gathered(contents)


def paper_text(path: str, results: Results, up: str = "") -> str:
    """``claims > PAD, BlockPilot``: all claims of papers with verdicts, those of a real model first if it has results.

    Raises:
        UserError: There is no such paper.
    """
    titles = path.partition(" > ")[2].split(", ")
    papers = [paper for paper in PAPERS if paper.title in titles]
    if len(papers) < len(titles):
        unknown = next(title for title in titles if title not in [paper.title for paper in papers])
        raise UserError(f"{path!r}: no paper {unknown!r} among {', '.join(paper.title for paper in PAPERS)}")
    models = [model for model in MODELS if any(model in results.models(paper) for paper in papers)]
    claims = [claim for paper in papers for claim in paper.claims]
    rows = [
        {"claim": f"**{claim.name}** {clean(claim.text)}"}
        | {MODELS[model]: _of_model(path, model, claim, "counts", results, up) for model in models}
        for claim in claims
    ]
    told = "; ".join(_counted([results.verdict(model, claim) for claim in claims], model) for model in models)
    return f"{told}.\n\n{table(rows)}\nEvery finding: [RESULTS.md]({up}RESULTS.md)."


def _counted(words: Sequence[str], model: str) -> str:
    """2 confirmed, 1 undecided on the built-in model."""
    return f"{', '.join(f'{words.count(word)} {word}' for word in sorted(set(words)))} on {called(model)}"


def claim_text(path: str, form: str | None, results: Results, up: str = "") -> str:
    """The text of a mark.

    Args:
        path: ``claim > C3``: all models in one line. ``claim > C3 > SmolLM2``: that model, see ``form``.
        form: ``verdict`` (the default), ``counts``: how many findings came out how, ``table``: all findings, ``told``:
            those that were confirmed or refuted.
        results: What was found.
        up: The way from the page to the root, ``../`` in ``docs``.

    Raises:
        UserError: There is no such claim, model or form.
    """
    _, name, *rest = path.split(" > ")
    paper, claim = _claim(path, name)
    if not rest:
        if form not in (None, "line"):
            raise UserError(f"{path!r}: {form!r} is no form of all models in one; it is line")
        return "; ".join(_in_short(model, claim, results) for model in results.models(paper))
    if rest[1:] or rest[0] not in MODELS:
        raise UserError(f"{path!r}: no model {' > '.join(rest)!r} among {', '.join(MODELS)}")
    return _of_model(path, rest[0], claim, form or FORMS[0], results, up)


def _claim(path: str, name: str) -> tuple[Paper, Claim]:
    for paper in PAPERS:
        for claim in paper.claims:
            if claim.name == name:
                return paper, claim
    raise UserError(f"{path!r}: no claim {name!r}; those of Bebop are {', '.join(c.name for c in PAPERS[0].claims)}")


def _in_short(model: str, claim: Claim, results: Results) -> str:
    """confirmed in part on the built-in model (6 confirmed, 2 not tested)."""
    verdict, counts = results.verdict(model, claim), results.counts(model, claim)
    counted = f" ({counts})" if counts else ""
    return f"{verdict} on {called(model)}{counted}"


def _of_model(path: str, model: str, claim: Claim, form: str, results: Results, up: str) -> str:
    if form not in FORMS:
        raise UserError(f"{path!r}: {form!r} is no form among {', '.join(FORMS)}")
    verdict, counts = results.verdict(model, claim), results.counts(model, claim)
    if form == "verdict":
        return verdict
    full_stop = "." if form in ("told", "table") else ""
    if not counts:
        return f"{verdict}{full_stop}"
    if form == "counts":
        return f"{verdict} ({counts})"
    found = [one for one in results.of(model, claim.name) if form == "table" or one.verdict in TOLD]
    # A line that begins with a comment would be HTML to Markdown, so the table is not the last.
    return (
        f"{verdict}.\n\n{_table(found, up)}\nOf its findings: {counts}."
        if found
        else f"{verdict} ({counts}){full_stop}"
    )


def _table(found: Sequence[Judged], up: str) -> str:
    return table(
        [
            {
                "verdict": f"**{one.verdict}**",
                "finding": clean(one.finding.statement),
                "effect": str(one.effect.number) if one.effect else "",
                "x noise": times_noise(one.effect),
                "p, corrected": "" if one.p is None else f"{one.p:.2g}",
                "evidence": f"[{one.study}]({up}{readme(one.study)})",
            }
            for one in found
        ]
    )
