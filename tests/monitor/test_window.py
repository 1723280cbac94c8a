"""Totals that merge, and a bootstrap that resamples what is independent."""

import numpy as np
import pytest
from scipy import stats as scipy_stats

from bebop.monitor.estimate import Estimate, t_over_normal
from bebop.monitor.records import StepRecords, from_stats, merge_records
from bebop.monitor.window import Measure, Window, per_unit, resample
from bebop.trajectory import DecodeStats
from tests.cases import slow_but
from tests.monitor.synthetic import Truth, constant, stats, step_records

STEADY = Truth(entropy=constant(0.5), mismatch=constant(0), noise=0.25)


def test_values_by_hand() -> None:
    window = Window.of(from_stats([stats(10, 8, 4), stats(2, 0, 0)], 0))
    assert window.value(Measure()).point == pytest.approx(24 / 12)
    assert window.value(Measure(position=2)).point == pytest.approx(4 / 8)  # conditional on reaching it
    assert window.value(Measure(rate="overlap")).point == pytest.approx(1 + 0.8 * 20 / 12)
    assert window.entropy(Measure()).point == pytest.approx(0.5)
    assert window.by_request()[0].point == pytest.approx((2.2 + 1.0) / 2)  # not the same as 24 / 12
    assert window.gap("overlap", "target_only").point == pytest.approx(0.2)
    assert window.gap("overlap", "target_only", position=2).point == pytest.approx(0.2)


def parts() -> list[StepRecords]:
    """Three workers' answers to different prompts of one step, of very different size; one drafts two positions."""
    rng = np.random.default_rng(4)
    workers = [step_records(STEADY, 7, rng, prompts=n, answers=2) for n in (2, 5, 14)]
    short = from_stats([stats(9, 2, 1), stats(20, 3, 1)], 7)
    return [*workers, short]


def test_merging_windows_equals_the_union() -> None:
    workers = parts()
    offset = [records.relabelled(records.unit + 100 * i) for i, records in enumerate(workers)]
    union = Window.of(merge_records(offset))
    merged = sum((Window.of(records) for records in workers[1:]), Window.of(workers[0]))
    for measure in (Measure(), Measure(position=1), Measure(position=3), Measure(rate="overlap")):
        assert merged.value(measure).point == pytest.approx(union.value(measure).point, rel=1e-12)
        assert merged.entropy(measure).point == pytest.approx(union.entropy(measure).point, rel=1e-12)
    assert merged.by_request()[0].point == pytest.approx(union.by_request()[0].point, rel=1e-12)
    assert merged.units == union.units


def test_a_mean_of_means_is_another_number_and_cannot_be_formed() -> None:
    windows = [Window.of(records) for records in parts()]
    merged = sum(windows[1:], windows[0]).value(Measure()).point
    naive = float(np.mean([window.value(Measure()).point for window in windows]))
    assert abs(naive - merged) > 0.05
    estimate = windows[0].value(Measure())
    with pytest.raises(TypeError):
        windows[0] + estimate  # type: ignore[operator]
    with pytest.raises(TypeError):
        estimate / 2  # type: ignore[operator]


def coverage(split_cycles: bool, seeds: int = 100) -> float:
    """Share of intervals for the accept length of one step that hold the truth."""
    held = 0
    for seed in range(seeds):
        records = step_records(STEADY, 0, np.random.default_rng([8, seed]), prompts=16, answers=1)
        if split_cycles:
            records = as_cycles(records)
        value = Window.of(records, draws=200, seed=seed).value(Measure())
        held += value.low <= STEADY.level <= value.high
    return held / seeds


def as_cycles(records: StepRecords) -> StepRecords:
    """The broken variant: every cycle of every answer for itself."""
    single = []
    for i in range(len(records)):
        counts = np.concatenate([records.accepted[i], [0.0]]).astype(int)
        lengths = np.repeat(np.arange(len(counts)), np.diff([int(records.cycles[i]), *counts], append=0)[:-1] * -1)
        single += [stats(1, *(int(k < length) for k in range(records.drafts))) for length in lengths]
    return from_stats(single, records.step)


def test_cycles_are_split_without_changing_the_value() -> None:
    records = step_records(STEADY, 0, np.random.default_rng(0), prompts=16, answers=1)
    whole, split = Window.of(records).value(Measure()), Window.of(as_cycles(records)).value(Measure())
    assert split.point == pytest.approx(whole.point)
    assert split.error < 0.75 * whole.error


def test_intervals_over_answers_cover_and_over_cycles_do_not() -> None:
    assert 0.92 <= coverage(split_cycles=False) <= 0.985
    assert coverage(split_cycles=True, seeds=30) < 0.85


def test_resampling_has_the_variance_of_the_mean_even_for_few_units() -> None:
    values = np.array([0.0, 1.0, 5.0, 6.0])
    weights = resample(4, 40_000, np.random.default_rng(0))
    means = weights @ values / weights.sum(1)
    assert means.var() == pytest.approx(values.var(ddof=1) / 4, rel=0.03)
    assert weights.sum(1) == pytest.approx(4.0)


def test_units_stay_whole() -> None:
    columns = np.array([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0], [8.0, 80.0]])
    assert per_unit(np.array([9, 3, 9, 3]), columns).tolist() == [[10.0, 100.0], [5.0, 50.0]]


@pytest.mark.parametrize("freedom", [2, 3, 5, 15, 200])
def test_students_t(freedom: int) -> None:
    exact = scipy_stats.t.ppf(0.975, freedom) / scipy_stats.norm.ppf(0.975)
    assert t_over_normal(freedom) == pytest.approx(exact, rel=0.04)
    assert t_over_normal(1) == np.inf


def test_one_unit_has_a_value_and_no_interval() -> None:
    value = Window.of(from_stats([stats(10, 8, 4)], 0)).value(Measure())
    assert value.point == pytest.approx(2.2) and not value.known and not value.excludes_zero()


def test_what_was_not_measured_is_unknown() -> None:
    bare = DecodeStats(cycles=4, tokens=6, reached=np.array([4.0]), accepted=np.array([2.0]))
    for name in ("overlap", "target_only", "draft_entropy", "target_entropy"):
        setattr(bare, name, np.zeros(1))
    window = Window.of(from_stats([bare, bare], 0))
    assert window.value(Measure()).point == pytest.approx(1.5)
    assert not window.entropy(Measure()).known and not window.value(Measure(rate="overlap")).known


def test_arithmetic_keeps_what_is_shared() -> None:
    draws = np.random.default_rng(0).normal(size=500)
    a = Estimate(point=1.0, draws=1.0 + draws)
    assert (a - a).error == 0.0 and (a + a).error == pytest.approx(2 * a.error)
    assert a.interval(0.999)[0] < a.low < a.high


# ---- windows of several steps: intervals hold the truth as often as they say, and not by being wide


def several_steps(seed: int, count: int, prompts: int, answers: int) -> list[StepRecords]:
    rng = np.random.default_rng([71, seed])
    return [step_records(STEADY, step, rng, prompts=prompts, answers=answers) for step in range(count)]


def merged(seed: int, count: int, prompts: int) -> Estimate:
    """The accept length over ``count`` steps."""
    windows = [Window.of(r, draws=200, seed=seed) for r in several_steps(seed, count, prompts, answers=1)]
    return sum(windows[1:], windows[0]).value(Measure())


def test_intervals_of_few_prompts_in_several_steps_hold() -> None:
    values = [merged(seed, count=4, prompts=3) for seed in range(150)]
    assert 0.915 <= np.mean([v.low <= STEADY.level <= v.high for v in values]) <= 0.985


@pytest.mark.parametrize("seeds", slow_but([60], [60, 300]))
def test_errors_of_merged_steps_are_as_large_as_what_they_speak_of(seeds: int) -> None:
    """Not those of one of the steps: four steps have half the error of one."""
    values = [merged(seed, count=4, prompts=12) for seed in range(seeds)]
    scatter = np.std([v.point for v in values])
    assert 0.85 < np.mean([v.error for v in values]) / scatter < 1.2


def test_steps_of_one_prompt_each_have_no_interval() -> None:
    """There is nothing to tell the scatter of prompts from."""
    assert np.isfinite(merged(0, count=3, prompts=1).point) and not merged(0, count=3, prompts=1).known
    assert merged(0, count=3, prompts=2).known


def test_answers_to_one_prompt_count_as_one() -> None:
    """Copies of an answer add nothing: the interval is that of the answers without them."""
    records = several_steps(0, 1, prompts=12, answers=1)[0]
    copies = records.select(np.repeat(np.arange(12), 4))  # type: ignore[arg-type]
    single, fourfold = (Window.of(r, draws=400).value(Measure()) for r in (records, copies))
    assert fourfold.point == single.point and 0.9 < fourfold.error / single.error < 1.1
