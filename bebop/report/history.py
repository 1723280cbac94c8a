"""Report cards of runs that drafted from history: its share of drafts, its acceptance, and how both change with age.

A completion counts as remembered once it was trained on (``bebop.driver.past_completions``). Engines do not know the
age of the newest one, so it is computed here from the weights that began both completions.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bebop.metrics.intervals import Interval, ratio
from bebop.report import figures
from bebop.report.document import Card, table
from bebop.report.epochs import CLUSTERS, Line, ends, interval_panel, shown
from bebop.report.figures import Panel
from bebop.report.runs import Run
from bebop.trajectory_db.reader import NAME, Trajectories

METRIC = "rollout/history/1"  # only runs that draft from history record it
NEVER = -1  # an age: nothing was remembered
HEADS = (
    "", "Completions", "From history", "Accepted of history", "Accepted of the rest", "Head alone", "Accept length",
)  # fmt: skip
BY_EPOCH = (
    "Drafts that were tested, by epoch. From history: the mean weight that history had in what they were drawn from; "
    "the rest is the head's. Accepted: share of either that stood, a draft from a mixture of the two counting for both "
    "by its weight. As history takes the places where completions repeat, those that are left to the head are the "
    "harder ones: the rest falls although the head is as good as before. Head alone: mean Σ min(p, m) over first "
    "drafts, m being the head's own distribution: what would be accepted if it drafted by itself where it is asked, "
    "which it is not where history is sure. Accept length: tokens per cycle. Intervals of 95 % over questions, the "
    "completions to one taken together."
)
BY_AGE = (
    "The same by age of what was remembered: updates between the weights that began the newest earlier completion to "
    "the question and those that began this one; of earlier completions those count that had been trained on by then, "
    "be they still kept or not. Points are at the mean age. Nothing: no earlier completion, so history is what others "
    "of the group had written by then, which takes part at every age. A line that falls is history growing stale as "
    "the policy learns."
)
CAPTIONS = {
    "share": "from history, share of drafts",
    "history": "accepted of history's drafts",
    "rest": "accepted of the rest",
    "head": "overlap of the head alone, first drafts",
    "length": "accept length, tokens per pass",
}
ACCEPTED = ("history", "rest", "head")  # shares of drafts that stand
QUERY = f"""
SELECT step, prompt, coalesce(question, -1 - prompt) AS question, epoch, version_first,
  coalesce(question, prompt) % {CLUSTERS} AS cluster, cycles, accept_length * cycles AS tokens, tested,
  accept_rate * tested AS accepted, json_extract(counts, '$.history') AS history,
  json_extract(counts, '$.history_accepted') AS history_accepted, json_extract(counts, '$.head_overlap') AS head,
  json_extract(counts, '$.head_read') AS read
FROM answers JOIN prompts USING (prompt)
WHERE json_extract(counts, '$.history') IS NOT NULL AND cycles > 0 ORDER BY answers.id
"""
Columns = dict[str, NDArray[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One group of completions, with intervals over questions; None: unknown, or without data."""

    name: str
    place: float  # on the x axis: the epoch, or the mean age; NEVER: nowhere
    answers: int
    share: Interval | None  # of tested drafts that came from history
    history: Interval | None  # accepted of those
    rest: Interval | None  # accepted of the others
    head: Interval | None  # overlap of the head's own distribution with the target's, first drafts
    length: Interval | None  # tokens a cycle


def read_parts(path: Path) -> tuple[list[Part], list[Part]]:
    """Return statistics on drafts from history in a ``trajectories.sqlite``, by epoch and age; empty without counts."""
    with Trajectories(path) as stored:
        rows = stored.query(QUERY)
    if not rows:
        return [], []
    columns = {name: np.array([row[name] or 0 for row in rows], dtype=float) for name in rows[0].keys()}
    columns["age"] = ages(columns)
    epochs = [
        _part(f"epoch {number:.0f}", number, columns, columns["epoch"] == number)
        for number in np.unique(columns["epoch"])
    ]
    return epochs, _by_age(columns)


def ages(columns: Columns) -> NDArray[np.float64]:
    """Return for each completion the updates [N] from the weights that began the newest remembered one to its own."""
    asked: dict[float, dict[tuple[float, float], float]] = defaultdict(dict)  # question -> (step, prompt) -> version
    names = ("question", "step", "prompt", "version_first")
    for question, step, prompt, version in zip(*(columns[name].tolist() for name in names), strict=True):
        known = asked[question]
        known[step, prompt] = max(version, known.get((step, prompt), version))
    ordered = {question: sorted(known.items()) for question, known in asked.items()}
    found = []
    for question, first in zip(columns["question"].tolist(), columns["version_first"].tolist(), strict=True):
        # Update ``step`` makes version ``step``, so completions begun under that version know what it trained on.
        before = ordered[question][: bisect_right(ordered[question], first, key=lambda one: one[0][0])]
        found.append(first - max(version for _, version in before) if before else NEVER)
    return np.array(found, dtype=float)


def _by_age(columns: Columns) -> list[Part]:
    """Group the completions: those without a remembered one, then ages of 1, 2, 3 to 4, 5 to 8 and so on."""
    age = columns["age"]
    parts = [_part("nothing", NEVER, columns, age == NEVER)] if (age == NEVER).any() else []
    low, high = 0, 1
    while low < age.max():
        mask = (age > low) & (age <= high)
        name = f"{low + 1} to {high} updates" if high > low + 1 else f"{high} update{'s' * (high > 1)}"
        parts += [_part(name, float(age[mask].mean()), columns, mask)] if mask.any() else []
        low, high = high, 2 * high
    return parts


def _part(name: str, place: float, columns: Columns, mask: NDArray[np.bool_]) -> Part:
    """Return the statistics of the completions where ``mask`` is true."""
    _, cluster = np.unique(columns["cluster"][mask], return_inverse=True)
    cycles, tokens, tested, accepted, history, kept, head, read = (
        np.bincount(cluster, columns[key][mask]).astype(float)
        for key in ("cycles", "tokens", "tested", "accepted", "history", "history_accepted", "head", "read")
    )
    return Part(
        name=name,
        place=place,
        answers=int(mask.sum()),
        share=_mean(history, tested),
        history=_mean(kept, history),
        rest=_mean(accepted - kept, tested - history),
        head=_mean(head, read),
        length=_mean(tokens, cycles),
    )


def _mean(top: NDArray[np.float64], bottom: NDArray[np.float64]) -> Interval | None:
    """Return the mean over questions; None if the denominators sum to zero up to rounding."""
    return ratio(top, bottom) if bottom.sum() > 1e-3 else None


Found = list[tuple[int, Run, list[Part]]]  # place on the page, run, its parts


def cards(runs: Sequence[Run], folders: Sequence[Path]) -> list[Card]:
    """Return the cards of the runs that drafted from history; empty if none did."""
    drafted = [(i, run, folders[i] / NAME) for i, run in enumerate(runs) if run.has(METRIC)]
    read = {i: read_parts(path) if path.is_file() else ([], []) for i, _, path in drafted}
    epochs: Found = [(i, run, read[i][0]) for i, run, _ in drafted if read[i][0]]
    aged: Found = [(i, run, read[i][1]) for i, run, _ in drafted if len(read[i][1]) > 1]
    notes = [f"Not recorded in {run.name}: what came from history, completion by completion." for i, run, _ in drafted
             if not read[i][0]]  # fmt: skip
    named, made = figures.run_keys(runs), []
    for found, title, text, axis, names in (
        (epochs, "Drafts from history", BY_EPOCH, "epoch", ("share", "history", "rest", "head", "length")),
        (aged, "Drafts from history by age", BY_AGE, "updates", ("history", "share", "length")),
    ):
        if found:
            rows, left_out = _rows(found, runs)
            keys = [named[i] for i, _, _ in found] if len(runs) > 1 else []
            made.append(
                Card(
                    title=title, text=text, panels=_panels(found, axis, names), keys=keys, table=table(HEADS, rows),
                    notes=[*(notes if found is epochs else ()), *left_out], wide=True,
                )
            )  # fmt: skip
    return made


def _panels(found: Found, title: str, names: Sequence[str]) -> list[Panel]:
    """Return a panel for each quantity, with a line per run; the acceptance shares have one scale."""
    panels = {name: panel for name in names if (panel := _panel(found, title, name)) is not None}
    alike = figures.same_scale([panels[name] for name in names if name in ACCEPTED and name in panels], True)
    panels |= dict(zip([name for name in names if name in ACCEPTED and name in panels], alike, strict=True))
    return [*panels.values()]


def _panel(found: Found, title: str, name: str) -> Panel | None:
    lines = []
    for place, run, parts in found:
        drawn = [part for part in parts if part.place != NEVER and getattr(part, name) is not None]
        x = [figures.rounded(part.place) or 0.0 for part in drawn]
        lines.append(Line(place, run.name, x, [getattr(part, name) for part in drawn]))
    return interval_panel(CAPTIONS[name], title, name != "length", lines)


def _rows(found: Found, runs: Sequence[Run]) -> tuple[list[tuple[str, ...]], list[str]]:
    """Return the rows of the table, and notes on the rows that it omits."""
    rows, notes = list[tuple[str, ...]](), list[str]()
    for _, run, parts in found:
        kept, left_out = ends(parts)
        if left_out:
            notes.append(f"{run.name}: {left_out[0].name} to {left_out[-1].name} are in the figure alone.")
        for part in kept:
            measures = (part.share, part.history, part.rest, part.head, part.length)
            name = f"{run.name}, {part.name}" if len(runs) > 1 else part.name
            rows.append((name, f"{part.answers:,}", *map(shown, measures)))
    return rows, notes
