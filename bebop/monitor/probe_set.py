"""Direct measure of drift: the same contexts under the first distributions (p_0, q_0) and the current ones (p_t, q_t).

The first distributions give the acceptance that an entropy change alone would cause. It is the mean overlap at each
entropy, weighted by how often step t has that entropy (Oaxaca-Blinder). The entropy part is this value minus the first
overlap; the mismatch part is the current overlap minus this value. No slope over steps enters, so nothing that moves
with entropy over time can hide in it.

The mean at one entropy still compares different contexts, and contexts of high entropy may be harder for the head in
themselves. A ``Sweep`` of the first distributions over temperatures compares each context only with itself: with its
overlap at the temperature that gave it its current entropy.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.errors import UserError
from bebop.monitor.drift import Decomposition, split
from bebop.monitor.estimate import Array, Estimate, t_over_normal
from bebop.monitor.window import resample

KNOTS = 8  # of the curve overlap(H), at quantiles of the entropies of both times
MIN_SUPPORT = 0.9  # share of step t's contexts whose entropy the first distributions had too
PROBE_DRAWS = 3  # part of the seed, see ``bebop.monitor.slope``
REACH = 0.05  # an entropy just beyond a context's sweep counts as inside: part of its range, and nats


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeText:
    """Prompt with a completion of the first weights; each of its completion tokens is a context of the probe set."""

    prompt: tuple[int, ...]  # [P]
    answer: tuple[int, ...]  # [T]
    shown: int = 1  # the token of the completion whose distributions are kept for the report


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenProbs:
    """Target and draft distribution at one context, for the M tokens that either considers likely."""

    text: int  # number of the text
    context: str  # the end of what was read
    ids: tuple[int, ...]  # [M]
    tokens: tuple[str, ...]  # [M] as text; several ids may have the same, or none
    target: tuple[float, ...]  # [M] p
    draft: tuple[float, ...]  # [M] q
    overlap: float  # over the whole vocabulary


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbeReading:
    """Acceptance and entropy of the N contexts under one pair of distributions; contexts keep their order."""

    overlap: Array  # [N] sum of min(p, q), or p(argmax q) where drafts are greedy
    entropy: Array  # [N] H(p), nats
    unit: NDArray[np.int64] | None = None  # [N] what is resampled: the prompt of each context; None: all apart
    chance: float | None = None  # mean overlap of p of one context with q of another
    token_probs: tuple[TokenProbs, ...] = ()

    def __post_init__(self) -> None:
        shapes = {column.shape for column in (self.overlap, self.entropy, self.unit) if column is not None}
        if len(shapes) != 1 or self.overlap.ndim != 1:
            raise UserError(f"a reading of the probe set has shapes {sorted(shapes)}: give one number a context")

    def to_row(self) -> dict[str, Any]:
        """Return the row for ``drift.jsonl``."""
        unit = None if self.unit is None else self.unit.tolist()
        rounded = {"overlap": np.round(self.overlap, 5).tolist(), "entropy": np.round(self.entropy, 5).tolist()}
        probs = [dataclasses.asdict(token) for token in self.token_probs]
        return {**rounded, "unit": unit, "chance": self.chance, "token_probs": probs}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "ProbeReading":
        """Read a row that ``to_row`` wrote."""
        unit = None if row.get("unit") is None else np.asarray(row["unit"], dtype=np.int64)
        overlap, entropy = (np.asarray(row[name], dtype=float) for name in ("overlap", "entropy"))
        probs = tuple(TokenProbs(**{k: _frozen(v) for k, v in token.items()}) for token in row.get("token_probs", ()))
        return cls(overlap=overlap, entropy=entropy, unit=unit, chance=row.get("chance"), token_probs=probs)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sweep:
    """Results of the first weights at T temperatures, the run's own among them: rollouts, the probe set, or both."""

    entropy: tuple[float, ...] = ()  # nats, per temperature
    length: tuple[float, ...] = ()  # accept lengths
    readings: tuple[ProbeReading, ...] = ()  # of the probe set, at the other temperatures (of p and q)
    # [T, U, 4] per prompt (U): total and count of the accept length, total and count of the entropy. Resampled for
    # the interval of the slope.
    sums: Array = field(default_factory=lambda: np.zeros((0, 0, 4)))

    def __post_init__(self) -> None:
        sizes = {len(self.entropy), len(self.length), len(self.sums)}
        if len(sizes) != 1:
            raise UserError(f"a sweep has {sorted(sizes)} temperatures: give one entropy and one length for each")
        if self.sums.ndim != 3 or self.sums.shape[2] != 4:
            raise UserError(f"the sums of a sweep have shape {self.sums.shape}: give (temperatures, prompts, 4)")

    def to_row(self) -> dict[str, Any]:
        """Return the row for ``drift.jsonl``."""
        readings = [reading.to_row() for reading in self.readings]
        means = {"entropy": list(self.entropy), "length": list(self.length)}
        return means | {"bank": readings, "sums": np.round(self.sums, 5).tolist()}

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Sweep":
        """Read a row that ``to_row`` wrote."""
        readings = tuple(ProbeReading.from_row(reading) for reading in row["bank"])
        sums = np.asarray(row["sums"], dtype=float) if row["sums"] else np.zeros((0, 0, 4))
        return cls(entropy=tuple(row["entropy"]), length=tuple(row["length"]), readings=readings, sums=sums)


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def direct(
    before: ProbeReading, after: ProbeReading, sweep: Sequence[ProbeReading] = (), draws: int = 400, seed: int = 0
) -> Decomposition:
    """Split the change of the probe set's mean overlap. The bootstrap resamples the same prompts at both times.

    ``sweep``: the first distributions at several temperatures; without it, other contexts of the same entropy stand in.
    """
    counts = {len(reading.overlap) for reading in (before, after, *sweep)}
    if len(counts) != 1:
        raise UserError(f"readings of {sorted(counts)} contexts: give the same probe set each time")
    unit = np.arange(len(before.overlap)) if before.unit is None else before.unit
    present, number = np.unique(unit, return_inverse=True)
    rng = np.random.default_rng([seed, len(unit), PROBE_DRAWS])
    weights = resample(len(present), draws, rng)[:, number.reshape(-1)]
    everything = np.concatenate([np.ones((1, len(unit))), weights])  # the first row is the point
    if sweep:
        expected, support = _matched((before, *sweep), after.entropy)
        parts = _means(before, after, everything, (everything @ expected) / everything.sum(1))
    else:
        support = _support(before.entropy, after.entropy)
        parts = _means(before, after, everything, _reweighted(before, after, everything))
    wider = t_over_normal(len(present) - 1)
    change, entropy, entropies = (Estimate(point=float(p[0]), draws=p[0] + wider * (p[1:] - p[0])) for p in parts)
    reason = (
        "" if support >= MIN_SUPPORT else f"only {support:.0%} of the contexts have an entropy that occurred before"
    )
    if reason:
        entropy = Estimate.unknown(draws)
    source = "bank" if sweep else "reweighted bank"
    return split("bank", "rate", source, change, entropy, entropies, reason)


def _means(before: ProbeReading, after: ProbeReading, weights: Array, expected: Array) -> tuple[Array, Array, Array]:
    """Return the change of overlap, its entropy part and the change of entropy, each [B].

    ``expected`` [B] is the mean overlap that the entropies alone would give.
    """
    total = weights.sum(1)
    was, now = weights @ before.overlap / total, weights @ after.overlap / total
    return now - was, expected - was, weights @ (after.entropy - before.entropy) / total


def _matched(readings: Sequence[ProbeReading], entropy: Array) -> tuple[Array, float]:
    """Return each context's overlap [N] at the temperature of its ``entropy`` [N], and the share within reach."""
    entropies = np.stack([reading.entropy for reading in readings])  # [T, N]
    overlap = np.stack([reading.overlap for reading in readings])
    order = entropies.argsort(0, kind="stable")
    entropies, overlap = np.take_along_axis(entropies, order, 0), np.take_along_axis(overlap, order, 0)
    matched = np.array([np.interp(entropy[i], entropies[:, i], overlap[:, i]) for i in range(len(entropy))])
    slack = REACH * (entropies[-1] - entropies[0]) + REACH
    inside = (entropy >= entropies[0] - slack) & (entropy <= entropies[-1] + slack)
    return matched, float(inside.mean())


def _reweighted(before: ProbeReading, after: ProbeReading, weights: Array) -> Array:
    """Return the mean overlap [B] of the first distributions at the current entropies, for weights [B, N]."""
    knots = np.unique(np.quantile(np.concatenate([before.entropy, after.entropy]), np.linspace(0, 1, KNOTS)))
    then, now = _hats(before.entropy, knots), _hats(after.entropy, knots)
    total, size, middle = weights.sum(1), len(knots), before.overlap.mean()
    gram = (weights @ (then[:, :, None] * then[:, None, :]).reshape(len(then), -1)).reshape(-1, size, size)
    right = weights @ (then * (before.overlap - middle)[:, None])
    # A tiny ridge: a knot without any context of a replicate nearby gets the mean instead of a singular matrix.
    ridge = 1e-9 * total[:, None, None] * np.eye(size)
    curve = np.linalg.solve(gram + ridge, right[..., None])[..., 0]
    means: Array = middle + ((weights @ now) * curve).sum(1) / total
    return means


def _hats(entropy: Array, knots: Array) -> Array:
    """Return a piecewise linear basis [N, J]: a histogram with overlapping bins, hence unbiased within bins too."""
    if len(knots) == 1:
        return np.ones((len(entropy), 1))
    return np.stack([np.interp(entropy, knots, row) for row in np.eye(len(knots))], 1)


def _support(before: Array, after: Array) -> float:
    """Return the share of the later entropies inside the range of the earlier ones."""
    if not len(before):
        return math.nan
    return float(((after >= before.min() - 1e-9) & (after <= before.max() + 1e-9)).mean())
