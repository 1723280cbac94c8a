"""Every interval that the monitor prints holds the truth in 90 of 100 repetitions or more; a row per kind.

What is printed where: ``Explanation.metrics`` (drift/...), the controller's evidence, the cards of the report.
"""

import dataclasses
from collections.abc import Mapping
from functools import cache, partial

import numpy as np
import pytest

from bebop.config.job import Costs
from bebop.monitor.drift import Decomposition, decompose
from bebop.monitor.drift_monitor import DriftMonitor, Explanation, MonitorSettings, boundary, length_gain
from bebop.monitor.estimate import Array, Estimate
from bebop.monitor.probe_set import ProbeReading, Sweep, direct
from bebop.monitor.records import from_averages
from bebop.monitor.slope import early_slope, frozen_slope, temperature_slope
from bebop.monitor.window import Measure, Window
from tests.covering import Row, Trial, cases, of_estimate, shares, short
from tests.monitor.synthetic import Truth, constant, ramp, step_records

DRAWS = 300
STEADY = Truth(entropy=constant(0.5), mismatch=constant(0), noise=0.2)
MEASURES = {"length": Measure(), **{f"position/{k}": Measure(position=k) for k in (1, 2, 3)}}
MEASURES |= {"expected length": Measure(rate="overlap"), "greedy length": Measure(rate="target_only")}
COSTS = Costs(draft=0.1, verify=0.02)

# ---- windows: means over answers, over what other prompts would have given


def means(window: Window) -> dict[str, Estimate]:
    estimates = {name: window.value(measure) for name, measure in MEASURES.items()}
    estimates |= {f"entropy, {name}": window.entropy(MEASURES[name]) for name in ("length", "position/2")}
    estimates |= dict(zip(("length by request", "entropy by request"), window.by_request(), strict=True))
    return estimates | {"boundary": boundary(window), "boundary/2": window.gap("overlap", "target_only", 2)}


@cache
def true_means() -> dict[str, float]:
    endless = Window.of(step_records(STEADY, 0, np.random.default_rng(5), prompts=4_000), draws=2)
    return {name: estimate.point for name, estimate in means(endless).items()}


def windows(seed: int, prompts: int, steps: int, level: float = 0.95) -> Mapping[str, Trial]:
    rng = np.random.default_rng([41, seed, prompts])
    first, *rest = (Window.of(step_records(STEADY, i, rng, prompts=prompts), DRAWS, seed) for i in range(steps))
    return {n: of_estimate(e, true_means()[n], level) for n, e in means(sum(rest, first)).items()}


def gains(seed: int) -> Mapping[str, Trial]:
    """What another number of drafts promises; the truth is that of the number it chose."""
    truth, now = true_means(), 2
    window = Window.of(step_records(STEADY, 0, np.random.default_rng([42, seed])), DRAWS, seed)
    best, gain = length_gain(window, now, COSTS)
    rates = [truth["position/1"], truth["position/2"], truth["position/2"]]
    lengths = 1 + np.cumsum(np.cumprod(rates))
    speeds = lengths / (1 + np.arange(1, 4) * (COSTS.draft + COSTS.verify))
    return {"length gain": of_estimate(gain, speeds[best - 1] / speeds[now - 1] - 1)}


def averages(seed: int) -> Mapping[str, Trial]:
    """A log of one line a step: steps scatter, and their scatter is all there is."""
    rng = np.random.default_rng([43, seed])
    monitor = DriftMonitor(MonitorSettings(draws=DRAWS, seed=seed))
    for step in range(8):
        length, entropy = 2.5 + 0.05 * rng.normal(), 0.5 + 0.02 * rng.normal()
        explanation = monitor.observe(from_averages(step, length=length, entropy=entropy, cycles=rng.uniform(80, 120)))
    assert explanation is not None
    part = explanation.parts["length"]
    pairs = {"length": (explanation.length, 2.5), "entropy": (explanation.entropy, 0.5), "change": (part.change, 0.0)}
    return {n: of_estimate(*pair) for n, pair in (pairs | {"entropy change": (part.entropy_change, 0.0)}).items()}


# ---- slopes


def stepwise(seed: int, correlation: float) -> tuple[Array, Array]:
    """Entropies and values of 20 steps, whose errors may depend on those before them."""
    rng = np.random.default_rng([44, seed])
    entropy = 0.5 + 0.01 * np.arange(20) + 0.02 * rng.normal(size=20)
    error = np.zeros(20)
    for i in range(20):
        error[i] = correlation * error[i - 1] + 0.03 * rng.normal()
    return entropy, 3.2 - 0.8 * entropy + error


def early(seed: int, correlation: float) -> Mapping[str, Trial]:
    return {"slope": of_estimate(early_slope(*stepwise(seed, correlation), DRAWS, seed).value, -0.8)}


def frozen(seed: int, prompts: int = 12) -> Mapping[str, Trial]:
    rng = np.random.default_rng([45, seed])
    steps = [step_records(STEADY, step, rng, prompts=prompts) for step in range(5)]
    return {"slope": of_estimate(frozen_slope(steps, Measure(rate="overlap"), DRAWS, seed).value, STEADY.slope)}


TEMPERATURES = np.array([1.0, 0.4, 0.6, 0.8, 1.25, 1.5, 1.8])


def swept(rng: np.random.Generator, prompts: int) -> Sweep:
    """Prompts with two texts of unequal length; accept length falls along a curve of each prompt's own."""
    size = rng.integers(10, 120, (prompts, 2))
    warm = np.exp(0.3 * rng.normal(size=(prompts, 1)) + 0.2 * rng.normal(size=(prompts, 2)))
    entropy = 0.5 * warm * TEMPERATURES[:, None, None] ** 1.3 * np.exp(0.03 * rng.normal(size=(7, prompts, 2)))
    steep = -0.8 + 0.3 * rng.normal(size=(prompts, 1)) + 0.1 * rng.normal(size=(prompts, 2))
    level = 3.1 + 0.2 * rng.normal(size=(prompts, 1)) + 0.1 * rng.normal(size=(prompts, 2))
    length = level + steep * entropy + 0.2 * entropy**2 + 0.05 * rng.normal(size=(7, prompts, 2))
    count = np.broadcast_to(size, length.shape)
    sums = np.stack([length * size, count, entropy * size, count], -1).sum(2)
    totals = sums.sum(1)
    return Sweep(entropy=tuple(totals[:, 2] / totals[:, 3]), length=tuple(totals[:, 0] / totals[:, 1]), sums=sums)


@cache
def true_swept() -> float:
    endless = swept(np.random.default_rng(6), 50_000)
    return float(np.polyfit(endless.entropy, endless.length, 1)[0])


def temperature(seed: int, prompts: int) -> Mapping[str, Trial]:
    sweep = swept(np.random.default_rng([46, seed, prompts]), prompts)
    slope = temperature_slope(sweep.entropy, sweep.length, sweep.sums, DRAWS, seed)
    return {"slope": of_estimate(slope.value, true_swept())}


# ---- the split of a change, under each slope

DRIFT = Truth(entropy=ramp(0.5, 0.3), mismatch=ramp(0, -0.2))
RATES = Truth(
    entropy=ramp(0.5, 0.3), mismatch=ramp(0, -0.1), slope=-0.4, level=0.8, rates=True, noise=0.02, spread=0.12
)
WHEN = (0, 1, 2, 3, 4, 20, 21, 22)  # the reference and the last steps


def moved(truth: Truth) -> tuple[float, float]:
    """Change of entropy and mismatch from the reference to the last steps."""
    ends = [[np.mean([series(s) for s in steps]) for steps in (WHEN[:5], WHEN[5:])]
            for series in (truth.entropy, truth.mismatch)]  # fmt: skip
    temperature, mismatch = (float(now - then) for then, now in ends)
    return temperature, mismatch


def of_parts(part: Decomposition, temperature: float, entropy: float, mismatch: float) -> dict[str, Trial]:
    assert not part.unidentified, part.unidentified
    true = {"change": entropy + mismatch, "entropy": entropy, "mismatch": mismatch, "entropy_change": temperature}
    return {f"{part.name}, {part.source}: {n}": of_estimate(getattr(part, n), value) for n, value in true.items()}


def watched(truth: Truth, seed: int, sweep: Sweep | None = None) -> Explanation:
    rng, monitor = np.random.default_rng([47, seed]), DriftMonitor(MonitorSettings(draws=DRAWS, seed=seed))
    for step in WHEN:
        explanation = monitor.observe(step_records(truth, step, rng), sweep=sweep if step == 0 else None)
    assert explanation is not None
    return explanation


def straight(seed: int) -> Sweep:
    """A sweep along the line that ``DRIFT`` moves on, of 24 prompts with slopes of their own."""
    rng = np.random.default_rng([48, seed])
    warm, level = 0.5 * np.exp(0.2 * rng.normal(size=24)), 3.2 + 0.2 * rng.normal(size=24)
    steep = DRIFT.slope + 0.15 * rng.normal(size=24)
    entropy = warm * TEMPERATURES[:, None]
    ones = np.ones_like(entropy)
    sums = np.stack([level + steep * entropy, ones, entropy, ones], -1)
    # Prompts with steeper slopes are no warmer than others, so that the slope of means is the mean slope.
    return Sweep(entropy=tuple(entropy.mean(1)), length=tuple((level + steep * entropy).mean(1)), sums=sums)


def split(seed: int) -> Mapping[str, Trial]:
    """The accept length under the slopes over answers and over temperatures."""
    (temperature, mismatch), explanation = moved(DRIFT), watched(DRIFT, seed, straight(seed))
    parts = [explanation.by_slope[source] for source in ("frozen", "temperature")]
    splits = [of_parts(part, temperature, DRIFT.slope * temperature, mismatch) for part in parts]
    return {name: trial for part in splits for name, trial in part.items()}


def split_rates(seed: int) -> Mapping[str, Trial]:
    """The first draft's rate; later ones are conditional on reaching them, and have other truths."""
    temperature, mismatch = moved(RATES)
    return of_parts(watched(RATES, seed).parts["position/1"], temperature, RATES.slope * temperature, mismatch)


def split_early(seed: int) -> Mapping[str, Trial]:
    """Entropy alone moves while the slope is learnt, as it takes for granted."""
    rng, truth = np.random.default_rng([49, seed]), dataclasses.replace(DRIFT, mismatch=constant(0))
    entropies = truth.entropy(0) + np.arange(20) * 0.01 + 0.02 * rng.normal(size=20)
    slope = early_slope(entropies, 3.2 + truth.slope * entropies + 0.03 * rng.normal(size=20), DRAWS, seed)
    reference, now = (pooled(truth, rng, steps) for steps in (WHEN[:5], WHEN[5:]))
    temperature = moved(truth)[0]
    return of_parts(decompose(Measure(), reference, now, slope), temperature, truth.slope * temperature, 0.0)


def pooled(truth: Truth, rng: np.random.Generator, steps: tuple[int, ...]) -> Window:
    first, *rest = (Window.of(step_records(truth, step, rng), DRAWS) for step in steps)
    return sum(rest, first)


def by_task(seed: int) -> Mapping[str, Trial]:
    """Both halves of the prompts move alike; each is held against itself."""
    rng, monitor = np.random.default_rng([50, seed]), DriftMonitor(MonitorSettings(draws=DRAWS, seed=seed))
    for step in WHEN:
        monitor.observe(step_records(DRIFT, step, rng, prompts=24))
    temperature, mismatch = moved(DRIFT)
    parts = monitor.breakdown("task")
    splits = {task: of_parts(part, temperature, DRIFT.slope * temperature, mismatch) for task, part in parts.items()}
    return {f"{task}: {name}": trial for task, part in splits.items() for name, trial in part.items()}


# ---- the probe set: the same contexts under both distributions


def distributions(
    rng: np.random.Generator, temperature: float, mismatch: float, prompts: int, temperatures: tuple[float, ...] = ()
) -> list[ProbeReading]:
    """Readings before and after, and at ``temperatures``, of prompts of 8 contexts that share part of everything.

    An entropy h costs a context 0.25 (1 - exp(-h)) of its overlap, and some of that if it is hard, besides.
    """
    unit = np.repeat(np.arange(prompts), 8)
    both = partial(shared, rng, unit)
    cold, ease, moves, loss = np.exp(0.3 * both()) * rng.gamma(2.0, 0.25, len(unit)), both(), both(), both()
    hot = cold * np.exp(temperature + 0.15 * moves)

    def reading(entropy: Array, lost: Array | float = 0.0) -> ProbeReading:
        overlap = 0.85 - 0.25 * (1 - np.exp(-entropy)) + 0.04 * ease - lost
        return ProbeReading(overlap=overlap, entropy=entropy, unit=unit)

    return [reading(cold), reading(hot, mismatch * (1 + 0.5 * loss)), *(reading(cold * x) for x in temperatures)]


def shared(rng: np.random.Generator, unit: "np.ndarray[tuple[int], np.dtype[np.int64]]") -> Array:
    """Standard normal, half of its variance common to a prompt."""
    return (rng.normal(size=int(unit.max()) + 1)[unit] + rng.normal(size=len(unit))) / np.sqrt(2)


@cache
def true_split(temperature: float, mismatch: float) -> tuple[float, float, float]:
    before, after = distributions(np.random.default_rng(7), temperature, mismatch, 40_000)
    entropy = float(np.mean(after.overlap - before.overlap)) + mismatch
    return float(np.mean(after.entropy - before.entropy)), entropy, -mismatch


def probe_set(seed: int, temperatures: tuple[float, ...], prompts: int = 24) -> Mapping[str, Trial]:
    temperature, mismatch = 0.2, 0.03
    before, after, *sweep = distributions(
        np.random.default_rng([51, seed]), temperature, mismatch, prompts, temperatures
    )
    return of_parts(direct(before, after, sweep, DRAWS, seed), *true_split(temperature, mismatch))


SWEPT = (0.3, 0.5, 0.75, 1.25, 1.6, 2.2, 3.0)
ROWS = (
    Row("means of a step", "12 prompts", partial(windows, prompts=12, steps=1), quick=40),
    Row("means of a small step", "4 prompts", partial(windows, prompts=4, steps=1)),
    Row("means of three steps", "3 x 4 prompts", partial(windows, prompts=4, steps=3)),
    Row("means for the controller", "12 prompts", partial(windows, prompts=12, steps=1, level=0.999), least=0.98),
    Row("gain of another length", "12 prompts", gains, quick=40),
    Row("a log of averages", "8 steps", averages, runs=100, quick=20),
    Row("early slope", "independent steps", partial(early, correlation=0.0)),
    Row("early slope", "dependent steps", partial(early, correlation=0.5), quick=200),
    Row("frozen slope", "20 prompts", partial(frozen, prompts=4), quick=40),
    Row("frozen slope", "60 prompts", frozen),
    Row("temperature slope", "8 prompts", partial(temperature, prompts=8), runs=300, quick=300),
    *(Row("temperature slope", f"{n} prompts", partial(temperature, prompts=n), runs=300) for n in (4, 24)),
    Row("temperature slope", "100 prompts", partial(temperature, prompts=100)),
    Row("split of the accept length", "prompts", split),
    Row("split of a rate", "prompts", split_rates),
    Row("split by task", "prompts", by_task),
    Row("split by the early slope", "steps and prompts", split_early, runs=100, quick=20),
    Row("split on the bank", "24 prompts", partial(probe_set, temperatures=SWEPT), quick=40),
    Row("split on a small bank", "6 prompts", partial(probe_set, temperatures=SWEPT, prompts=6)),
    Row("split on the bank without a sweep", "24 prompts", partial(probe_set, temperatures=()), quick=40),
)


@pytest.mark.parametrize("row", cases(ROWS), ids=str)
def test_intervals_hold_the_truth(row: Row) -> None:
    assert short(row) == {}


@pytest.mark.parametrize("row", cases(ROWS), ids=str)
def test_intervals_ten_times_narrower_are_caught(row: Row) -> None:
    assert set(short(row, narrower=10)) == set(shares(row))
