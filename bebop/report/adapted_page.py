"""The page of an adaptation: before and after as a table, figures with intervals, and what is seen in them."""

from pathlib import Path

from bebop.adaptation.results import Results
from bebop.config_adapt import AdaptConfig
from bebop.report import made
from bebop.report.adapted import boundary_card, entropy_card, length_card, place_card, position_card, training_cards
from bebop.report.adapted_table import drafts, rows
from bebop.report.document import Card, document, table
from bebop.report.model_card import data_text, model_name
from bebop.report.runs import Run, origin
from bebop.sinks import read_jsonl

HEADS = ("Number", "Before", "After", "Change")


def write_page(folder: Path, config: AdaptConfig, results: Results) -> None:
    """Write ``report.html`` from the results and from the ``metrics.jsonl`` in the same folder."""
    (folder / "report.html").write_text(render(folder, config, results), encoding="utf-8")


def render(folder: Path, config: AdaptConfig, results: Results) -> str:
    """The whole page as HTML."""
    cards = [
        _summary(config, results),
        length_card(results),
        position_card(results),
        *training_cards(config, results, read_jsonl(folder / "metrics.jsonl")),
        entropy_card(results),
        boundary_card(results),
        place_card(results),
        *made.cards([Run(name=model_name(config), steps=[], columns={}, **origin(folder))]),
    ]
    return document("Bebop · adaptation of an MTP head", f"{model_name(config)}, {config.head.objective}", cards)


def _summary(config: AdaptConfig, results: Results) -> Card:
    """The table, and what was done."""
    lines = [(f"{r.system}: {r.label}", str(r.before), str(r.after), str(r.change)) for r in rows(results)]
    minutes = sum(results.seconds.values()) / 60
    text = (
        f"{results.steps} steps of {config.head.objective} over {config.head.depth} recursive steps on "
        f"{data_text(config, results)}; {minutes:.1f} minutes in all. Measured by decoding "
        f"{results.held_out()} with {drafts(results)} drafts a cycle; in "
        "brackets 95 % bootstrap intervals over answers, those of the change prompt by prompt. Overlap estimates the "
        "same acceptance as the counts above it, with less noise."
    )
    return Card(title="Before and after", text=text, table=table(HEADS, lines), wide=True)
