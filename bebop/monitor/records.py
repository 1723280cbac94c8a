"""Records of one step for the monitor, as columns: one row per completion, or per stretch of one.

They suffice to recompute every estimate without the groups, so a line of ``drift.jsonl`` is one ``StepRecords``. All
numbers are totals over cycles, never averages; NaN means "not measured". Records come from finished groups, from
decoding statistics or from averages, and can be split by kind of turn.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.errors import UserError
from bebop.monitor.estimate import Array
from bebop.systems.base import HEAD_OVERLAP, HEAD_READ
from bebop.trajectory import DRAFT_STATS, MEASURED, OPENING, STRETCH, WEIGHED, Completion, DecodeStats, Group

PER_ROW = ("cycles", "emitted", "entropy_sum", "entropy_count")
LABELS = ("unit", "answer", "position", "version", "lag")
OPTIONAL = ("turn",)  # labels that a line has where one of them is not 0
DIGITS = 6  # decimals in drift.jsonl
AFTER = "after"  # in place of a kind of turn: the first cycle after each observation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecords:
    """Records of the N completions of one step, with K draft positions.

    ``unit`` is the unit of resampling: completions to one prompt are dependent.

    ``emitted / cycles`` is the accept length, ``entropy_sum / entropy_count`` the target's entropy in nats over all
    verified positions. These positions are the completion's tokens without bonus tokens, so the set hardly depends on
    the head. With a spoiled head of the built-in model the mean moved by 0.016 of 0.2 nats.
    """

    step: int
    unit: NDArray[np.int64]  # [N] resampled together: the prompt
    answer: NDArray[np.int64]  # [N] stretches of one completion have the same number
    position: NDArray[np.int64]  # [N] token of the turn at which the stretch begins; OPENING: its first cycle alone
    turn: NDArray[np.int64]  # [N] of the trajectory, from 0; 0 for a completion in one turn
    version: NDArray[np.int64]  # [N] weights that wrote it (median over tokens); -1 unknown
    lag: NDArray[np.int64]  # [N] updates between them and the trainer's; -1 unknown
    task: NDArray[np.str_]  # [N]
    cycles: Array  # [N]
    emitted: Array  # [N] tokens of those cycles
    entropy_sum: Array  # [N] nats
    entropy_count: Array  # [N] positions in entropy_sum
    reached: Array  # [N, K]; sums over the cycles that reached position k, as in DecodeStats
    accepted: Array  # [N, K]
    overlap: Array  # [N, K]
    target_only: Array  # [N, K]
    draft_entropy: Array  # [N, K]
    target_entropy: Array  # [N, K]

    def __len__(self) -> int:
        return len(self.unit)

    @property
    def drafts(self) -> int:
        """Return K, the number of draft positions."""
        return self.reached.shape[1]

    def select(self, mask: NDArray[np.bool_]) -> "StepRecords":
        """Return the rows where ``mask`` is true."""
        names = (*LABELS, *OPTIONAL, "task", *PER_ROW, *DRAFT_STATS)
        return dataclasses.replace(self, **{name: getattr(self, name)[mask] for name in names})

    def relabelled(self, unit: NDArray[np.int64]) -> "StepRecords":
        """Return the same rows with ``unit`` replaced."""
        return dataclasses.replace(self, unit=unit)

    def sample(self, units: int, seed: int = 0) -> "StepRecords":
        """Draw at most ``units`` units at random, which bounds cost and the size of ``drift.jsonl``."""
        present = np.unique(self.unit)
        if len(present) <= units:
            return self
        kept = np.random.default_rng([seed, self.step]).choice(present, units, replace=False)
        return self.select(np.isin(self.unit, kept))

    def to_row(self) -> dict[str, Any]:
        """Return the row for ``drift.jsonl``."""
        row: dict[str, Any] = {"step": self.step, "task": self.task.tolist()}
        row |= {name: getattr(self, name).tolist() for name in LABELS}
        row |= {name: labels.tolist() for name in OPTIONAL if (labels := getattr(self, name)).any()}
        return row | {name: _rounded(getattr(self, name)) for name in (*PER_ROW, *DRAFT_STATS)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "StepRecords":
        """Read a row that ``to_row`` wrote."""
        try:
            count = len(row["unit"])
            columns: dict[str, Any] = {name: np.array(row[name], dtype=float).reshape(count) for name in PER_ROW}
            for name in DRAFT_STATS:
                columns[name] = np.array(row[name], dtype=float).reshape(count, -1 if count else 0)
            columns |= {name: np.array(row[name], dtype=np.int64).reshape(count) for name in LABELS}
            zeros = [0] * count
            columns |= {name: np.array(row.get(name, zeros), dtype=np.int64).reshape(count) for name in OPTIONAL}
            task = np.array(row["task"], dtype=np.str_).reshape(count)
            assert len({columns[name].shape for name in DRAFT_STATS}) == 1
        except (KeyError, TypeError, ValueError, AssertionError) as error:
            raise UserError(
                f"step {row.get('step')} of a drift log cannot be read ({error}): give drift.jsonl"
            ) from None
        return cls(step=int(row["step"]), task=task, **columns)


def merge_records(parts: Sequence[StepRecords]) -> StepRecords:
    """Merge the parts of one step (workers) or several steps; units stay apart where steps differ.

    Parts of one step keep their unit numbers: two workers that complete the same prompt share its unit.
    """
    assert parts, "nothing to merge"
    drafts = max(part.drafts for part in parts)
    columns: dict[str, Any] = {name: np.concatenate([getattr(p, name) for p in parts]) for name in (*PER_ROW, "task")}
    labels = ("position", "version", "lag", *OPTIONAL)
    columns |= {name: np.concatenate([getattr(p, name) for p in parts]) for name in labels}
    columns |= {name: np.concatenate([_widened(getattr(p, name), drafts) for p in parts]) for name in DRAFT_STATS}
    steps = np.concatenate([np.full(len(p), p.step) for p in parts])
    order = np.concatenate([np.full(len(p), i) for i, p in enumerate(parts)])
    unit = _numbered(steps, np.concatenate([p.unit for p in parts])) if len({p.step for p in parts}) > 1 else None
    columns["unit"] = np.concatenate([p.unit for p in parts]) if unit is None else unit
    columns["answer"] = _numbered(order, np.concatenate([p.answer for p in parts]))
    return StepRecords(step=parts[-1].step, **columns)


def _numbered(*keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the distinct combinations of the keys [N] and return each row's number [N]."""
    return np.unique(np.stack(keys, 1), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _widened(table: Array, width: int) -> Array:
    missing = width - table.shape[1]
    return np.pad(table, ((0, 0), (0, missing))) if missing else table


def _rounded(table: Array) -> list[Any]:
    values = np.round(table, DIGITS).astype(object)
    values[np.isnan(table)] = None
    rows: list[Any] = values.tolist()
    return rows


# ---- where records come from


def from_groups(
    groups: Sequence[Group], step: int, version: int | None = None, head_alone: bool = False
) -> StepRecords:
    """Return a step's records from its finished groups, in O(completions); the lag counts from the trainer's
    ``version``.

    ``head_alone``: drafts come from a mixture, and only the head's own drafts are recorded, see ``of_head``.
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
    """Return the same rows as if every cycle had a single draft, made by the head alone.

    The head's measured overlap of first drafts, ``HEAD_OVERLAP``, counts as accepted. Cycles that did not ask the head
    (``HEAD_READ``) are left out; the entropy is that of all first drafts.
    """
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
    """Return records from decoding statistics, one row each; by default each row is a whole completion and its own
    unit.

    Of an engine that measures some cycles, a row holds those, each times the cycles that it represents. So all sums of
    a row are over the same cycles: how many of a completion's were measured is chance, and cancels. Totals over rows
    estimate those of all cycles. A row without a measured cycle is left out.
    """
    count = len(stats)
    drafts = max((len(s.reached) for s in stats), default=0)
    sums = {name: _padded([getattr(s, name) for s in stats], drafts) for name in DRAFT_STATS}
    cycles, emitted = (np.array([float(getattr(s, name)) for s in stats]) for name in ("cycles", "emitted"))
    kept = np.ones(count, dtype=bool)
    weighed = _padded([s.counts.get(WEIGHED, np.zeros(0)) for s in stats], drafts)
    if weighed.any():
        share = np.divide(weighed, sums["reached"], out=np.zeros_like(weighed), where=sums["reached"] > 0)
        of_row = np.where(sums["reached"][:, 0] > 0, share[:, 0], 1.0)  # 1: nothing was drafted
        sums |= {"reached": weighed, "accepted": share * sums["accepted"]}
        cycles, emitted, kept = of_row * cycles, of_row * emitted, of_row > 0
    if not sums["overlap"].any():  # not measured: the engine left zeros
        for name in MEASURED:
            sums[name] = np.full_like(sums[name], np.nan)
    plain = np.array([len(s.reached) == 0 for s in stats], dtype=bool)
    records = StepRecords(
        step=step,
        unit=_labels(unit, range(count)),
        answer=_labels(answer, range(count)),
        position=_labels(position, [0] * count),
        turn=_labels(turn, [0] * count),
        version=_labels(version, [-1] * count),
        lag=_labels(lag, [-1] * count),
        task=np.array([""] * count if task is None else list(task), dtype=np.str_),
        cycles=cycles,
        emitted=emitted,
        entropy_sum=np.where(plain, np.nan, sums["target_entropy"].sum(1)),
        entropy_count=sums["reached"].sum(1),
        **sums,
    )
    return records.select(kept)


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
    """Return one row for a step with known averages only; rates are conditional on reaching the position."""
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
    """Return the same rows with ``entropy`` (nats, for example the policy's) at every position."""
    count = records.cycles
    return dataclasses.replace(
        records, entropy_sum=count * entropy, entropy_count=count, target_entropy=records.reached * entropy
    )


def _version(completion: Completion, start: int) -> int:
    """Return the median version of the weights that wrote the stretch from ``start`` on; it ends at twice ``start``."""
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
    """Return rows of different length as a table, padded with zeros."""
    table = np.zeros((len(rows), width))
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = row
    return table


# ---- kinds of turns


def first_of_kind(turn: int) -> int:
    """Return the first turn of a turn's kind; the kinds are 0, 1, 2-3, 4-7, 8-15, ..."""
    return 1 << (turn.bit_length() - 1) if turn else 0


def kind_name(first: int) -> str:
    """Return ``0``, ``1``, ``2-3``, ``4-7``, ... for the kind that begins with turn ``first``."""
    return str(first) if first < 2 else f"{first}-{2 * first - 1}"


def by_turn(records: StepRecords) -> dict[str, StepRecords]:
    """Return the rows of each kind of turn, then those of the first cycles after observations, by name."""
    kinds = np.array([first_of_kind(int(turn)) for turn in records.turn], dtype=np.int64)
    found = {kind_name(int(kind)): records.select(kinds == kind) for kind in np.unique(kinds)}
    after = (records.turn > 0) & (records.position == OPENING)
    return found | ({AFTER: records.select(after)} if after.any() else {})
