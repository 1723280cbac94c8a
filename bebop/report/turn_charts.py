"""Charts of runs with environments: how drafting goes in early and late turns, how trajectories end, how long they are.

Other runs have none of them.
"""

import re
from collections.abc import Sequence

from bebop.catalogue_turns import ENDED
from bebop.monitor.turns import AFTER, kind_name
from bebop.report.charts import Chart, Series
from bebop.report.runs import Run

MOST = 4  # draft positions with a chart of their own
OVERLAP = (
    "{what} at draft {k}, by turn of the trajectory, among cycles that reached the position. Accept lengths of turns "
    "of different length cannot be compared, as the end of each cuts a cycle off. The first cycle after an observation "
    "drafts on tokens that the policy has not written: far below the rest, the drafter does not know such text."
)
TURNS = Chart(
    title="Turns of a trajectory",
    text="Median and 99th percentile over the trajectories of each step. An update waits for the longest.",
    unit="turns",
    series=(Series(label="median", metric="turn/count_p50"), Series(label="99 %", metric="turn/count_p99")),
)
ENVIRONMENTS = Chart(
    title="Environments",
    text="Seconds that a trajectory spends in its environment; trajectories that began again since theirs was lost "
    "(it crashed, or took too long); and those given up, which are in no group: never a reward of 0. Tokens read: what "
    "environments said, on which nothing is trained.",
    unit="",
    series=(
        Series(label="seconds, median", metric="turn/seconds_p50"),
        Series(label="seconds, 99 %", metric="turn/seconds_p99"),
        Series(label="began again", metric="turn/restarts"),
        Series(label="lost", metric="turn/lost"),
        Series(label="tokens read", metric="turn/observed"),
    ),
    split=True,
)


def turn_charts(runs: Sequence[Run]) -> list[Chart]:
    """Those of runs that have trajectories of several turns; empty without any."""
    if not any(run.has("turn/count") for run in runs):
        return []
    return [*_overlaps(runs), _endings(runs), TURNS, ENVIRONMENTS]


def _overlaps(runs: Sequence[Run]) -> list[Chart]:
    """A chart for each draft position: the overlap, or where no run has it the share of accepted drafts."""
    names = {name for run in runs for name in run.columns if run.has(name)}
    measure = "overlap" if any(name.startswith("turn/overlap/") for name in names) else "accept_rate"
    found = [match for name in names if (match := re.fullmatch(rf"turn/{measure}/(\w+)/(\d+)", name))]
    kinds = sorted({match[1] for match in found}, key=lambda kind: (kind == AFTER, 0 if kind == AFTER else int(kind)))
    positions = sorted({int(match[2]) for match in found})[:MOST]
    what = "Mean overlap of draft and target distribution" if measure == "overlap" else "Share of accepted drafts"
    return [
        Chart(
            title=f"Draft {k} by turn",
            text=OVERLAP.format(what=what, k=k),
            unit="share",
            series=tuple(
                Series(label=_label(kind), metric=f"turn/{measure}/{kind}/{k}")
                for kind in kinds
                if f"turn/{measure}/{kind}/{k}" in names
            ),
            zero=False,
        )
        for k in positions
    ]


def _label(kind: str) -> str:
    return "first cycle after an observation" if kind == AFTER else f"turn {kind_name(int(kind))}"


def _endings(runs: Sequence[Run]) -> Chart:
    """Shares of those endings that occur."""
    seen = [
        ending for ending in ENDED if any(any(run.columns.get(f"turn/ended/{ending}", [])) for run in runs)
    ]  # fmt: skip
    return Chart(
        title="How trajectories end",
        text="; ".join(f"{ending}: {ENDED[ending]}" for ending in seen) + ".",
        unit="share of trajectories",
        series=tuple(Series(label=ending, metric=f"turn/ended/{ending}") for ending in seen),
        stacked=len(seen),
    )
