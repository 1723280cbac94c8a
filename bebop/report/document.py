"""The frame of every page: one HTML file with its plots and plotly.js inside, which needs no network.

``page.html.jinja`` has the HTML, ``page.css`` and ``page.js`` how it looks and what draws the plots.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from bebop.report.figures import Key, Panel

HERE = Path(__file__).parent
MAX_ACROSS = 3  # plots: narrower ones have no room for the labels of their axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """A box on the page: plots, or a table, and the words that explain them."""

    title: str
    text: str
    panels: Sequence[Panel] = ()
    keys: Sequence[Key] = ()
    notes: Sequence[str] = ()
    table: str = ""  # HTML, above the text
    wide: bool = False  # over both columns; several panels always are


def document(kicker: str, title: str, cards: Sequence[Card], opening: str = "") -> str:
    """Return the whole page as HTML; ``opening``: HTML below the title, see ``opened``. Without plots: no scripts."""
    panels = [panel for card in cards for panel in card.panels]
    firsts = accumulate((len(card.panels) for card in cards), initial=0)
    specs = json.dumps([{"data": p.traces, "layout": p.layout} for p in panels], allow_nan=False)
    page: str = _template().page(
        kicker=kicker,
        title=title,
        cards=list(zip(cards, firsts, strict=False)),
        opening=opening,
        # "<" must not end the script element early, whatever a run is called.
        figures=specs.replace("<", "\\u003c") if panels else "",
        plotly=get_plotlyjs() if panels else "",
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
    )
    return str(page)


def opened(verdicts: Sequence[tuple[str, str, str]], note: str = "") -> str:
    """Return what a page opens with: of each run its name (empty: there is one alone), a verdict and an advice.

    ``note``: a line of HTML below them.
    """
    return str(_template().opening(verdicts, Markup(note)))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], keys: Sequence[Key] = ()) -> str:
    """Return a table, the first cell of each row its name; ``keys``: the colour of each row."""
    assert all(len(row) == len(heads) for row in rows)
    return str(_template().table(heads, rows, keys))


def marked(text: str) -> Markup:
    """Return a text as HTML; what stands in backticks is code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _across(panels: int) -> int:
    """Return how many plots stand side by side, so that rows are about equally full: five are three and two."""
    rows = -(-panels // MAX_ACROSS)
    return -(-panels // rows)


@cache
def _template() -> Any:
    """Return the macros of the template."""
    found = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    found.filters["marked"], found.globals["across"] = marked, _across
    return found.get_template("page.html.jinja").module
