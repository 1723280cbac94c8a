"""HTML pages with verdicts, findings, rules, tables and figures: one per claim, one per study, and an index.

Each page is one HTML file that loads nothing. Figures are those of the runs, as they are stored beside the results.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from bebop.command import check_writable, writing
from bebop.report.document import Card, document, opened, table
from recipes.reproduce.claims import MODELS, PAPERS, Claim, Paper, model_of
from recipes.reproduce.deciding import DecidingNumber
from recipes.reproduce.pages import SAYS, cell, sentence
from recipes.reproduce.record import Content
from recipes.reproduce.results import UNTESTED, Judged, Results, gathered, post_hoc
from recipes.reproduce.summary import called, headline, times_noise

INDEX = "index.html"
KICKER = "Bebop · claims and verdicts"
COLORS = {"confirmed": "#2563a8", "refuted": "#c2410c", "undecided": "#7b8794", UNTESTED: "#7b8794"}
HEADS = ("verdict", "finding", "effect", "around its bound", "x noise", "p corrected", "study")
READING = (
    "Effect: the number that the verdict hangs on, with its 95 % interval. Around its bound: the interval (line) and "
    "the value (dot), the bound that it is held against (upright line), and the noise on either side of it (grey): "
    "how far two runs of one arm lie apart; an effect has to clear it. Each row has a scale of its own. p: Holm's "
    "method over all findings of this claim on this model."
)
WIDTH, HEIGHT = 150, 18


def write_pages(contents: Mapping[str, Content | None], folders: Mapping[str, Path], out: Path) -> Path:
    """Write ``index.html`` and a page for each claim and each study into ``out``; return the path of the index.

    Args:
        contents: Results of each study, None where there are none.
        folders: Folder of each study, which holds its figures.
        out: Output folder; it is created if it does not exist.

    Raises:
        UserError: ``out`` cannot be written.
    """
    check_writable("--html", out)
    for file, text in rendered(contents, folders).items():
        with writing(out / file):
            out.mkdir(parents=True, exist_ok=True)
            (out / file).write_text(text, encoding="utf-8")
    return out / INDEX


def rendered(contents: Mapping[str, Content | None], folders: Mapping[str, Path]) -> dict[str, str]:
    """Return the HTML text of every page by file name."""
    results = gathered(contents)
    made = {INDEX: index(results)}
    for paper in PAPERS:
        for claim in paper.claims:
            made[file_of(claim)] = claim_page(paper, claim, results, folders)
    for study, content in contents.items():
        if content is not None:
            made[study_file(study)] = own_page(study, content, results, folders[study])
    return made


def file_of(claim: Claim) -> str:
    """Return the file name of a claim's page: C3.html, PAD-1.html."""
    return re.sub(r"\W+", "-", claim.name) + ".html"


def study_file(study: str) -> str:
    """Return the file name of a study's page: study-real-rl.html."""
    return re.sub(r"\W+", "-", f"study {study}") + ".html"


def own_page(study: str, content: Content, results: Results, folder: Path) -> str:
    """Return the page of one study: its findings under all claims, its tables and its figures."""
    found = [one for family in results.families.values() for one in family if one.study == study]
    cards = [*_findings(model_of(study), found)]
    for title, rows in content["tables"].items():
        heads = list(dict.fromkeys(head for row in rows for head in row))
        lines = [[str(shown(row.get(head, ""))) for head in heads] for row in rows]
        cards.append(Card(title=title, text="", table=table(heads, lines), wide=True))
    return document(KICKER, study, [*cards, _figures(study, content, folder), _runs([study], results.contents)])


def shown(value: Any) -> Any:
    """Return the text of a cell of a stored table; floats have three decimals."""
    known = cell(value)
    return f"{known:.3f}" if isinstance(known, float) else known


def index(results: Results) -> str:
    """Return the index page: all claims with their verdicts, each with a link to its page."""
    cards = []
    for paper in PAPERS:
        models = results.models(paper)
        rows = [
            [_linked(claim), escape(claim.text), *(escape(results.verdict(model, claim)) for model in models)]
            for claim in paper.claims
        ]
        heads = ["claim", "", *(MODELS[model] for model in models)]
        cards.append(Card(title=paper.title, text="", table=_table(heads, rows), wide=True))
    cards.append(_runs([study for study, content in results.contents.items() if content], results.contents))
    cards.append(Card(title="What was not recorded", text="", notes=_gaps(results.contents), wide=True))
    return document(KICKER, "Claims of the papers", cards)


def claim_page(paper: Paper, claim: Claim, results: Results, folders: Mapping[str, Path]) -> str:
    """Return the page of one claim."""
    models = results.models(paper)
    verdicts = [(MODELS[model], results.verdict(model, claim), results.counts(model, claim)) for model in models]
    beyond = [f"{UNTESTED}: {part}" for part in claim.beyond_reach]
    cards = [Card(title=f"{paper.title}, {claim.name}", text=claim.text, notes=beyond, wide=True)]
    studies = dict[str, None]()
    for model in models:
        found = results.of(model, claim.name)
        studies |= dict.fromkeys(one.study for one in found)
        cards += _findings(model, found)
    cards += [_figures(study, results.contents[study], folders[study]) for study in studies]
    cards += [_runs(list(studies), results.contents)] if studies else []
    return document(KICKER, f"{claim.name}: {headline(claim, results, models)}", cards, opened(verdicts))


def _findings(model: str, found: Sequence[Judged]) -> list[Card]:
    """Return two cards: the verdicts with their effects, and the evidence and rule behind each."""
    if not found:
        return []
    verdicts = [_row(one) for one in found]
    rests = [
        [escape(one.finding.statement), escape(sentence(one.finding, stated=True)), escape(_rule(one))] for one in found
    ]
    return [
        Card(title=f"Findings on {MODELS[model]}", text=READING, table=_table(HEADS, verdicts), wide=True),
        Card(
            title=f"Evidence and rules, {called(model)}",
            text="",
            table=_table(("finding", "evidence", "rule"), rests),
            wide=True,
        ),
    ]


def _row(one: Judged) -> list[str]:
    color = COLORS[one.verdict]
    return [
        f"<span style='color:{color}'>{escape(one.verdict)}</span>",
        escape(one.finding.statement),
        escape(str(one.effect.number)) if one.effect else "",
        interval(one.effect, color) if one.effect else "",
        times_noise(one.effect),
        "" if one.p is None else f"{one.p:.2g}",
        escape(one.study),
    ]


def _rule(one: Judged) -> str:
    bar = f"; {SAYS[one.scope.kind].lower()}: {one.scope.why}" if one.scope and one.scope.kind in SAYS else ""
    return one.finding.rule + (f" (at the run: {one.before})" if one.before else "") + bar


def interval(effect: DecidingNumber, color: str) -> str:
    """Return an SVG drawing of an effect and its interval around the bound; each drawing has its own scale."""
    number, noise = effect.number, effect.noise or 0.0
    ends = [number.low - effect.bound, number.high - effect.bound, number.value - effect.bound, noise]
    widest = max(abs(end) for end in ends) or 1.0

    def x(value: float) -> str:
        return f"{WIDTH / 2 * (1 + 0.95 * (value - effect.bound) / widest):.1f}"

    low, high, at, middle = x(number.low), x(number.high), x(number.value), HEIGHT / 2
    left, right = float(x(effect.bound - noise)), float(x(effect.bound + noise))
    told = escape(f"{effect.name}: {number}, bound {effect.bound:g}", quote=True)
    return (
        f"<svg width='{WIDTH}' height='{HEIGHT}' role='img' aria-label='{told}'>"
        f"<rect x='{left:.1f}' y='0' width='{right - left:.1f}' height='{HEIGHT}' fill='#e1e5ea'/>"
        f"<line x1='{WIDTH / 2}' x2='{WIDTH / 2}' y1='0' y2='{HEIGHT}' stroke='#1f2933'/>"
        f"<line x1='{low}' x2='{high}' y1='{middle}' y2='{middle}' stroke='{color}' stroke-width='2'/>"
        f"<circle cx='{at}' cy='{middle}' r='3.5' fill='{color}'/></svg>"
    )


def _figures(study: str, content: Content | None, folder: Path) -> Card:
    """Return a card with a study's figures embedded in the page."""
    drawn = "".join(
        f"<figure><img style='max-width:100%' alt='{escape(figure['caption'], quote=True)}' "
        f"src='data:image/svg+xml;base64,{base64.b64encode((folder / 'figures' / file).read_bytes()).decode()}'>"
        f"<figcaption>{escape(figure['caption'])}</figcaption></figure>"
        for file, figure in (content or {})["figures"].items()
    )
    return Card(title=f"Figures of {study}", text="" if drawn else "This study has none.", table=drawn, wide=True)


def _runs(studies: Sequence[str], contents: Mapping[str, Content | None]) -> Card:
    """Return a card with the run behind each study's numbers: file, device, minutes, commit and rule."""
    rows = []
    for study in studies:
        content = contents[study]
        assert content is not None
        place, newest = content["place"], content["judgements"][-1]
        late = ", younger than the run" if post_hoc(content) else ""
        rule = f"{newest['rule']['hash']}{late}"
        file = f"recipes/reproduce/{study.replace('.', '/')}/results.json"
        minutes = f"{content['seconds'] / 60:.0f}"
        told = (file, str(place["device"]), minutes, place["commit"][:7], rule)
        rows.append([_leads(study), called(model_of(study)), *map(escape, told)])
    heads = ("study", "model", "every number", "device", "minutes", "commit", "rule")
    return Card(title="Runs", text="", table=_table(heads, rows), wide=True)


def _gaps(contents: Mapping[str, Content | None]) -> list[str]:
    """Return what a run did not record or a page cannot show: each gap once, with the studies that have it."""
    gaps: dict[str, list[str]] = {}
    for study, content in contents.items():
        for gap in (content or {}).get("missing", ()):
            gaps.setdefault(gap, []).append(study)
    return [f"{', '.join(studies)}: {gap}" for gap, studies in gaps.items()]


def _leads(study: str) -> str:
    return f"<a href='{study_file(study)}'>{escape(study)}</a>"


def _linked(claim: Claim) -> str:
    return f"<a href='{file_of(claim)}'>{escape(claim.name)}</a>"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table like ``document.table``, from cells that are already HTML."""
    top = "".join(f"<th scope='col'>{escape(head)}</th>" for head in heads)
    body = "".join(
        f"<tr><th scope='row'>{first}</th>"
        + "".join(f"<td data-head='{escape(h)}'>{cell}</td>" for h, cell in zip(heads[1:], rest, strict=True))
        + "</tr>"
        for first, *rest in rows
    )
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
