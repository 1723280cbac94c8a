"""The table of panels as a Grafana dashboard, by itself or on top of Ray's own."""

import copy
from collections.abc import Iterator
from typing import Any

from bebop.report.dashboards.panels import ROWS, Panel, Query, series

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
    """Return Ray's own dashboard with these panels above its own, once however often it is done."""
    theirs = [copy.deepcopy(panel) for panel in ray["panels"] if panel["id"] < FIRST_ID]
    ours = list(_laid_out())
    shift = _bottom(ours) - min((panel["gridPos"]["y"] for panel in theirs), default=0)
    for panel in theirs:
        for placed in (panel, *panel.get("panels", ())):  # a row that is folded holds its panels
            placed["gridPos"]["y"] += shift
    return ray | {"panels": [*ours, *theirs]}


def _bottom(panels: list[dict[str, Any]]) -> int:
    return max(int(panel["gridPos"]["y"] + panel["gridPos"]["h"]) for panel in panels)


def _variables() -> list[dict[str, Any]]:
    """Return the variables: which Prometheus, and which Ray session (the newest unless another is chosen)."""
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
    """Yield rows and panels with ids and places, two panels side by side."""
    identity, y = FIRST_ID, 0
    for title, panels in ROWS.items():
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        yield {"id": identity, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        for index, panel in enumerate(panels):
            x = index * WIDTH % COLUMNS
            place = {"h": HEIGHT, "w": WIDTH, "x": x, "y": y + 1 + HEIGHT * (index * WIDTH // COLUMNS)}
            yield _panel(panel) | {"id": identity + 1 + index, "gridPos": place}
        identity += 1 + len(panels)
        y = place["y"] + HEIGHT


def _panel(panel: Panel) -> dict[str, Any]:
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
    """Return the rules for both edges of an interval: no lines, not in the legend, the space between them filled."""
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
