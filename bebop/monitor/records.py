"""What the monitor keeps of one step: one row an answer (or a stretch of one), as columns.

Enough to recompute every estimate without the groups, so a line of ``drift.jsonl`` is one ``StepRecords``. All numbers
are totals over cycles, never averages; NaN is "not measured".
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.errors import UserError
from bebop.monitor.estimate import Array
from bebop.trajectory import DRAFT_STATS

PER_ROW = ("cycles", "emitted", "entropy_sum", "entropy_count")
LABELS = ("unit", "answer", "position", "version", "lag")
OPTIONAL = ("turn",)  # labels that a line has where one of them is not 0
DIGITS = 6  # decimals in drift.jsonl


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepRecords:
    """The N answers of one step, K draft positions. ``unit`` is what is resampled: answers to one prompt are dependent.

    ``emitted / cycles`` is the accept length, ``entropy_sum / entropy_count`` the target's entropy in nats over all
    verified positions. Those are the answer's tokens, bonus tokens left out, so the set hardly depends on the head
    (with a spoiled head of the built-in model the mean moved by 0.016 of 0.2 nats).
    """

    step: int
    unit: NDArray[np.int64]  # [N] resampled together: the prompt
    answer: NDArray[np.int64]  # [N] stretches of one answer have the same number
    position: NDArray[np.int64]  # [N] token of the turn at which the stretch begins; OPENING: its first cycle alone
    turn: NDArray[np.int64]  # [N] of the trajectory, from 0; 0 for an answer in one turn
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
        """K."""
        return self.reached.shape[1]

    def select(self, mask: NDArray[np.bool_]) -> "StepRecords":
        """The rows where ``mask`` is true."""
        names = (*LABELS, *OPTIONAL, "task", *PER_ROW, *DRAFT_STATS)
        return dataclasses.replace(self, **{name: getattr(self, name)[mask] for name in names})

    def relabelled(self, unit: NDArray[np.int64]) -> "StepRecords":
        """The same rows with other units."""
        return dataclasses.replace(self, unit=unit)

    def sample(self, units: int, seed: int = 0) -> "StepRecords":
        """At most so many units, drawn at random: bounds cost and the size of ``drift.jsonl``."""
        present = np.unique(self.unit)
        if len(present) <= units:
            return self
        kept = np.random.default_rng([seed, self.step]).choice(present, units, replace=False)
        return self.select(np.isin(self.unit, kept))

    def to_row(self) -> dict[str, Any]:
        """One line of ``drift.jsonl``; NaN becomes None."""
        row: dict[str, Any] = {"step": self.step, "task": self.task.tolist()}
        row |= {name: getattr(self, name).tolist() for name in LABELS}
        row |= {name: labels.tolist() for name in OPTIONAL if (labels := getattr(self, name)).any()}
        return row | {name: _rounded(getattr(self, name)) for name in (*PER_ROW, *DRAFT_STATS)}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "StepRecords":
        """The inverse of ``to_row``. ``UserError`` if the columns do not fit together."""
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
    """The union of parts of one step (workers), or of several steps; units stay apart where steps differ.

    Parts of one step keep their unit numbers: two workers that answer the same prompt share its unit.
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
    """A number for every distinct combination."""
    return np.unique(np.stack(keys, 1), axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _widened(table: Array, width: int) -> Array:
    missing = width - table.shape[1]
    return np.pad(table, ((0, 0), (0, missing))) if missing else table


def _rounded(table: Array) -> list[Any]:
    values = np.round(table, DIGITS).astype(object)
    values[np.isnan(table)] = None
    rows: list[Any] = values.tolist()
    return rows
