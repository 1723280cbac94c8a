"""The card of runs whose questions are asked again: reward and acceptance of their answers, epoch by epoch."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bebop.report import figures
from bebop.report.document import Card, table
from bebop.report.figures import Panel
from bebop.report.runs import DASH, Run
from bebop.trajectories import NAME, Trajectories

EPOCH = "samples/epoch"
HEADS = ("Epoch", "Questions", "Answers", "Reward", "Accept length", "Overlap")
ENDS = 10  # rows of the table at either end; those between are in the figure alone
TEXT = (
    "The answers that were trained on, by epoch: how often all questions had been asked before, so the first is 0. "
    "Every epoch asks the same questions in another order. A hollow point has fewer of them than others: its epoch is "
    "not over, or groups were passed over. Reward: mean over answers. Accept length: tokens per cycle, overlap: mean "
    "Σ min(p, q) over tested drafts, both over all cycles of an epoch. What rises from epoch to epoch was learned on "
    "these very questions: on others it may be less."
)
QUERY = """
SELECT epoch, count(DISTINCT question) AS questions, count(*) AS answers, avg(reward) AS reward,
  sum(accept_length * cycles) / sum(CASE WHEN accept_length IS NOT NULL THEN cycles END) AS accept_length,
  sum(overlap * tested) / sum(CASE WHEN overlap IS NOT NULL THEN tested END) AS overlap
FROM answers JOIN prompts USING (prompt) WHERE question IS NOT NULL GROUP BY epoch ORDER BY epoch
"""
# Columns with a panel: caption, whether its axis begins at 0.
DRAWN = {
    "reward": ("reward per answer", True),
    "accept_length": ("accept length, tokens per pass", False),
    "overlap": ("overlap, share", False),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """All answers of one epoch.

    >>> Epoch(epoch=1, questions=256, answers=2048, reward=0.5, accept_length=2.7, overlap=None)  # doctest: +SKIP
    """

    epoch: int  # from 0
    questions: int
    answers: int
    reward: float
    accept_length: float | None  # tokens a cycle; None: not known
    overlap: float | None  # None: not measured


def read_epochs(path: Path) -> list[Epoch]:
    """The epochs in a ``trajectories.sqlite``, in order; those of its questions that are asked once have none."""
    with Trajectories(path) as stored:
        return [Epoch(**dict(row)) for row in stored.query(QUERY)]


def cards(runs: Sequence[Run], folders: Sequence[Path]) -> list[Card]:
    """The card of those runs that came to a second epoch; empty without any."""
    found, absent = list[tuple[int, Run, list[Epoch]]](), list[str]()
    for i, (run, folder) in enumerate(zip(runs, folders, strict=True)):
        if max((epoch for epoch in run.columns.get(EPOCH, []) if epoch is not None), default=0.0) < 1:
            continue
        if (folder / NAME).is_file():
            found.append((i, run, read_epochs(folder / NAME)))
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
    """One column over the epochs, a line a run; None where no run has it."""
    caption, zero = DRAWN[name]
    drawn = [(i, run, epochs) for i, run, epochs in found if _heights(name, epochs)]
    if not drawn:
        return None
    frame = figures.layout("epoch", zero)
    few = max(len(epochs) for _, _, epochs in drawn) <= 2 * ENDS
    frame["xaxis"] |= {"tickformat": "d"} | ({"dtick": 1} if few else {})
    heights = {height for _, _, epochs in drawn for height in _heights(name, epochs)}
    if len(heights) == 1:
        frame["yaxis"]["range"] = figures.around(heights.pop(), zero)
    traces = [_line(name, epochs, run.name, i) for i, run, epochs in drawn]
    return Panel(caption=caption, traces=traces, layout=frame)


def _heights(name: str, epochs: Sequence[Epoch]) -> list[float]:
    return [value for epoch in epochs if (value := getattr(epoch, name)) is not None]


def _line(name: str, epochs: Sequence[Epoch], run: str, place: int) -> figures.Trace:
    """One column of a run, the ``place``-th of the page."""
    y = [getattr(epoch, name) for epoch in epochs]
    line = figures.line_trace([epoch.epoch for epoch in epochs], y, run, figures.color(place), f"run {place}")
    most = max(epoch.questions for epoch in epochs)
    line["marker"] |= {"symbol": ["circle" if e.questions == most else "circle-open" for e in epochs], "size": 7}
    return line | {"mode": "lines+markers"}


def _rows(found: Sequence[tuple[int, Run, list[Epoch]]], many: bool) -> tuple[list[tuple[str, ...]], list[str]]:
    """The rows of the table, and what it leaves out."""
    rows, notes = list[tuple[str, ...]](), list[str]()
    for _, run, epochs in found:
        shown = epochs
        if len(epochs) > 2 * ENDS:
            shown = [*epochs[:ENDS], *epochs[-ENDS:]]
            notes.append(f"{run.name}: epochs {ENDS} to {epochs[-ENDS - 1].epoch} are in the figure alone.")
        rows += [(f"{run.name}, epoch {e.epoch}" if many else f"epoch {e.epoch}", *_cells(e)) for e in shown]
    return rows, notes


def _cells(epoch: Epoch) -> tuple[str, ...]:
    measures = (epoch.reward, epoch.accept_length, epoch.overlap)
    numbers = (DASH if value is None else f"{value:.3f}" for value in measures)
    return (f"{epoch.questions:,}", f"{epoch.answers:,}", *numbers)
