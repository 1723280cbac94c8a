"""Charts of a report with their lines, from ``bebop.metrics.catalogue``; ``figures`` draws them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bebop.metrics.catalogue import CHARTS, METRICS, Chart, MetricRow
from bebop.monitor.records import AFTER, kind_name
from bebop.report.runs import Run
from bebop.trajectory import DRAFT_STATS

MAX_POSITIONS = 4  # draft positions with a chart by turn
ENDINGS = "How trajectories end"  # the charts by turn stand before it
OVERLAP = (
    "{what} at draft {k}, by turn of the trajectory, among cycles that reached the position. Accept lengths of turns "
    "of different length cannot be compared, as the end of each cuts a cycle off. The first cycle after an observation "
    "drafts on tokens that the policy has not written: far below the rest, the drafter does not know such text."
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One quantity: a solid line and, if it has a second estimate, a dashed one."""

    label: str
    metric: str
    dashed: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Chart with its series."""

    chart: Chart
    series: tuple[Series, ...]

    @property
    def metrics(self) -> list[str]:
        """Return the names of all metrics in the chart."""
        return [metric for series in self.series for metric in (series.metric, series.dashed) if metric]


def plots(runs: Sequence[Run]) -> list[Plot]:
    """Return all charts of some runs, in the order of the page."""
    found = list[Plot]()
    for chart in CHARTS:
        if chart.title == ENDINGS:
            found += _by_turn(runs)
        plot = Plot(chart=chart, series=_series(chart, runs))
        recorded = any(run.has(metric) for run in runs for metric in plot.metrics)
        if plot.series and (recorded or not chart.optional):
            found.append(plot)
        if chart.title == "Entropy":
            found += _counted(runs)
    return found


def _series(chart: Chart, runs: Sequence[Run]) -> tuple[Series, ...]:
    """Return the lines of a chart: one per metric, or one per draft position that any run has."""
    rows = [row for row in METRICS if row.chart == chart.title]
    return tuple(series for row in rows if not row.dashed for series in _lines(row, rows, runs))


def _lines(row: MetricRow, rows: Sequence[MetricRow], runs: Sequence[Run]) -> Iterator[Series]:
    if not row.name.endswith("/K"):
        yield Series(label=row.label, metric=row.name)
        return
    second = next((other.name for other in rows if other.dashed), None)
    for k in range(1, max(_positions(row.name, runs), default=1) + 1):
        dashed = None if second is None else second.replace("/K", f"/{k}")
        yield Series(label=f"{row.label} {k}", metric=row.name.replace("/K", f"/{k}"), dashed=dashed)


def _positions(name: str, runs: Sequence[Run]) -> set[int]:
    """Return the draft positions for which any run has a metric ``.../K``."""
    pattern = re.compile(name.replace("/K", r"/(\d+)"))
    return {int(found[1]) for run in runs for column in run.columns if (found := pattern.fullmatch(column))}


def _counted(runs: Sequence[Run]) -> Iterator[Plot]:
    """Yield a chart for each statistic specific to the decoding system; most systems have none."""
    columns = [column for run in runs for column in run.columns]
    own = dict.fromkeys(match[1] for column in columns if (match := re.fullmatch(r"rollout/(\w+)/\d+", column)))
    meanings = {row.name: row.meaning.replace("`", "") for row in METRICS}
    for name in own:
        if name not in ("accept_rate", *DRAFT_STATS):
            chart = Chart(
                name.replace("_", " ").capitalize(),
                "drafting",
                meanings.get(f"rollout/{name}/K", "What the decoding system counts at each draft position") + ".",
                unit="per draft that was reached",
            )
            positions = sorted(_positions(f"rollout/{name}/K", runs))
            lines = tuple(Series(label=f"draft {k}", metric=f"rollout/{name}/{k}") for k in positions)
            yield Plot(chart=chart, series=lines)


def _by_turn(runs: Sequence[Run]) -> Iterator[Plot]:
    """Yield a chart for each draft position: the overlap by turn, or without overlap the share of accepted drafts."""
    names = {name for run in runs for name in run.columns if run.has(name)}
    measure = "overlap" if any(name.startswith("turn/overlap/") for name in names) else "accept_rate"
    found = [match for name in names if (match := re.fullmatch(rf"turn/{measure}/(\w+)/(\d+)", name))]
    kinds = sorted({match[1] for match in found}, key=lambda kind: (kind == AFTER, 0 if kind == AFTER else int(kind)))
    what = "Mean overlap of draft and target distribution" if measure == "overlap" else "Share of accepted drafts"
    for k in sorted({int(match[2]) for match in found})[:MAX_POSITIONS]:
        text = OVERLAP.format(what=what, k=k)
        lines = [
            Series(label=_turn(kind), metric=f"turn/{measure}/{kind}/{k}")
            for kind in kinds
            if f"turn/{measure}/{kind}/{k}" in names
        ]
        yield Plot(chart=Chart(f"Draft {k} by turn", "drafting", text, unit="share", zero=False), series=tuple(lines))


def _turn(kind: str) -> str:
    return "first cycle after an observation" if kind == AFTER else f"turn {kind_name(int(kind))}"
