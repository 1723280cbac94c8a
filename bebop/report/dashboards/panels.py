"""Panels of the Grafana dashboard: the charts of ``bebop.metrics.catalogue`` with PromQL for their metrics.

The dashboard is written by itself or on top of Ray's own.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bebop.metrics.catalogue import CHARTS, METRICS, NEEDS, Chart, MetricRow
from bebop.monitor.drift_monitor import STATES

SESSION = 'SessionName=~"$SessionName"'  # the dashboard's variable; Ray labels every series with its session


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """PromQL expression with the legend of its lines."""

    expr: str
    legend: str  # with Grafana's {{label}}
    band_of: str | None = None  # the lower edge of an interval has none; the upper edge names the lower one's legend


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One panel of the Grafana dashboard."""

    title: str
    description: str
    unit: str  # tokens, nats, share, s, ...
    queries: tuple[Query, ...]
    needs: str = ""  # what a run needs to record these metrics
    states: tuple[str, ...] = ()  # names of the values 0, 1, ...: drawn as a timeline


def series(name: str) -> str:
    """Return the Prometheus name of a metric of ``metrics.jsonl``."""
    return "ray_bebop_" + name.replace("/", "_")


def _panel(chart: Chart) -> Panel | None:
    """Return the panel of a chart; None if the chart has no metric in the dashboard."""
    rows = [row for row in METRICS if row.panel == chart.title]
    if not rows:
        return None
    units, parts = {row.unit for row in rows}, {row.part for row in rows}
    return Panel(
        title=chart.title,
        description=chart.text,
        unit=units.pop() if len(units) == 1 else "",
        queries=tuple(query for row in rows for query in _queries(row)),
        needs=NEEDS.get(parts.pop(), ""),
        states=STATES if chart.states else (),
    )


def _queries(row: MetricRow) -> tuple[Query, ...]:
    """Return a metric's queries: one by draft position, or value and interval band, or the value alone."""
    if row.name.endswith("/K"):
        return (_by_position(row.name.removesuffix("/K"), row.label),)
    if not row.interval:
        return (_gauge(row.name, row.label),)
    low, high = f"{row.label}, low", f"{row.label}, high"
    return (
        _gauge(row.name, row.label),
        _gauge(f"{row.name}_low", low),
        Query(expr=_gauge(f"{row.name}_high", high).expr, legend=high, band_of=low),
    )


def _gauge(name: str, legend: str) -> Query:
    return Query(expr=f"{series(name)}{{{SESSION}}}", legend=legend)


def _by_position(name: str, legend: str) -> Query:
    """Return one query for a metric with a name per draft position, ``name/1``, ``name/2``, ..."""
    selected = f'{{__name__=~"{series(name)}_[0-9]+",{SESSION}}}'
    labelled = f'label_replace({selected}, "position", "$1", "__name__", ".+_([0-9]+)")'
    return Query(expr=labelled, legend=f"{legend} {{{{position}}}}")


# Title of each row of the dashboard, and its panels.
ROWS = {
    f"Bebop: {group}": tuple(panel for chart in CHARTS if chart.group == group and (panel := _panel(chart)))
    for group in ("drafting", "learning", "running")
}


# ---- the table as a Grafana dashboard

UID = "bebopDashboard"
FIRST_ID = 9000  # ids of panels, away from Ray's
WIDTH, HEIGHT, COLUMNS = 12, 8, 24  # of a panel, and of Grafana's grid
UNITS = {"share": "percentunit", "s": "s"}  # the rest are plain numbers with the unit at the axis
COLOURS = ("green", "blue", "orange", "red")  # of states 0, 1, ...
SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana's JSON model."""
    return {
        "uid": UID,
        "title": "Bebop",
        "description": "Reinforcement learning with speculative rollouts",
        "tags": ["bebop", "ray"],
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,  # one crosshair in all panels
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": list(_laid_out()),
    }


def on_top(ray: dict[str, Any]) -> dict[str, Any]:
    """Return Ray's own dashboard with these panels above its own; applying it twice does not add them twice."""
    theirs = [copy.deepcopy(panel) for panel in ray["panels"] if panel["id"] < FIRST_ID]
    ours = list(_laid_out())
    shift = _bottom(ours) - min((panel["gridPos"]["y"] for panel in theirs), default=0)
    for panel in theirs:
        for placed in (panel, *panel.get("panels", ())):  # a folded row contains its panels
            placed["gridPos"]["y"] += shift
    return ray | {"panels": [*ours, *theirs]}


def _bottom(panels: list[dict[str, Any]]) -> int:
    return max(int(panel["gridPos"]["y"] + panel["gridPos"]["h"]) for panel in panels)


def _variables() -> list[dict[str, Any]]:
    """Return the dashboard's variables: the Prometheus source and the Ray session (by default the newest)."""
    sessions = f"label_values({series('step')}, SessionName)"
    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "hide": 2, "refresh": 1},
        {
            "name": "SessionName",
            "label": "Ray session",
            "type": "query",
            "datasource": SOURCE,
            "definition": sessions,
            "query": {"query": sessions, "refId": "sessions"},
            "refresh": 2,
            "sort": 2,
            "includeAll": False,
            "multi": False,
        },
    ]


def _laid_out() -> Iterator[dict[str, Any]]:
    """Yield rows and panels with ids and grid positions, two panels side by side."""
    identity, y = FIRST_ID, 0
    for title, panels in ROWS.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        yield {"id": identity, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        for index, panel in enumerate(panels):
            x = index * WIDTH % COLUMNS
            place = {"h": HEIGHT, "w": WIDTH, "x": x, "y": y + 1 + HEIGHT * (index * WIDTH // COLUMNS)}
            yield _figure(panel) | {"id": identity + 1 + index, "gridPos": place}
        identity += 1 + len(panels)
        y = place["y"] + HEIGHT


def _figure(panel: Panel) -> dict[str, Any]:
    kind = "state-timeline" if panel.states else "timeseries"
    legend = {"showLegend": not panel.states, "displayMode": "list", "placement": "bottom"}
    return {
        "type": kind,
        "title": panel.title,
        "description": panel.description + (f" Needs {panel.needs}." if panel.needs else ""),
        "datasource": SOURCE,
        "fieldConfig": {
            "defaults": _states(panel.states) if panel.states else _lines(panel.unit),
            "overrides": [rule for query in panel.queries for rule in _band(query)],
        },
        "options": {"legend": legend, "tooltip": {"mode": "multi", "sort": "none"}},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": SOURCE, "expr": q.expr, "legendFormat": q.legend, "range": True}
            for i, q in enumerate(panel.queries)
        ],
    }


def _lines(unit: str) -> dict[str, Any]:
    label = "" if unit in UNITS else unit
    drawn = {"drawStyle": "line", "lineWidth": 1, "fillOpacity": 0, "spanNulls": True, "showPoints": "auto"}
    return {"unit": UNITS.get(unit, "short"), "custom": drawn | {"axisLabel": label}}


def _states(names: tuple[str, ...]) -> dict[str, Any]:
    shown = {str(i): {"text": name, "color": COLOURS[i], "index": i} for i, name in enumerate(names)}
    return {"mappings": [{"type": "value", "options": shown}], "custom": {"fillOpacity": 70, "lineWidth": 0}}


def _band(query: Query) -> list[dict[str, Any]]:
    """Return Grafana's overrides for both edges of an interval: no lines, no legend, the space between them filled."""
    if query.band_of is None:
        return []
    hidden = [
        {"id": "custom.lineWidth", "value": 0},
        {"id": "custom.showPoints", "value": "never"},
        {"id": "custom.hideFrom", "value": {"legend": True, "tooltip": False, "viz": False}},
    ]
    filled = [{"id": "custom.fillBelowTo", "value": query.band_of}, {"id": "custom.fillOpacity", "value": 15}]
    return [
        {"matcher": {"id": "byName", "options": query.band_of}, "properties": hidden},
        {"matcher": {"id": "byName", "options": query.legend}, "properties": [*hidden, *filled]},
    ]
