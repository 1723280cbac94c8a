"""A step's records from where they come from: finished groups, decoding statistics, averages."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from bebop.monitor.estimate import Array
from bebop.monitor.records import StepRecords
from bebop.systems.base import HEAD_OVERLAP, HEAD_READ
from bebop.trajectory import DRAFT_STATS, MEASURED, OPENING, STRETCH, Completion, DecodeStats, Group


def from_groups(
    groups: Sequence[Group], step: int, version: int | None = None, head_alone: bool = False
) -> StepRecords:
    """A step's records from its finished groups; ``version`` is the trainer's, for the lag. O(answers).

    ``head_alone``: drafts come from a mixture, of which the head by itself is recorded, see ``of_head``.
    """
    answers = [(group.prompt, t) for group in groups for t in group.trajectories]
    drafted = [
        (number, prompt, place, turn.completion, start, stats)
        for number, (prompt, t) in enumerate(answers)
        for place, turn in enumerate(t.turns)
        for start, stats in (turn.completion.stretches or ((0, turn.completion.stats),))
        if stats.cycles
    ]
    versions = [_version(c, start) for *_, c, start, _ in drafted]
    records = from_stats(
        [stats for *_, stats in drafted],
        step,
        unit=[prompt.index for _, prompt, *_ in drafted],
        answer=[number for number, *_ in drafted],
        position=[start for *_, start, _ in drafted],
        turn=[place for _, _, place, *_ in drafted],
        task=[prompt.task for _, prompt, *_ in drafted],
        version=versions,
        lag=[-1 if version is None or v < 0 else version - v for v in versions],
    )
    return of_head(records, [stats for *_, stats in drafted]) if head_alone else records


def of_head(records: StepRecords, stats: Sequence[DecodeStats]) -> StepRecords:
    """The same rows as if every cycle had a single draft, which the head makes by itself: what it measured of first
    drafts, ``HEAD_OVERLAP``, is what would be accepted. Cycles that did not ask the head (``HEAD_READ``) are left out;
    the entropy is that of all first drafts."""
    overlap, read = (
        np.array([s.counts[name][:1].sum() if name in s.counts else np.nan for s in stats])
        for name in (HEAD_OVERLAP, HEAD_READ)
    )
    reached = read[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        entropy = records.target_entropy[:, :1] * reached / records.reached[:, :1]
    first = overlap[:, None]
    own = dataclasses.replace(
        records,
        cycles=reached.sum(1),
        emitted=reached.sum(1) + overlap,
        entropy_sum=entropy.sum(1),
        entropy_count=reached.sum(1),
        reached=reached,
        accepted=first,
        overlap=first,
        target_only=np.full_like(reached, np.nan),
        draft_entropy=np.full_like(reached, np.nan),
        target_entropy=entropy,
    )
    return own.select((own.cycles > 0) & np.isfinite(overlap))


def from_stats(
    stats: Sequence[DecodeStats],
    step: int,
    *,
    unit: Sequence[int] | None = None,
    answer: Sequence[int] | None = None,
    position: Sequence[int] | None = None,
    turn: Sequence[int] | None = None,
    task: Sequence[str] | None = None,
    version: Sequence[int] | None = None,
    lag: Sequence[int] | None = None,
) -> StepRecords:
    """Records from decoding statistics, one row each; labels default to: its own unit and answer, the whole answer."""
    count = len(stats)
    drafts = max((len(s.reached) for s in stats), default=0)
    sums = {name: _padded([getattr(s, name) for s in stats], drafts) for name in DRAFT_STATS}
    cycles = np.array([float(s.cycles) for s in stats])
    if not sums["overlap"].any():  # not measured: the engine left zeros
        for name in MEASURED:
            sums[name] = np.full_like(sums[name], np.nan)
    plain = np.array([len(s.reached) == 0 for s in stats], dtype=bool)
    return StepRecords(
        step=step,
        unit=_labels(unit, range(count)),
        answer=_labels(answer, range(count)),
        position=_labels(position, [0] * count),
        turn=_labels(turn, [0] * count),
        version=_labels(version, [-1] * count),
        lag=_labels(lag, [-1] * count),
        task=np.array([""] * count if task is None else list(task), dtype=np.str_),
        cycles=cycles,
        emitted=np.array([float(s.emitted) for s in stats]),
        entropy_sum=np.where(plain, np.nan, sums["target_entropy"].sum(1)),
        entropy_count=sums["reached"].sum(1),
        **sums,
    )


def from_averages(
    step: int,
    *,
    length: float,
    entropy: float,
    cycles: float,
    accept_rate: Sequence[float] = (),
    overlap: Sequence[float] = (),
    target_only: Sequence[float] = (),
) -> StepRecords:
    """One row for a step of which only averages are known; rates are conditional on reaching the position."""
    rate = np.array(accept_rate, dtype=float)
    reached = cycles * np.concatenate([[1.0], np.cumprod(rate)[:-1]])[: len(rate)]
    expected = {"overlap": overlap, "target_only": target_only}
    whole = {
        name: reached * np.array(values, dtype=float) if len(values) == len(rate) else np.full(len(rate), np.nan)
        for name, values in expected.items()
    }
    sums = {"reached": reached, "accepted": reached * rate, **whole, "draft_entropy": np.full(len(rate), np.nan)}
    row = StepRecords(
        step=step,
        unit=np.zeros(1, dtype=np.int64),
        answer=np.zeros(1, dtype=np.int64),
        position=np.zeros(1, dtype=np.int64),
        turn=np.zeros(1, dtype=np.int64),
        version=np.full(1, -1),
        lag=np.full(1, -1),
        task=np.array([""]),
        cycles=np.array([cycles]),
        emitted=np.array([cycles * length]),
        entropy_sum=np.zeros(1),
        entropy_count=np.ones(1),
        target_entropy=np.zeros((1, len(rate))),
        **{name: column[None] for name, column in sums.items()},
    )
    return with_entropy(row, entropy)


def with_entropy(records: StepRecords, entropy: float) -> StepRecords:
    """The same rows with an entropy from elsewhere (the policy's), taken for every position, nats."""
    count = records.cycles
    return dataclasses.replace(
        records, entropy_sum=count * entropy, entropy_count=count, target_entropy=records.reached * entropy
    )


def _version(completion: Completion, start: int) -> int:
    """The weights that wrote the stretch from ``start`` on: it ends where twice as much is written."""
    if start == OPENING:
        written = completion.versions[:1]
    elif completion.stretches:
        written = completion.versions[start : 2 * max(start, STRETCH // 2)]
    else:
        written = completion.versions
    return int(np.median(written)) if len(written) else -1


def _labels(values: Iterable[int] | None, default: Iterable[int]) -> NDArray[np.int64]:
    return np.array(list(default if values is None else values), dtype=np.int64)


def _padded(rows: Sequence[Array], width: int) -> Array:
    """Rows of different length under one another, zeros beyond their ends."""
    table = np.zeros((len(rows), width))
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table
