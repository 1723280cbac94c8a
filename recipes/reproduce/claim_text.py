"""Texts about a claim for tables in documents, made from stored results; ``recipes.docs`` fills them in."""

from collections.abc import Mapping
from pathlib import Path

from bebop.errors import UserError
from recipes.reproduce.claims import MODELS, PAPERS, REAL_STUDIES, RECIPES, Claim, Paper
from recipes.reproduce.pages import within
from recipes.reproduce.record import Content, read
from recipes.reproduce.results import Results, gathered
from recipes.reproduce.summary import called

FORMS = ("verdict", "counts")


def stored(studies: Path) -> Results:
    """Return all findings of the studies in a folder."""
    contents: Mapping[str, Content | None] = {
        name: read(within(studies, name) / "results.json") for name in (*REAL_STUDIES, *RECIPES)
    }
    return gathered(contents)


def claim_text(path: str, form: str | None, results: Results) -> str:
    """Return the text of a cell.

    Args:
        path: ``claim > C3``: all models in one line. ``claim > C3 > SmolLM2``: that model, see ``form``.
        form: ``verdict`` (the default), or ``counts``: the verdict and the number of findings per verdict.
        results: All findings of the studies.

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
    if form not in (None, *FORMS):
        raise UserError(f"{path!r}: {form!r} is no form among {', '.join(FORMS)}")
    verdict, counts = results.verdict(rest[0], claim), results.counts(rest[0], claim)
    return f"{verdict} ({counts})" if counts and form == "counts" else verdict


def _claim(path: str, name: str) -> tuple[Paper, Claim]:
    for paper in PAPERS:
        for claim in paper.claims:
            if claim.name == name:
                return paper, claim
    raise UserError(f"{path!r}: no claim {name!r}; those of Bebop are {', '.join(c.name for c in PAPERS[0].claims)}")


def _in_short(model: str, claim: Claim, results: Results) -> str:
    """Return the verdict on one model: confirmed in part on the built-in model (6 confirmed, 2 not tested)."""
    verdict, counts = results.verdict(model, claim), results.counts(model, claim)
    counted = f" ({counts})" if counts else ""
    return f"{verdict} on {called(model)}{counted}"
