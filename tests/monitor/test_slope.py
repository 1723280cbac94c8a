"""Slopes by hand and in repetition: sign, interval, and what must not enter."""

import dataclasses

import numpy as np
import pytest
from scipy.stats import linregress
from scipy.stats import t as student

from bebop.monitor.estimate import Array
from bebop.monitor.records import StepRecords, from_stats, merge_records
from bebop.monitor.slope import Slope, early_slope, early_window, frozen_slope, temperature_slope
from bebop.monitor.window import Measure, Window
from bebop.trajectory import DecodeStats
from tests.monitor.synthetic import Truth, constant, step_records
from tests.monitor.test_coverage import stepwise, swept, true_swept

RUN = Truth(entropy=constant(0.5), mismatch=constant(0))


def reference(seed: int, truth: Truth = RUN, steps: int = 5) -> list[StepRecords]:
    rng = np.random.default_rng([31, seed])
    return [step_records(truth, step, rng) for step in range(steps)]


def share_covering(slopes: list[Slope], truth: float) -> float:
    return float(np.mean([slope.value.low <= truth <= slope.value.high for slope in slopes]))


def test_the_early_window() -> None:
    assert early_window(None) == early_window(60) == 20 and early_window(1000) == 100


def test_exact_lines_have_their_signed_slope() -> None:
    entropy = np.linspace(0.3, 0.8, 20)
    value = 3.2 - 0.8 * entropy
    unlike = np.array([1.0, 5.0, 2.0])  # prompts on the same line, with answers of different lengths
    sums = unlike[:, None] * np.stack([value, np.ones(20), entropy, np.ones(20)], 1)[:, None]
    for slope in (early_slope(entropy, value), temperature_slope(entropy, value, sums)):
        assert slope.value.point == pytest.approx(-0.8) and slope.value.error < 1e-9
        assert slope.spread == pytest.approx(entropy.std()) and not slope.unidentified


def test_a_sweep_of_two_prompts_has_a_slope_and_no_interval() -> None:
    """What lies on a curve around which nothing scatters is no sample."""
    entropy = np.linspace(0.3, 0.8, 7)
    few = temperature_slope(entropy, 3.2 - 0.8 * entropy**2, np.ones((7, 2, 4)))
    assert few.value.point == pytest.approx(-0.88) and not few.value.known and "2 prompts" in few.unidentified


def textbook_covers(entropy: Array, value: Array) -> bool:
    """The broken variant: an interval that takes the steps as independent."""
    fit = linregress(entropy, value)
    return bool(abs(fit.slope + 0.8) <= student.ppf(0.975, 18) * fit.stderr)


def test_early_intervals_hold_with_dependent_steps_too() -> None:
    independent, dependent = ([stepwise(seed, c) for seed in range(200)] for c in (0.0, 0.5))
    assert share_covering([early_slope(*steps, draws=200) for steps in independent], -0.8) >= 0.95
    assert share_covering([early_slope(*steps, draws=200) for steps in dependent], -0.8) >= 0.90
    assert np.mean([textbook_covers(*steps) for steps in dependent]) < 0.85


def test_the_scatter_of_temperatures_around_a_line_is_no_interval() -> None:
    """The broken variant, which the monitor had: seven points of the same texts, taken for independent ones."""
    held = 0
    for seed in range(100):
        sweep = swept(np.random.default_rng([46, seed, 8]), 8)
        fit = linregress(sweep.entropy, sweep.length)
        held += abs(fit.slope - true_swept()) <= student.ppf(0.975, 5) * fit.stderr
    assert held < 70


@pytest.mark.slow
def test_frozen_intervals_hold() -> None:
    slopes = [frozen_slope(reference(seed), Measure(), draws=200) for seed in range(100)]
    assert share_covering(slopes, RUN.slope) >= 0.92
    assert all(slope.value.excludes_zero(0.999) for slope in slopes)


def test_what_changes_from_step_to_step_does_not_enter_the_frozen_slope() -> None:
    """Entropy and mismatch rise together over the steps; answers of one step share their weights."""
    moving = Truth(entropy=lambda step: 0.5 + 0.1 * step, mismatch=lambda step: -0.2 * step)
    within = [frozen_slope(reference(seed, moving), Measure(), draws=200) for seed in range(20)]
    assert share_covering(within, moving.slope) >= 0.85
    pooled = [frozen_slope([merge_records(reference(seed, moving))], Measure(), draws=200) for seed in range(20)]
    assert share_covering(pooled, moving.slope) < 0.2  # the broken variant: all steps as one


def test_few_prompts_or_flat_entropy_leave_it_unidentified() -> None:
    rng = np.random.default_rng(0)
    few = frozen_slope([step_records(RUN, 0, rng, prompts=5)], Measure())
    assert "5 prompts" in few.unidentified and not few.value.known
    flat = frozen_slope(reference(0, dataclasses.replace(RUN, spread=0.002)), Measure())
    assert "0.01" in flat.unidentified
    assert frozen_slope([], Measure()).unidentified


def test_steps_without_entropy_or_too_few_leave_the_early_slope_unidentified() -> None:
    assert "19 steps" in early_slope(np.linspace(0, 1, 19), np.ones(19)).unidentified
    assert "not measured" in early_slope([float("nan")] * 20, [2.0] * 20).unidentified
    assert "3 temperatures" in temperature_slope([0.1, 0.5, 0.9], [3.0, 2.8, 2.6], np.ones((3, 5, 4))).unidentified


def test_answers_without_drafts_at_a_position_do_not_matter() -> None:
    steps = reference(3)
    bare = [dataclasses.replace(r, reached=r.reached.copy(), accepted=r.accepted.copy()) for r in steps]
    for records in bare:
        records.reached[:4, 2] = 0
        records.accepted[:4, 2] = 0
    assert frozen_slope(bare, Measure(position=3)).value.known


def measured_in_part(rng: np.random.Generator, cycles: int, every: int = 4) -> list[DecodeStats]:
    """120 answers whose rate falls by 0.4 a nat, measured in one of ``every`` cycles from any cycle on."""
    stats = []
    for entropy in rng.normal(0.5, 0.15, 120):
        rate = 0.7 - 0.4 * (entropy - 0.5)
        values = {"overlap": [rate], "target_only": [rate], "draft_entropy": [entropy], "target_entropy": [entropy]}
        accepted = rng.binomial(cycles, rate, 1).astype(float)
        own = DecodeStats.with_drafts(
            1, cycles=cycles, tokens=cycles + int(accepted[0]), reached=np.array([float(cycles)]), accepted=accepted
        )
        for _ in range(rng.integers(every), cycles, every):
            own.add_measured(values, 1, every)
        stats.append(own)
    return stats


@pytest.mark.parametrize("cycles", [3, 10])
def test_how_many_cycles_were_measured_does_not_enter(cycles: int) -> None:
    """It is a factor of a completion's overlap and entropy. Completions without a measured cycle leave no row."""
    rng = np.random.default_rng(7)
    steps = [from_stats(measured_in_part(rng, cycles), step) for step in range(5)]
    slope = frozen_slope(steps, Measure(position=1, rate="overlap")).value
    assert slope.point == pytest.approx(-0.4, abs=0.05) and slope.error < 0.05
    window = Window.of(merge_records(steps))
    means = (window.value(Measure()), window.value(Measure(rate="overlap")), window.entropy(Measure()))
    assert [mean.point for mean in means] == pytest.approx([1.7, 1.7, 0.5], abs=0.03)
