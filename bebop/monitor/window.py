"""Totals over completions with bootstrap replicates: ``+`` merges them, and one division at the end gives means.

The bootstrap resamples *units* (the completions to one prompt), never cycles. Cycles of one completion resemble one
another, and an interval over cycles is too narrow (SPEC 0.6). Replicates of disjoint data add up to replicates of the
union, so windows of workers and of steps merge exactly as their points do.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bebop.monitor.estimate import Array, Estimate, t_over_normal
from bebop.monitor.records import StepRecords
from bebop.trajectory import DRAFT_STATS

Rate = Literal["accepted", "overlap", "target_only"]
FIXED = ("cycles", "emitted", "entropy_sum", "entropy_count", "answers", "length_by_answer", "entropy_by_answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
    """Monitored quantity: accept length (``position`` None, tokens per cycle) or the rate at a draft position (from 1).

    ``rate`` is the source of acceptance: counts, or the expectation given the distributions, which has less variance
    (SPEC 0.6). The expectation is ``overlap`` if drafts are sampled from q, ``target_only`` if they are q's most likely
    token.
    """

    position: int | None = None
    rate: Rate = "accepted"

    @property
    def name(self) -> str:
        """Return ``length`` or ``position/k``."""
        return "length" if self.position is None else f"position/{self.position}"

    def sums(self, columns: Array) -> tuple[Array, Array, Array, Array]:
        """Return the value's total and count and the entropy's total and count from columns [..., C] of ``table``.

        A position beyond those of ``columns`` was not drafted: all four are 0, so it counts as not measured.
        """
        if self.position is not None:
            if self.position > _drafts(columns):
                nothing = np.zeros(columns.shape[:-1])
                return nothing, nothing, nothing, nothing
            return (
                _per_position(columns, self.rate)[..., self.position - 1],
                _per_position(columns, "reached")[..., self.position - 1],
                _per_position(columns, "target_entropy")[..., self.position - 1],
                _per_position(columns, "reached")[..., self.position - 1],
            )
        cycles, emitted, entropy, count = (columns[..., i] for i in range(4))
        if self.rate != "accepted":
            emitted = cycles + _per_position(columns, self.rate).sum(-1)
        return emitted, cycles, entropy, count


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """Totals of some completions and B bootstrap replicates of them; ``+`` merges disjoint data."""

    totals: Array  # [C], see ``table``
    replicates: Array  # [B, C]
    units: int  # resampled units
    strata: int  # steps (or parts) that were resampled each by itself

    @classmethod
    def of(cls, records: StepRecords, draws: int = 400, seed: int = 0) -> "Window":
        """Resample the units of ``records``; the same step and seed give the same draws."""
        columns = per_unit(records.unit, table(records))
        weights = resample(len(columns), draws, np.random.default_rng([seed, records.step]))
        return cls(totals=columns.sum(0), replicates=weights @ columns, units=len(columns), strata=1)

    def __add__(self, other: "Window") -> "Window":
        """Return the window of the union."""
        if not isinstance(other, Window):
            return NotImplemented
        width = max(len(self.totals), len(other.totals))
        return Window(
            totals=_wide(self.totals, width) + _wide(other.totals, width),
            replicates=_wide(self.replicates, width) + _wide(other.replicates, width),
            units=self.units + other.units,
            strata=self.strata + other.strata,
        )

    @property
    def drafts(self) -> int:
        """Return K, the number of draft positions."""
        return _drafts(self.totals)

    def value(self, measure: Measure) -> Estimate:
        """Return the measure's estimate, weighted by cycles."""
        totals, replicates = measure.sums(self.totals), measure.sums(self.replicates)
        return self._ratio(totals[0], totals[1], replicates[0], replicates[1])

    def entropy(self, measure: Measure) -> Estimate:
        """Return the target's entropy over the positions of the measure, nats."""
        totals, replicates = measure.sums(self.totals), measure.sums(self.replicates)
        return self._ratio(totals[2], totals[3], replicates[2], replicates[3])

    def by_request(self) -> tuple[Estimate, Estimate]:
        """Return accept length and entropy with equal weight for every completion, whatever its length."""
        answers, replicated = self.totals[4], self.replicates[:, 4]
        length, entropy = (self._ratio(self.totals[i], answers, self.replicates[:, i], replicated) for i in (5, 6))
        return length, entropy

    def gap(self, first: Rate, second: Rate, position: int | None = None) -> Estimate:
        """Return the mean of ``first`` minus ``second`` over the same verified positions (all of them, or one)."""
        part = slice(None) if position is None else slice(position - 1, position)
        totals, replicates = (
            (
                _per_position(columns, first)[..., part].sum(-1) - _per_position(columns, second)[..., part].sum(-1),
                _per_position(columns, "reached")[..., part].sum(-1),
            )
            for columns in (self.totals, self.replicates)
        )
        return self._ratio(totals[0], totals[1], replicates[0], replicates[1])

    def _ratio(self, total: Array, count: Array, totals: Array, counts: Array) -> Estimate:
        """Return total / count, with draws widened for few units; unknown without data or with a single unit."""
        wider = t_over_normal(self.units - self.strata)
        if not (np.isfinite(total) and count > 0 and np.isfinite(wider)):
            point = float(total / count) if count > 0 else float("nan")
            return Estimate(point=point, draws=np.full(len(totals), np.nan))
        point = float(total / count)
        # A replicate without any count gets the value of the point.
        ratios = np.divide(totals, counts, out=np.full(len(totals), point), where=counts > 0)
        return Estimate(point=point, draws=point + wider * (ratios - point))


def table(records: StepRecords) -> Array:
    """Return [N, C]: the columns FIXED, then each of DRAFT_STATS for position 1, those for position 2, and so on."""
    answers, first, number = np.unique(records.answer, return_index=True, return_inverse=True)
    opens = np.zeros(len(records))
    opens[first] = 1.0
    per_answer = [
        np.bincount(number, getattr(records, name), len(answers))[number] if len(answers) else opens
        for name in ("emitted", "cycles", "entropy_sum", "entropy_count")
    ]
    with np.errstate(invalid="ignore", divide="ignore"):
        length, entropy = opens * per_answer[0] / per_answer[1], opens * per_answer[2] / per_answer[3]
    fixed = [records.cycles, records.emitted, records.entropy_sum, records.entropy_count, opens, length, entropy]
    positions = np.stack([getattr(records, name) for name in DRAFT_STATS], -1).reshape(len(records), -1)
    return np.concatenate([np.stack(fixed, 1), positions], 1)


def per_unit(unit: NDArray[np.int64], columns: Array) -> Array:
    """Sum the rows of columns [N, C] by unit: [U, C], units in ascending order."""
    present, number = np.unique(unit, return_inverse=True)
    sums = np.zeros((len(present), columns.shape[1]))
    np.add.at(sums, number.reshape(-1), columns)
    return sums


def resample(units: int, draws: int, rng: np.random.Generator) -> Array:
    """Return bootstrap weights [B, U]: n - 1 of the n units with replacement, scaled by n / (n - 1) (Rao and Wu).

    Drawing n - 1 makes the variance unbiased, which matters for steps with few prompts. One unit gets weights of 1.
    """
    if units < 2:
        return np.ones((draws, units))
    picks = rng.integers(units, size=(draws, units - 1)) + units * np.arange(draws)[:, None]
    counts = np.bincount(picks.ravel(), minlength=draws * units).reshape(draws, units).astype(np.float64)
    return counts * (units / (units - 1))


def _drafts(columns: Array) -> int:
    """Return K, the number of draft positions in columns [..., C]."""
    return (columns.shape[-1] - len(FIXED)) // len(DRAFT_STATS)


def _per_position(columns: Array, name: str) -> Array:
    """Return the columns [..., K] of the per-position sum ``name``."""
    return columns[..., len(FIXED) + DRAFT_STATS.index(name) :: len(DRAFT_STATS)]


def _wide(columns: Array, width: int) -> Array:
    """Pad with zeros the positions that only the other window has: nothing reached them here."""
    missing = width - columns.shape[-1]
    return np.concatenate([columns, np.zeros((*columns.shape[:-1], missing))], -1) if missing else columns
