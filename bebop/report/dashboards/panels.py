"""The panels of the dashboard: the charts of ``bebop.metrics.catalogue`` with PromQL for the metrics that they show."""

from dataclasses import dataclass

from bebop.metrics.catalogue import CHARTS, METRICS, NEEDS, Chart, MetricRow
from bebop.monitor.drift_monitor import STATES

SESSION = 'SessionName=~"$SessionName"'  # the dashboard's variable; Ray labels every series with its session


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL expression and what its lines are called."""

    expr: str
    legend: str  # with Grafana's {{label}}
    band_of: str | None = None  # the lower edge of an interval has none; the upper edge names the lower one's legend


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One figure of Grafana."""

    title: str
    description: str
    unit: str  # tokens, nats, share, s, ...
    queries: tuple[Query, ...]
    needs: str = ""  # without which a run has none of these numbers
    states: tuple[str, ...] = ()  # names of the values 0, 1, ...: drawn as a timeline


def series(name: str) -> str:
    """Return the name under which Prometheus knows a metric of ``metrics.jsonl``."""
    return "ray_bebop_" + name.replace("/", "_")


def _panel(chart: Chart) -> Panel | None:
    """Return the panel of a chart; None where no metric is shown in it."""
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
    """Return the queries of a metric: by draft position, with its interval as a band, or as it is."""
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
    """Return one query for a metric that has a name per draft position, ``name/1``, ``name/2``, ..."""
    selected = f'{{__name__=~"{series(name)}_[0-9]+",{SESSION}}}'
    labelled = f'label_replace({selected}, "position", "$1", "__name__", ".+_([0-9]+)")'
    return Query(expr=labelled, legend=f"{legend} {{{{position}}}}")


# Title of each row of the dashboard, and its panels.
ROWS = {
    f"Bebop: {group}": tuple(panel for chart in CHARTS if chart.group == group and (panel := _panel(chart)))
    for group in ("drafting", "learning", "running")
}
