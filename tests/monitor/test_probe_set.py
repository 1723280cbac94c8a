"""The direct measure on probe sets whose truth is known, where the slope of the early steps is wrong."""

import numpy as np
import pytest

from bebop.errors import UserError
from bebop.monitor.drift_monitor import DriftMonitor, MonitorSettings
from bebop.monitor.estimate import Array
from bebop.monitor.probe_set import ProbeReading, direct
from tests.cases import slow_but
from tests.monitor.synthetic import Truth, constant, ramp, step_records

CONTEXTS, ANSWERS = 256, 64


def curve(entropy: Array) -> Array:
    """Overlap as a function of entropy: bent, so that no one slope is right."""
    return 0.8 - 0.5 * (1 - np.exp(-entropy))


def readings(
    seed: int, temperature: float, mismatch: float, contexts: int = CONTEXTS
) -> tuple[ProbeReading, ProbeReading]:
    """Before and after; entropies are multiplied by exp(temperature), every overlap loses ``mismatch``."""
    rng = np.random.default_rng([11, seed])
    unit = np.arange(contexts) * ANSWERS // CONTEXTS
    before = rng.gamma(2.0, 0.25, contexts) * np.exp(0.2 * rng.normal(size=unit.max() + 1)[unit])
    ease = 0.06 * (rng.normal(size=unit.max() + 1)[unit] + rng.normal(size=contexts))
    after = before * np.exp(temperature + 0.25 * rng.normal(size=contexts) - 0.03)
    return (
        ProbeReading(overlap=curve(before) + ease, entropy=before, unit=unit),
        ProbeReading(overlap=curve(after) + ease - mismatch, entropy=after, unit=unit),
    )


def truth(temperature: float, mismatch: float) -> tuple[float, float]:
    before, after = readings(0, temperature, mismatch, contexts=400_000)
    return float(np.mean(curve(after.entropy) - curve(before.entropy))), -mismatch


MOVES = [(0.0, 0.0), (0.2, 0.0), (0.0, 0.05), (0.2, 0.05), (-0.3, 0.05)]


@pytest.mark.parametrize(("temperature", "mismatch"), slow_but([(0.2, 0.05)], MOVES, several=True))
def test_parts_are_recovered(temperature: float, mismatch: float) -> None:
    true = truth(temperature, mismatch)
    held = np.zeros(2)
    for seed in range(100):
        part = direct(*readings(seed, temperature, mismatch), draws=200, seed=seed)
        assert not part.unidentified
        assert abs(part.change.point - part.entropy.point - part.mismatch.point) < 1e-12
        held += [e.low <= t <= e.high for e, t in zip((part.entropy, part.mismatch), true, strict=True)]
    assert held.min() >= 93


@pytest.mark.parametrize("seeds", slow_but([3], [3, 20]))
def test_it_holds_where_the_early_slope_fails(seeds: int) -> None:
    """Entropy and mismatch rise together from the first step: the early slope sees no mismatch, the probe set does."""
    steps, holds, early = 23, 0, 0
    run = Truth(entropy=ramp(0.5, 0.3, steps), mismatch=ramp(0, -0.3, steps))
    for seed in range(seeds):
        rng = np.random.default_rng([12, seed])
        monitor = DriftMonitor(MonitorSettings(draws=200))
        before, after = readings(seed, 0.2, 0.05)
        for step in range(steps):
            last = monitor.observe(step_records(run, step, rng), reading={0: before, steps - 1: after}.get(step))
        assert last is not None
        mismatch = last.parts["bank"].mismatch
        holds += mismatch.low <= -0.05 <= mismatch.high and mismatch.high < 0
        early += last.by_slope["early"].mismatch.high < -0.13  # half of what there is
    assert holds >= 17 / 20 * seeds and early == 0


def tempered(seed: int, exponent: float, mismatch: float = 0.0, temperature: float = 1.0) -> ProbeReading:
    """Contexts of high entropy are hard in themselves; a temperature moves overlap along a flatter curve."""
    rng = np.random.default_rng([13, seed])
    entropy = rng.gamma(2.0, 0.25, CONTEXTS)
    overlap = curve(entropy) + 0.05 * rng.normal(size=CONTEXTS) - 0.05 * entropy * (temperature - 1)
    noise = np.exp(0.1 * rng.normal(size=CONTEXTS)) if exponent else 1.0
    return ProbeReading(
        overlap=overlap - 0.05 * entropy * temperature * (noise - 1) - mismatch, entropy=entropy * temperature * noise
    )


def test_a_sweep_tells_hard_contexts_from_hot_ones() -> None:
    matched = across = 0
    for seed in range(5):  # every one of them, not most
        before, after = tempered(seed, 0.0), tempered(seed, 1.0, mismatch=0.03, temperature=1.4)
        sweep = [tempered(seed, 0.0, temperature=temperature) for temperature in (0.5, 0.75, 1.25, 1.5, 2.0)]
        parts = [direct(before, after, known, draws=200) for known in (sweep, ())]
        assert not any(part.unidentified for part in parts)
        matched += abs(parts[0].mismatch.point + 0.03) < 1e-3
        across += parts[1].mismatch.low <= -0.03 <= parts[1].mismatch.high
    assert matched == 5 and across == 0  # without it the entropy is charged at the rate of hard contexts


def test_entropies_beyond_the_sweep_are_not_extrapolated() -> None:
    before, hot = tempered(0, 0.0), tempered(0, 0.0, temperature=3.0)
    assert "%" in direct(before, hot, [tempered(0, 0.0, temperature=1.5)]).unidentified


def test_contexts_of_one_answer_are_resampled_together() -> None:
    """The broken variant: contexts on their own, though those of an answer share what makes them easy."""
    before, after = readings(1, 0.0, 0.0)
    rng = np.random.default_rng(0)
    shared = 0.05 * rng.normal(size=ANSWERS)[before.unit]
    moved = ProbeReading(overlap=after.overlap + shared, entropy=after.entropy, unit=after.unit)
    together = direct(before, moved)
    apart = direct(ProbeReading(overlap=before.overlap, entropy=before.entropy), moved)
    assert apart.change.error < 0.75 * together.change.error


def test_new_entropies_are_not_extrapolated() -> None:
    before, after = readings(0, 0.0, 0.0)
    hot = ProbeReading(overlap=after.overlap, entropy=after.entropy + 2.0, unit=after.unit)
    part = direct(before, hot)
    assert "%" in part.unidentified and not part.mismatch.known and part.change.known


def test_another_probe_set_is_refused() -> None:
    before, _ = readings(0, 0.0, 0.0)
    with pytest.raises(UserError, match="3, 256"):
        direct(before, ProbeReading(overlap=np.zeros(3), entropy=np.zeros(3)))
    with pytest.raises(UserError, match="one number a context"):
        ProbeReading(overlap=np.zeros(3), entropy=np.zeros(4))


def test_a_constant_probe_set_does_not_crash() -> None:
    flat = ProbeReading(overlap=np.full(8, 0.7), entropy=np.zeros(8))
    part = direct(flat, flat)
    assert part.change.point == 0.0 and part.mismatch.point == pytest.approx(0.0, abs=1e-6)
    assert not part.mismatch.excludes_zero()


def test_a_run_of_the_monitor_uses_the_first_reading() -> None:
    monitor = DriftMonitor(MonitorSettings(draws=100, reference_steps=2))
    before, after = readings(0, 0.0, 0.1)
    still = Truth(entropy=constant(0.5), mismatch=constant(0))
    rng = np.random.default_rng(0)
    for step, reading in enumerate([before, after, after, after]):
        explanation = monitor.observe(step_records(still, step, rng), reading=reading)
    assert explanation is not None
    assert explanation.parts["bank"].mismatch.point == pytest.approx(-0.1, abs=0.02)
    assert explanation.state == "mismatch-driven"  # the probe set's word counts more than a slope's
