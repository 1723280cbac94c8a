"""*Signed* slope of acceptance on entropy (dvalue/dH, tokens or rate per nat), from three sources.

``early``: least squares over the steps at the beginning of the run, as the paper does. Weights and entropy move
together there, so mismatch that grows with the entropy's change is mistaken for slope. ``frozen``: completions of one
step, hence of one set of weights, grouped by entropy. ``temperature``: the same weights sampled at several
temperatures. A slope that the data do not determine is marked *unidentified*, with the reason, and has no interval.

The intervals vary over other steps of the run (early) or other prompts (frozen, temperature). Intervals of 95 % hold
the truth in 93 to 97 % of simulated runs: with steps that correlate by half (early), 16 prompts or more (frozen), 3 or
more (temperature). See ``tests/monitor/test_coverage.py``.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bebop.monitor.estimate import Array, Estimate, t_over_normal
from bebop.monitor.records import StepRecords
from bebop.monitor.window import Measure, per_unit, resample, table

MIN_ENTROPY_SPREAD = 0.01  # nats; below this standard deviation the slope is unidentified (SPEC 1.2)
MIN_STEPS = 20  # of the early window; it takes this or 10 % of the run's steps, whichever is more
BLOCK = 5  # steps resampled together
BUCKETS = 10  # of completions by entropy
MIN_UNITS = 16  # prompts below which a frozen slope is not tried
# Parts of seeds, so that no slope is resampled with the numbers that a window of some step is (``Window.of``).
FROZEN_DRAWS, TEMPERATURE_DRAWS = 1, 2
Source = Literal["early", "frozen", "temperature"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slope:
    """Signed slope with its source."""

    source: Source
    value: Estimate  # per nat
    spread: float  # standard deviation of the entropies it was fitted on, nats
    unidentified: str = ""  # why it is not to be used; empty if it is


def early_window(steps: int | None) -> int:
    """Return m = max(20, 10 % of the run's steps); ``steps`` is None if unknown."""
    return max(MIN_STEPS, math.ceil(0.1 * steps) if steps else 0)


def early_slope(
    entropies: Sequence[float], values: Sequence[float], draws: int = 400, seed: int = 0, least: int = MIN_STEPS
) -> Slope:
    """Fit least squares over step values [m], with a bootstrap of its residuals in blocks of 5 neighbouring steps.

    The slope is unidentified with fewer than ``least`` steps.
    """
    entropy, value = np.asarray(entropies, dtype=float), np.asarray(values, dtype=float)
    reason = _too_little(entropy, value, least, "steps")
    if reason:
        return _none("early", reason, draws, entropy)
    point, residuals, lever = _least_squares(entropy, value, np.ones_like(entropy))
    count = len(entropy)
    blocks = math.ceil(count / BLOCK)
    starts = np.random.default_rng([seed, count]).integers(count, size=(draws, blocks))
    picked = (starts[..., None] + np.arange(BLOCK)).reshape(draws, -1)[:, :count] % count
    noise = residuals[picked] @ lever * math.sqrt(count / (count - 2))
    wider = t_over_normal(count / BLOCK - 1)
    return Slope(source="early", value=Estimate(point=point, draws=point + wider * noise), spread=float(entropy.std()))


def frozen_slope(steps: Sequence[StepRecords], measure: Measure, draws: int = 400, seed: int = 0) -> Slope:
    """Fit weighted least squares over buckets of completions by entropy, within steps; units are resampled.

    Value and entropy of a completion are relative to the means of its step, so changes from step to step do not enter.
    Buckets are formed once: their means are totals over counts.
    """
    answers = [(record.unit, *_within(np.stack(measure.sums(table(record))))) for record in steps if len(record)]
    entropies = np.concatenate([entropy for _, _, _, entropy in answers]) if answers else np.zeros(0)
    counts = np.concatenate([count for _, _, count, _ in answers]) if answers else np.zeros(0)
    units = sum(len(np.unique(unit)) for unit, *_ in answers)
    if units < MIN_UNITS:
        return _none("frozen", f"{units} prompts, it takes {MIN_UNITS}", draws)
    if not counts.any():
        return _none("frozen", "entropy or acceptance was not measured", draws)
    spread = math.sqrt(np.average(entropies**2, weights=counts))
    if spread < MIN_ENTROPY_SPREAD:
        flat = f"entropy varies by {spread:.3g} nats between completions, it takes {MIN_ENTROPY_SPREAD}"
        return _none("frozen", flat, draws)
    edges = np.quantile(entropies[counts > 0], np.linspace(0, 1, BUCKETS + 1)[1:-1])
    sums = [_bucket_sums(*answer, edges) for answer in answers]  # each [U, 3 J]
    rng = np.random.default_rng([seed, len(sums), FROZEN_DRAWS])
    weights = np.concatenate([resample(len(part), draws, rng) for part in sums], 1)  # [B, all U]
    columns = np.concatenate(sums)
    point = float(_bucket_slope(columns.sum(0)[None])[0])
    away = t_over_normal(units - len(sums)) * (_bucket_slope(weights @ columns) - point)
    return Slope(source="frozen", value=Estimate(point=point, draws=point + away), spread=spread)


def temperature_slope(
    entropies: Sequence[float], values: Sequence[float], sums: Array, draws: int = 400, seed: int = 0
) -> Slope:
    """Fit least squares over the T pairs (entropy, value) of one set of weights at several temperatures.

    The pairs themselves are no sample: all come from the same texts, so they err together, and lie on a curve rather
    than around a line. Prompts are the sample. ``sums`` [T, U, 4] of a ``Sweep`` are resampled by prompt, with the
    same prompts at every temperature. With fewer than three prompts the slope has a point and no interval.
    """
    entropy, value = np.asarray(entropies, dtype=float), np.asarray(values, dtype=float)
    reason = _too_little(entropy, value, 4, "temperatures")
    if reason:
        return _none("temperature", reason, draws, entropy)
    point, spread = _least_squares(entropy, value, np.ones_like(entropy))[0], float(entropy.std())
    units = sums.shape[1]
    if units < 3:
        bare = Estimate(point=point, draws=np.full(draws, math.nan))
        reason = f"{units} prompts in the sweep, it takes 3"
        return Slope(source="temperature", value=bare, spread=spread, unidentified=reason)
    rng = np.random.default_rng([seed, units, TEMPERATURE_DRAWS])
    weights = np.concatenate([np.ones((1, units)), resample(units, draws, rng)])  # the first row is the point
    totals, counts, entropies, positions = np.moveaxis(np.einsum("bu,tuk->btk", weights, sums), -1, 0)
    # A replicate that drafted nothing at some temperature gets the slope of the point.
    slopes = _slopes(*(_filled(*pair) for pair in ((entropies, positions), (totals, counts))))
    away = t_over_normal(units - 1) * np.where(np.isfinite(slopes), slopes - slopes[0], 0.0)[1:]
    return Slope(source="temperature", value=Estimate(point=point, draws=point + away), spread=spread)


def _within(sums: Array) -> tuple[Array, Array, Array]:
    """Return value, count and entropy [N] of completions, from ``Measure.sums`` [4, N], relative to the step's means.

    A completion with an unmeasured quantity has a count of 0.
    """
    total, count, entropy, positions = sums
    kept = (count > 0) & (positions > 0) & np.isfinite(total) & np.isfinite(entropy)
    weight = np.where(kept, count, 0.0)
    value = np.divide(total, count, out=np.zeros_like(total), where=kept)
    target_entropy = np.divide(entropy, positions, out=np.zeros_like(total), where=kept)
    if kept.any():
        value = np.where(kept, value - np.average(value, weights=weight), 0.0)
        target_entropy = np.where(kept, target_entropy - np.average(target_entropy, weights=weight), 0.0)
    return value, weight, target_entropy


def _bucket_sums(unit: NDArray[np.int64], value: Array, count: Array, entropy: Array, edges: Array) -> Array:
    """Return sums per unit and bucket [U, 3 J]: counts, then totals of value, then totals of entropy."""
    member = np.eye(BUCKETS)[np.searchsorted(edges, entropy)] * count[:, None]
    return per_unit(unit, np.concatenate([member, member * value[:, None], member * entropy[:, None]], 1))


def _bucket_slope(sums: Array) -> Array:
    """Fit weighted least squares through bucket means: slopes [B] from ``_bucket_sums`` of all units [B, 3 J]."""
    count, value, entropy = np.split(sums, 3, axis=1)
    x, y = (np.divide(total, count, out=np.zeros_like(total), where=count > 0) for total in (entropy, value))
    everything = count.sum(1)
    x = x - ((count * x).sum(1) / everything)[:, None]
    y = y - ((count * y).sum(1) / everything)[:, None]
    slopes: Array = (count * x * y).sum(1) / (count * x * x).sum(1)
    return slopes


def _least_squares(x: Array, y: Array, weight: Array) -> tuple[float, Array, Array]:
    """Return the slope, the residuals [m], and the weights [m] with which an error in y enters the slope."""
    centred = x - np.average(x, weights=weight)
    lever = weight * centred / (weight * centred**2).sum()
    slope = float(lever @ y)
    return slope, y - np.average(y, weights=weight) - slope * centred, lever


def _slopes(x: Array, y: Array) -> Array:
    """Return the slopes [B] of least squares through the T points of each replicate [B, T]."""
    x, y = x - x.mean(1, keepdims=True), y - y.mean(1, keepdims=True)
    slopes: Array = np.divide((x * y).sum(1), (x * x).sum(1), out=np.full(len(x), math.nan), where=(x * x).any(1))
    return slopes


def _filled(total: Array, count: Array) -> Array:
    """Return total / count, NaN where the count is 0."""
    return np.divide(total, count, out=np.full(total.shape, math.nan), where=count > 0)


def _too_little(entropy: Array, value: Array, least: int, what: str) -> str:
    """Return why the pairs give no slope; empty if they do."""
    assert entropy.shape == value.shape
    if len(entropy) < least:
        return f"{len(entropy)} {what}, it takes {least}"
    if not (np.isfinite(entropy).all() and np.isfinite(value).all()):
        return "entropy or acceptance was not measured"
    if entropy.std() < MIN_ENTROPY_SPREAD:
        return f"entropy varies by {entropy.std():.3g} nats over the {what}, it takes {MIN_ENTROPY_SPREAD}"
    return ""


def _none(source: Source, reason: str, draws: int, entropy: Array | None = None) -> Slope:
    spread = float(entropy.std()) if entropy is not None and len(entropy) else math.nan
    return Slope(source=source, value=Estimate.unknown(draws), spread=spread, unidentified=reason)
