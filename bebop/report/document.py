"""Frame of every report page: one HTML file that contains its plots and plotly.js, so it needs no network.

``page.html.jinja`` has the HTML, ``page.css`` the style and ``page.js`` the code that draws the plots.
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
MAX_ACROSS = 3  # plots in a row: narrower ones have no room for the labels of their axes


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Box on the page: plots or a table, with the text that explains them."""

    title: str
    text: str
    panels: Sequence[Panel] = ()
    keys: Sequence[Key] = ()
    notes: Sequence[str] = ()
    table: str = ""  # HTML, above the text
    wide: bool = False  # over both columns; several panels always are


def document(kicker: str, title: str, cards: Sequence[Card], opening: str = "") -> str:
    """Return the page as HTML; ``opening``: HTML below the title, see ``opened``. Without plots it has no scripts."""
    panels = [panel for card in cards for panel in card.panels]
    firsts = accumulate((len(card.panels) for card in cards), initial=0)
    specs = json.dumps([{"data": p.traces, "layout": p.layout} for p in panels], allow_nan=False)
    page: str = _template().page(
        kicker=kicker,
        title=title,
        cards=list(zip(cards, firsts, strict=False)),
        opening=opening,
        # "<" in the name of a run must not end the script element early.
        figures=specs.replace("<", "\\u003c") if panels else "",
        plotly=get_plotlyjs() if panels else "",
        css=(HERE / "page.css").read_text(encoding="utf-8"),
        script=(HERE / "page.js").read_text(encoding="utf-8"),
    )
    return str(page)


def opened(verdicts: Sequence[tuple[str, str, str]], note: str = "") -> str:
    """Return the opening of a page: each run's name (empty for a single run), verdict and advice.

    ``note``: a line of HTML below them.
    """
    return str(_template().opening(verdicts, Markup(note)))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], keys: Sequence[Key] = ()) -> str:
    """Return an HTML table; the first cell of each row is its name, and ``keys`` give each row's colour."""
    assert all(len(row) == len(heads) for row in rows)
    return str(_template().table(heads, rows, keys))


def marked(text: str) -> Markup:
    """Return ``text`` as HTML, with the parts in backticks as code."""
    return Markup(re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text))))


def _across(panels: int) -> int:
    """Return the number of plots in a row that makes rows about equally full: five plots make rows of three and two."""
    rows = -(-panels // MAX_ACROSS)
    return -(-panels // rows)


@cache
def _template() -> Any:
    """Load the page's template and return its macros."""
    found = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined)
    found.filters["marked"], found.globals["across"] = marked, _across
    return found.get_template("page.html.jinja").module
