"""The frame of every page: one HTML file with its plots and plotly.js inside, which needs no network."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from plotly.offline import get_plotlyjs

from bebop.report.figures import Key, Panel
from bebop.report.style import CSS, SCRIPT

# The page may not load anything: proof that it works without a network.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"
MOST_ACROSS = 3  # plots: narrower ones have no room for the labels of their axes
NO_SCRIPT = '<noscript><p class="note">The figures are drawn by JavaScript, which is switched off here.</p></noscript>'


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
    """The whole page as HTML; ``opening``: HTML below the title, see ``opened``. Without plots it has no scripts."""
    panels = [panel for card in cards for panel in card.panels]
    body, number = [], 0
    for card in cards:
        body.append(_card(card, number))
        number += len(card.panels)
    newline = "\n"
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)} · Bebop report</title>
<style>{CSS}</style>
</head>
<body>
<header><p class="kicker">{escape(kicker)}</p><h1>{escape(title)}</h1>{opening}</header>
<main>
{NO_SCRIPT if panels else ""}
{newline.join(body)}
</main>
{_scripts(panels) if panels else ""}
</body>
</html>
"""


def _scripts(panels: Sequence[Panel]) -> str:
    """What draws the plots."""
    # "<" must not end the script element early, whatever a run is called.
    specs = json.dumps([{"data": p.traces, "layout": p.layout} for p in panels], allow_nan=False).replace(
        "<", "\\u003c"
    )
    return f"<script>{get_plotlyjs()}</script>\n<script>const FIGURES = {specs};\n{SCRIPT}</script>"


def opened(verdicts: Sequence[tuple[str, str, str]], note: str = "") -> str:
    """What a page opens with: of each run its name (empty: there is one alone), a verdict and an advice.

    ``note``: a line of HTML below them.
    """
    said = "".join(
        f"<p class='verdict'>{f'<b>{escape(name)}:</b> ' if name else ''}{marked(verdict)}</p>"
        f"<p class='advice'>{marked(advice)}</p>"
        for name, verdict, advice in verdicts
    )
    return f"<div class='opening'>{said}{f'<p class=note>{note}</p>' if note else ''}</div>"


def marked(text: str) -> str:
    """Text as HTML; what stands in backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", escape(text))


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], keys: Sequence[Key] = ()) -> str:
    """A table, the first cell of each row its name; on a narrow screen each row turns into a list with the heads.

    ``keys``: the colour of each row.
    """
    top = "".join(f"<th scope='col'>{escape(head)}</th>" for head in heads)
    body = []
    for i, (name, *cells) in enumerate(rows):
        mark = swatch(keys[i]) if keys else ""
        rest = "".join(
            f"<td data-head='{escape(head)}'>{escape(cell)}</td>" for head, cell in zip(heads[1:], cells, strict=True)
        )
        body.append(f"<tr><th scope='row'>{mark}{escape(name)}</th>{rest}</tr>")
    return f"<table><thead><tr>{top}</tr></thead><tbody>{''.join(body)}</tbody></table>"


def swatch(key: Key) -> str:
    """A short piece of the line."""
    return f"<i class='swatch {key.style}' style='color:{key.color}'></i>"


def _card(card: Card, first: int) -> str:
    """One box: title, legend, plots (numbered through as in ``FIGURES``) or table, text."""
    plots = "".join(
        f"<figure><figcaption>{escape(panel.caption)}</figcaption><div class='plot' id='plot-{i}'></div></figure>"
        for i, panel in enumerate(card.panels, first)
    )
    legend = f"<div class='legend'>{''.join(map(_legend, card.keys))}</div>" if card.keys else ""
    drawn = f"<div class='plots' style='--across:{_across(len(card.panels))}'>{plots}</div>" if plots else ""
    text = f"<p>{marked(card.text)}</p>" if card.text else ""
    notes = "".join(f"<p class='note'>{marked(line)}</p>" for line in card.notes)
    wide = " wide" if card.wide or len(card.panels) > 1 else ""
    return (
        f"<section class='card{wide}'><h2>{escape(card.title)}</h2>{legend}{drawn}{card.table}{text}{notes}</section>"
    )


def _across(panels: int) -> int:
    """Plots beside one another on a wide screen, so that rows are about equally full: five are three and two."""
    rows = -(-panels // MOST_ACROSS)
    return -(-panels // rows)


def _legend(key: Key) -> str:
    """A key: a button if it shows and hides something."""
    body = f"{swatch(key)}{escape(key.label)}"
    if key.group is None:
        return f"<span class='key'>{body}</span>"
    return f"<button class='key' type='button' aria-pressed='true' data-group='{escape(key.group)}'>{body}</button>"
