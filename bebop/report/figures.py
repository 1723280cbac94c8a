"""Conversion of charts to panels: plotly traces and layouts as plain dicts, which plotly.js draws in the browser.

With one run colours mean series; with several they mean runs and every series has its own panel. Legend keys are HTML
buttons beside the panels, since plotly's own legend takes too much of a narrow plot. A key shows or hides all traces of
its group.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bebop.metrics.catalogue import METRICS, WINDOW, Chart
from bebop.metrics.intervals import Interval
from bebop.report.charts import Plot, Series
from bebop.report.runs import Run

PALETTE = ("#2563a8", "#d1603d", "#3a8f6d", "#8a63b5", "#c79a1e", "#4aa3b8", "#b0476f", "#6b7280")
# Metrics that a run may lack: those of evaluations, and one that older runs do not have.
OPTIONAL = {row.name for row in METRICS if row.part == "evaluation"} | {"time/save"}
BARS = ("#e39a80", "#8a63b5", "#d5dae1", "#8fc4a9", "#e3c567", "#a5c8dc")  # light, under dark lines
STACK = (*BARS, "#2563a8", "#1f2933")
INK, MUTED, GRID = "#1f2933", "#52606d", "#e8ebef"
FEW = 20  # points on a line that are marked
CLOSE = 8  # ticks that fit into the narrowest panel
Trace = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """Entry of the legend; ``group`` is None for an explanation of line styles, which hides nothing."""

    label: str
    color: str
    style: str = "solid"  # solid, dashed, faint or block
    group: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """Plot with a caption above, plotly traces and layout."""

    caption: str
    traces: list[Trace]
    layout: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """Chart as drawn for some runs; it has no panels if there was no data."""

    plot: Plot
    panels: list[Panel]
    keys: list[Key]
    missing: dict[str, list[str]]  # run -> the metrics it lacks


def color(index: int) -> str:
    """Return the colour of a run or series; they repeat after eight."""
    return PALETTE[index % len(PALETTE)]


def draw(plot: Plot, runs: Sequence[Run]) -> Figure:
    """Return the panels and the legend of a chart."""
    by_run = len(runs) > 1
    if plot.chart.stacked:
        panels, keys = _stacked(plot, runs)
    elif by_run or plot.chart.split:
        panels = _panel_per_series(plot, runs)
        keys = run_keys(runs) if by_run else []
    else:
        panels, keys = _panel_of_all(plot, runs[0])
    # A run without evaluations lacks nothing, unless it stands beside one that has them.
    wanted = [metric for metric in plot.metrics if metric not in OPTIONAL or any(run.has(metric) for run in runs)]
    lacking = {run.name: [metric for metric in wanted if not run.has(metric)] for run in runs}
    missing = {name: absent for name, absent in lacking.items() if absent}
    styles = _style_keys(plot, runs) if panels else []
    return Figure(plot=plot, panels=panels, keys=[*keys, *styles], missing=missing)


def run_keys(runs: Sequence[Run]) -> list[Key]:
    """Return one legend key per run, the same on the whole page."""
    return [Key(label=run.name, color=color(i), group=f"run {i}") for i, run in enumerate(runs)]


def running_mean(column: Sequence[float | None], window: int = WINDOW) -> list[float | None]:
    """Return the mean of the last ``window`` values up to each index, without missing ones."""
    means: list[float | None] = []
    for end in range(1, len(column) + 1):
        seen = [value for value in column[max(0, end - window) : end] if value is not None]
        means.append(sum(seen) / len(seen) if seen else None)
    return means


def _panel_of_all(plot: Plot, run: Run) -> tuple[list[Panel], list[Key]]:
    """Draw all series of one run in one panel, each in its own colour."""
    chart = plot.chart
    drawn = [(series, color(i)) for i, series in enumerate(plot.series) if run.has(series.metric)]
    traces = [
        trace
        for series, shade in drawn
        for trace in _lines(chart, series, run, series.label, shade, f"{chart.title} {series.label}")
    ]
    keys = [Key(label=s.label, color=shade, group=f"{chart.title} {s.label}") for s, shade in drawn]
    traces += _bar(chart, [run]) if traces else []
    panels = [Panel(caption=chart.unit, traces=traces, layout=_layout(chart, [run], traces))] if traces else []
    return panels, keys if len(keys) > 1 else []


def _panel_per_series(plot: Plot, runs: Sequence[Run]) -> list[Panel]:
    """Draw a panel for each series; several runs are overlaid, each in its own colour."""
    panels, chart = [], plot.chart
    for series in plot.series:
        traces = [
            trace
            for i, run in enumerate(runs)
            if run.has(series.metric)
            for trace in _lines(chart, series, run, run.name if len(runs) > 1 else series.label, color(i), f"run {i}")
        ]
        caption = ", ".join(filter(None, (series.label if len(plot.series) > 1 else "", chart.unit)))
        if traces:
            traces += _bar(chart, runs)
            panels.append(Panel(caption=caption, traces=traces, layout=_layout(chart, runs, traces)))
    return panels if chart.split else same_scale(panels, chart.zero)


def _stacked(plot: Plot, runs: Sequence[Run]) -> tuple[list[Panel], list[Key]]:
    """Draw a panel for each run: bars for the parts of a whole, lines for the rest. Series that are always 0 are left
    out.
    """
    panels, chart = [], plot.chart
    for run in runs:
        traces = [_bar_or_line(plot, i, run) for i, series in enumerate(plot.series) if _occurs(run, series)]
        caption = f"{run.name}, {chart.unit}" if len(runs) > 1 else chart.unit
        if traces:
            panels.append(Panel(caption=caption, traces=traces, layout=_layout(chart, [run], traces)))
    keys = [
        Key(label=s.label, color=STACK[i], style="block" if i < chart.stacked else "solid", group=f"part {s.label}")
        for i, s in enumerate(plot.series)
        if any(_occurs(run, s) for run in runs)
    ]
    return same_scale(panels, chart.zero), keys


def _occurs(run: Run, series: Series) -> bool:
    return any(run.columns.get(series.metric, []))


def same_scale(panels: list[Panel], zero: bool) -> list[Panel]:
    """Give side-by-side panels of one unit the same y range, so that heights can be compared."""
    heights = [height for panel in panels for height in _heights(panel.traces)]
    if len(panels) < 2 or not heights:
        return panels
    low, high = min(heights + [0.0] * zero), max(heights)
    room = 0.06 * (high - low)
    y_range = [low if zero else low - room, high + room] if high > low else around(high, zero)
    return [replace(p, layout={**p.layout, "yaxis": {**p.layout["yaxis"], "range": y_range}}) for p in panels]


def _heights(traces: Sequence[Trace]) -> list[float]:
    """Return all y values that a panel reaches: lines, points with their errors, and bars stacked on each other.

    Bars above 0 are stacked apart from those below it.
    """
    lines = []
    for trace in (trace for trace in traces if trace["type"] != "bar"):
        ends = trace.get("error_y", {"array": [0.0] * len(trace["y"]), "arrayminus": [0.0] * len(trace["y"])})
        for value, up, down in zip(trace["y"], ends["array"], ends["arrayminus"], strict=True):
            lines += [value + (up or 0.0), value - (down or 0.0)] if value is not None else []
    bars = [trace["y"] for trace in traces if trace["type"] == "bar"]
    return lines + [
        sum(side(0.0, value or 0.0) for value in column) for column in zip(*bars, strict=True) for side in (max, min)
    ]


def _bar_or_line(plot: Plot, index: int, run: Run) -> Trace:
    """Draw the series at ``index`` of a stacked chart."""
    series, shade = plot.series[index], STACK[index]
    make = bar_trace if index < plot.chart.stacked else line_trace
    return make(run.steps, run.columns[series.metric], series.label, shade, f"part {series.label}")


def _lines(chart: Chart, series: Series, run: Run, name: str, shade: str, group: str) -> list[Trace]:
    """Draw the line of a series, with its dashed companion or, if smoothed, its faint original."""
    column = run.columns[series.metric]
    if chart.smooth:
        faint = line_trace(run.steps, column, f"{name}, step", shade, group) | {"opacity": 0.35}
        faint["line"] |= {"width": 1.2}
        return [faint, line_trace(run.steps, running_mean(column), f"{name}, mean", shade, group)]
    lines = [line_trace(run.steps, column, name, shade, group)]
    if series.dashed and run.has(series.dashed):
        label = f"{name}, {(chart.styles or ('', 'second'))[1]}"
        second = line_trace(run.steps, run.columns[series.dashed], label, shade, group)
        second["line"] |= {"dash": "dash", "width": 1.5}
        lines.append(second)
    return lines


def _bar(chart: Chart, runs: Sequence[Run]) -> list[Trace]:
    """Draw the chart's decision threshold over all steps."""
    if chart.bar is None:
        return []
    steps = [step for run in runs for step in run.steps]
    level, label = chart.bar
    line = line_trace([min(steps), max(steps)], [level, level], label, INK)
    return [line | {"line": {"color": INK, "width": 1.5, "dash": "dash"}, "mode": "lines"}]


def line_trace(x: Sequence[float], y: Sequence[float | None], name: str, shade: str, group: str | None = None) -> Trace:
    """Draw a line over steps; up to ``FEW`` points are marked, as a single point would not show.

    The line connects over steps without a value, so a metric recorded at every tenth step is a line too.
    """
    mode = "lines" if sum(value is not None for value in y) > FEW else "lines+markers"
    style = {"line": {"color": shade, "width": 2}, "marker": {"color": shade, "size": 5}, "mode": mode}
    return _trace("scatter", x, y, name, group) | style | {"connectgaps": True}


def with_ends(trace: Trace, intervals: Sequence[Interval | None]) -> Trace:
    """Return a trace with the intervals of its points as error bars; an unknown interval has none."""
    ends = [None if one is None else (one.value - one.low, one.high - one.value) for one in intervals]
    down, up = ([rounded(0.0 if pair is None else pair[i]) or 0.0 for pair in ends] for i in range(2))
    bars = {"type": "data", "symmetric": False, "array": up, "arrayminus": down}
    bars |= {"color": trace["marker"]["color"], "thickness": 1.2, "width": 3}
    return trace | {"error_y": bars, "hovertemplate": "%{y:.4~g} +%{error_y.array:.2~g} -%{error_y.arrayminus:.2~g}"}


def bar_trace(x: Sequence[Any], y: Sequence[float | None], name: str, shade: str, group: str | None = None) -> Trace:
    """Draw bars without an edge."""
    return _trace("bar", x, y, name, group) | {"marker": {"color": shade, "line": {"width": 0}}}


def _trace(kind: str, x: Sequence[Any], y: Sequence[float | None], name: str, group: str | None) -> Trace:
    trace = {"type": kind, "x": list(x), "y": [rounded(value) for value in y], "name": name}
    return trace | {"hovertemplate": "%{y:.4~g}"} | ({"legendgroup": group} if group else {})


def layout(x_title: str, zero: bool = False) -> dict[str, Any]:
    """Return axes and margins of any plot. Text is 12 px or more on any screen, since nothing is scaled."""
    axis = {"gridcolor": GRID, "zeroline": False, "automargin": True, "tickfont": {"size": 12}, "nticks": 6}
    axis |= {"ticks": "outside", "ticklen": 5, "tickcolor": "rgba(0,0,0,0)"}  # room between number and line
    x = {**axis, "showgrid": False, "title": {"text": x_title, "font": {"size": 12}, "standoff": 6}}
    x |= {"showline": True, "linecolor": "#c3cad3"}
    return {
        "xaxis": x,
        "yaxis": {**axis, "rangemode": "tozero" if zero else "normal", "fixedrange": True},
        "showlegend": False,
        "hovermode": "x unified",
        "margin": {"l": 44, "r": 14, "t": 10, "b": 40},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif", "size": 12, "color": MUTED},
        "hoverlabel": {"font": {"size": 12, "color": INK}, "bgcolor": "#ffffff"},
    }


def _layout(chart: Chart, runs: Sequence[Run], traces: Sequence[Trace]) -> dict[str, Any]:
    """Return the layout of a chart over steps."""
    frame = over_steps([step for run in runs for step in run.steps], chart.zero)
    heights = _heights(traces)
    if min(heights) == max(heights):
        frame["yaxis"]["range"] = around(heights[0], chart.zero)
    return frame


def over_steps(steps: Sequence[int], zero: bool = False) -> dict[str, Any]:
    """Return the layout of lines and stacked bars over some steps."""
    frame = layout("step", zero) | {"barmode": "relative", "bargap": 0.15 if len(steps) <= 80 else 0}
    frame["xaxis"] |= whole_ticks(steps)
    return frame


def whole_ticks(numbers: Sequence[float]) -> dict[str, Any]:
    """Return ticks at whole numbers: each of them in a small range, else a few."""
    return {"tickformat": "d"} | ({"dtick": 1} if max(numbers) - min(numbers) < CLOSE else {})


def around(level: float, zero: bool) -> list[float]:
    """Return the y range of a flat line: the line at mid-height, or 0 at the bottom. plotly.js would choose any."""
    room = abs(level) / 4 or 1.0
    low = min(0.0, level) if zero or level == 0 else level - room
    return [low, level + room]


def _style_keys(plot: Plot, runs: Sequence[Run]) -> list[Key]:
    """Return legend keys for the line styles of a chart; empty if only one occurs."""
    chart = plot.chart
    if chart.bar is not None:
        return [Key(label=chart.bar[1], color=INK, style="dashed")]
    dashed = any(series.dashed and run.has(series.dashed) for series in plot.series for run in runs)
    if chart.styles is None or not (chart.smooth or dashed):
        return []
    first, second = chart.styles
    return [Key(label=first, color=MUTED), Key(label=second, color=MUTED, style="faint" if chart.smooth else "dashed")]


def rounded(value: float | None) -> float | None:
    """Return ``value`` with six significant digits, which suffice for a plot at a third of the size; None if not
    finite.
    """
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def visible(text: str) -> str:
    """Return a text with its white space made visible."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    return shown if shown.strip() else shown.replace(" ", "␣") or "(nothing)"
