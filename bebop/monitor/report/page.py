"""The page: figures, table and text in one HTML file that needs no network (plotly.js is part of it)."""

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path

from plotly.offline import get_plotlyjs

from bebop.errors import UserError
from bebop.monitor.report.charts import charts, metrics
from bebop.monitor.report.figures import Figure, Key, draw, run_keys
from bebop.monitor.report.runs import Run, load_runs
from bebop.monitor.report.style import CSS, SCRIPT
from bebop.monitor.report.summary import HEADS, NOTE, summary


def write_report(folders: Sequence[Path], out: Path | None = None) -> Path:
    """Write the report on some run folders, by default as ``report.html`` in the first; returns where it is."""
    runs = load_runs(folders)
    out = out or folders[0] / "report.html"
    if not out.parent.is_dir() or out.is_dir():
        raise UserError(f"--out {out} cannot be written: give a file in a folder that exists")
    out.write_text(render(runs), encoding="utf-8")
    return out


def render(runs: Sequence[Run]) -> str:
    """The whole page as HTML."""
    figures = [draw(chart, runs) for chart in charts(runs)]
    panels = [panel for figure in figures for panel in figure.panels]
    # "<" must not end the script element early, whatever a run is called.
    specs = json.dumps([{"data": p.traces, "layout": p.layout} for p in panels], allow_nan=False).replace(
        "<", "\\u003c"
    )
    title = escape(runs[0].name if len(runs) == 1 else f"{len(runs)} runs")
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title} · Bebop report</title>
<style>{CSS}</style>
</head>
<body>
<header><p class="kicker">Bebop · run report</p><h1>{title}</h1></header>
<main>
<noscript><p class="note">The figures are drawn by JavaScript, which is switched off here.</p></noscript>
{_summary(runs)}
{_cards(figures, runs)}
{_left_out(figures)}
</main>
<script>{get_plotlyjs()}</script>
<script>const FIGURES = {specs};
{SCRIPT}</script>
</body>
</html>
"""


# The page may not load anything: proof that it works without a network.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def _summary(runs: Sequence[Run]) -> str:
    """The table; on a narrow screen each row turns into a list with the heads as labels."""
    heads = "".join(f"<th scope='col'>{head}</th>" for head in HEADS)
    rows = []
    for run, key in zip(runs, run_keys(runs), strict=True):
        name, *cells = summary(run)
        swatch = _swatch(key) if len(runs) > 1 else ""
        rest = "".join(
            f"<td data-head='{head}'>{escape(cell)}</td>" for head, cell in zip(HEADS[1:], cells, strict=True)
        )
        rows.append(f"<tr><th scope='row'>{swatch}{escape(name)}</th>{rest}</tr>")
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f"<section class='card wide summary'><h2>Summary</h2>{table}<p>{NOTE}</p></section>"


def _cards(figures: Sequence[Figure], runs: Sequence[Run]) -> str:
    """All figures that have something to show, their plots numbered through as in ``FIGURES``."""
    cards, number = [], 0
    for figure in figures:
        if figure.panels:
            cards.append(_card(figure, runs, number))
            number += len(figure.panels)
    return "\n".join(cards)


def _card(figure: Figure, runs: Sequence[Run], first: int) -> str:
    """One figure: title, legend, plots, text."""
    plots = "".join(
        f"<figure><figcaption>{escape(panel.caption)}</figcaption><div class='plot' id='plot-{i}'></div></figure>"
        for i, panel in enumerate(figure.panels, first)
    )
    legend = f"<div class='legend'>{''.join(map(_legend, figure.keys))}</div>" if figure.keys else ""
    note = "".join(f"<p class='note'>{escape(line)}</p>" for line in _missing(figure, len(runs)))
    wide = " wide" if len(figure.panels) > 1 else ""
    return (
        f"<section class='card{wide}'><h2>{escape(figure.chart.title)}</h2>{legend}"
        f"<div class='plots'>{plots}</div><p>{escape(figure.chart.text)}</p>{note}</section>"
    )


def _legend(key: Key) -> str:
    """A key: a button if it shows and hides something."""
    body = f"{_swatch(key)}{escape(key.label)}"
    if key.group is None:
        return f"<span class='key'>{body}</span>"
    return f"<button class='key' type='button' aria-pressed='true' data-group='{escape(key.group)}'>{body}</button>"


def _swatch(key: Key) -> str:
    """A short piece of the line."""
    return f"<i class='swatch {key.style}' style='color:{key.color}'></i>"


def _missing(figure: Figure, runs: int) -> list[str]:
    """What could not be drawn, run by run."""
    where = " in {}" if runs > 1 else ""
    return [f"Not recorded{where.format(run)}: {', '.join(absent)}." for run, absent in figure.missing.items()]


def _left_out(figures: Sequence[Figure]) -> str:
    """A note on the figures for which there is no data at all."""
    absent = [f"{f.chart.title} ({', '.join(metrics(f.chart))})" for f in figures if not f.panels]
    if not absent:
        return ""
    text = f"Nothing was recorded for: {escape('; '.join(absent))}."
    return f"<section class='card wide'><h2>Left out</h2><p>{text}</p></section>"
