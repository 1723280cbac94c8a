"""Report card by epoch, for runs that ask their questions repeatedly: reward, acceptance and speed of completions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from sqlite3 import Row
from typing import TypeVar

from bebop.metrics.intervals import Interval, ratio
from bebop.report import figures
from bebop.report.document import Card, table
from bebop.report.figures import Panel
from bebop.report.runs import DASH, Run
from bebop.trajectory import WEIGHED
from bebop.trajectory_db.reader import NAME, Trajectories

T = TypeVar("T")
EPOCH = "samples/epoch"
HEADS = ("Epoch", "Questions", "Completions", "Reward", "Accept length", "Overlap", "Tokens/s", "Trainer busy")
ENDS = 10  # rows of the table at either end; only the figure shows those between
CLUSTERS = 4096  # maximum of resampled clusters; more questions are grouped by their remainder
TEXT = (
    "The completions that were trained on, by epoch: how often all questions had been asked before, so the first is 0. "
    "Every epoch asks the same questions in another order. A hollow point has fewer of them than others: its epoch is "
    "not over, or groups were passed over. Reward: mean over completions. Accept length: tokens per cycle, overlap: "
    "mean Σ min(p, q) over tested drafts, both over all cycles of an epoch. Intervals of 95 %: of other questions "
    "under the same weights, the completions to one question taken together. Tokens/s: those that came in from all "
    "workers for each second in which a worker decoded (mean over workers), in the steps that trained on this epoch; "
    "its interval is over those steps. It is of the machine as it was: Trainer busy is the share of these steps in "
    "which the trainer computed, beside the workers unless the run is synchronous, and what else ran there is not "
    "known. What rises from epoch to epoch was learned on these very questions: on others it may be less."
)
# Tested positions that a completion's overlap stands for: an engine may measure some cycles, each for several.
WEIGHT = f"coalesce(json_extract(counts, '$.{WEIGHED}'), tested)"
QUERY = f"""
SELECT epoch, count(DISTINCT question) AS questions, count(*) AS answers, sum(reward) AS reward,
  sum(accept_length * cycles) AS tokens, sum(CASE WHEN accept_length IS NOT NULL THEN cycles END) AS cycles,
  sum(overlap * {WEIGHT}) AS overlap, sum(CASE WHEN overlap IS NOT NULL THEN {WEIGHT} END) AS weight
FROM answers JOIN prompts USING (prompt) WHERE question IS NOT NULL
GROUP BY epoch, question % {CLUSTERS} ORDER BY epoch
"""
# The share of each epoch in each step.
STEPS = """
SELECT epoch, step, sum(question IS NOT NULL) * 1.0 / sum(count(*)) OVER (PARTITION BY step) AS share
FROM answers JOIN prompts USING (prompt) GROUP BY step, epoch
"""
# Columns with a panel: caption, whether its axis begins at 0.
DRAWN = {
    "reward": ("reward per completion", True),
    "accept_length": ("accept length, tokens per pass", False),
    "overlap": ("overlap, share", False),
    "speed": ("tokens per second of decoding", True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """All completions of one epoch, with intervals over questions; a single question has no interval.

    >>> Epoch(epoch=1, questions=256, answers=2048, reward=Interval(0.5, 0.4, 0.6), accept_length=None,
    ...       overlap=None, speed=None, trainer=None)  # doctest: +SKIP
    """

    epoch: int  # from 0
    questions: int
    answers: int
    reward: Interval
    accept_length: Interval | None  # tokens a cycle; None: not known
    overlap: Interval | None  # None: not measured
    speed: Interval | None  # tokens of all workers for a second of decoding, over steps; None: not known
    trainer: float | None  # share of the steps' time in which the trainer computed; None: not known


def read_epochs(path: Path, run: Run | None = None) -> list[Epoch]:
    """Return the epochs in a ``trajectories.sqlite``, in order; questions that are asked only once belong to none.

    ``run``: the run that has the durations of the steps.
    """
    with Trajectories(path) as stored:
        rows, shares = stored.query(QUERY), stored.query(STEPS)
    times = {} if run is None else _times(run)
    return [_epoch(number, list(of), shares, times) for number, of in groupby(rows, lambda row: int(row["epoch"]))]


def _epoch(number: int, rows: Sequence[Row], shares: Sequence[Row], times: Mapping[int, "_Times"]) -> Epoch:
    """Return an epoch from the sums of its questions and its shares of the steps."""
    own = [(row["share"], times[row["step"]]) for row in shares if row["epoch"] == number and row["step"] in times]
    whole = sum(share * step.whole for share, step in own)
    return Epoch(
        epoch=number,
        questions=sum(row["questions"] for row in rows),
        answers=sum(row["answers"] for row in rows),
        reward=ratio([row["reward"] for row in rows], [row["answers"] for row in rows]),
        accept_length=_mean(rows, "tokens", "cycles"),
        overlap=_mean(rows, "overlap", "weight"),
        speed=ratio([share * t.tokens for share, t in own], [share * t.decoding for share, t in own]) if own else None,
        trainer=sum(share * t.trainer for share, t in own) / whole if whole else None,
    )


def _mean(rows: Sequence[Row], top: str, bottom: str) -> Interval | None:
    """Return the mean from sums over questions, skipping questions without data; None if all lack data."""
    known = [(row[top], row[bottom]) for row in rows if row[bottom]]
    return ratio(*zip(*known, strict=True)) if known else None


@dataclass(frozen=True, slots=True)
class _Times:
    """One step: completion tokens received, and durations in seconds."""

    tokens: float
    decoding: float  # mean over workers
    trainer: float  # in which the trainer computed
    whole: float


def _times(run: Run) -> dict[int, _Times]:
    """Return the times of those steps for which all are recorded."""
    names = ("rollout/tokens_per_s", "time/rollout", "time/idle", "time/step")
    columns = [run.columns.get(name, [None] * len(run.steps)) for name in names]
    found = dict[int, _Times]()
    for step, speed, decoding, idle, whole in zip(run.steps, *columns, strict=True):
        if speed is not None and decoding and idle is not None and whole is not None:
            found[step] = _Times(speed * whole, decoding, whole - idle, whole)
    return found


def cards(runs: Sequence[Run], folders: Sequence[Path]) -> list[Card]:
    """Return the card of the runs that reached a second epoch; empty if none did."""
    found, absent = list[tuple[int, Run, list[Epoch]]](), list[str]()
    for i, (run, folder) in enumerate(zip(runs, folders, strict=True)):
        if max((epoch for epoch in run.columns.get(EPOCH, []) if epoch is not None), default=0.0) < 1:
            continue
        if (folder / NAME).is_file():
            found.append((i, run, read_epochs(folder / NAME, run)))
        else:
            absent.append(run.name)
    if not found:
        return []
    many, named = len(runs) > 1, figures.run_keys(runs)
    keys = [named[i] for i, _, _ in found] if many else []
    rows, notes = _rows(found, many)
    notes += [f"Not recorded in {name}: {NAME}." for name in absent]
    panels = [panel for name in DRAWN if (panel := _panel(name, found)) is not None]
    body = table(HEADS, rows)
    return [Card(title="By epoch", text=TEXT, panels=panels, keys=keys, notes=notes, table=body, wide=True)]


def _panel(name: str, found: Sequence[tuple[int, Run, list[Epoch]]]) -> Panel | None:
    """Return a panel of one column over the epochs, with a line per run; None if no run has it."""
    caption, zero = DRAWN[name]
    lines = []
    for place, run, epochs in found:
        most = max(epoch.questions for epoch in epochs)
        hollow = [epoch.questions < most for epoch in epochs]
        lines.append(Line(place, run.name, [e.epoch for e in epochs], [getattr(e, name) for e in epochs], hollow))
    panel = interval_panel(caption, "epoch", zero, lines)
    heights = set() if panel is None else {height for line in lines for height in line.heights()}
    if panel is not None and len(heights) == 1:
        panel.layout["yaxis"]["range"] = figures.around(heights.pop(), zero)
    return panel


@dataclass(frozen=True, slots=True)
class Line:
    """Values with intervals over x, of the run at index ``place`` on the page."""

    place: int
    run: str
    x: Sequence[float]
    intervals: Sequence[Interval | None]  # None: not known
    hollow: Sequence[bool] = ()  # points that rest on less than others

    def heights(self) -> list[float]:
        """Return all y values that the line and its intervals reach, as drawn."""
        ends = (figures.rounded(end) for one in self.intervals if one for end in (one.value, one.low, one.high))
        return [end for end in ends if end is not None]


def interval_panel(caption: str, x_title: str, zero: bool, lines: Sequence[Line]) -> Panel | None:
    """Return a panel of lines with intervals; None without any values."""
    drawn = [line for line in lines if line.heights()]
    if not drawn:
        return None
    frame = figures.layout(x_title, zero)
    if x_title == "epoch":
        frame["xaxis"] |= figures.whole_ticks([x for line in drawn for x in line.x])
    traces = []
    for line in drawn:
        y = [None if one is None else one.value for one in line.intervals]
        trace = figures.line_trace(line.x, y, line.run, figures.color(line.place), f"run {line.place}")
        if line.hollow:
            trace["marker"] |= {"symbol": ["circle-open" if one else "circle" for one in line.hollow], "size": 7}
        traces.append(figures.with_ends(trace | {"mode": "lines+markers"}, line.intervals))
    return Panel(caption=caption, traces=traces, layout=frame)


def _rows(found: Sequence[tuple[int, Run, list[Epoch]]], many: bool) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the rows of the table, and notes on the rows that it omits."""
    rows, notes = list[tuple[str, ...]](), list[str]()
    for _, run, epochs in found:
        kept, left_out = ends(epochs)
        if left_out:
            notes.append(f"{run.name}: epochs {ENDS} to {left_out[-1].epoch} are in the figure alone.")
        rows += [(f"{run.name}, epoch {e.epoch}" if many else f"epoch {e.epoch}", *_cells(e)) for e in kept]
    return rows, notes


def ends(rows: Sequence[T]) -> tuple[Sequence[T], Sequence[T]]:
    """Return the first and last ``ENDS`` rows of a table, and the omitted rows between them."""
    return (rows, []) if len(rows) <= 2 * ENDS else ([*rows[:ENDS], *rows[-ENDS:]], rows[ENDS:-ENDS])


def _cells(epoch: Epoch) -> tuple[str, ...]:
    measures = (shown(one) for one in (epoch.reward, epoch.accept_length, epoch.overlap))
    busy = DASH if epoch.trainer is None else f"{epoch.trainer:.0%}"
    return (f"{epoch.questions:,}", f"{epoch.answers:,}", *measures, shown(epoch.speed, 0), busy)


def shown(one: Interval | None, digits: int = 3) -> str:
    """Return a number with its interval, if it has one, as text; a dash if unknown."""
    if one is None or not math.isfinite(one.value):
        return DASH
    ends = f" [{one.low:,.{digits}f}, {one.high:,.{digits}f}]" if math.isfinite(one.low + one.high) else ""
    return f"{one.value:,.{digits}f}{ends}"
