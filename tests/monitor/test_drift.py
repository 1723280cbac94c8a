"""The split on runs whose truth is known: 100 seeds each (few in ``make test``), and the variants that must fail it."""

import dataclasses
from functools import cache

import numpy as np
import pytest

from bebop.monitor.drift import SMALL, Decomposition, by_key, decompose
from bebop.monitor.drift_monitor import DriftMonitor, Explanation, MonitorSettings
from bebop.monitor.estimate import Estimate
from bebop.monitor.records import from_stats
from bebop.monitor.slope import Slope, early_slope
from bebop.monitor.window import Measure, Window
from bebop.trajectory import DecodeStats
from tests.monitor.synthetic import Truth, constant, expected, ramp, run, step_records

SEEDS, FEW = 100, 15  # of one run in ``make test-slow`` and in ``make test``
RUNS = {
    "entropy": Truth(entropy=ramp(0.5, 0.3), mismatch=constant(0)),
    "mismatch": Truth(entropy=constant(0.5), mismatch=ramp(0, -0.4)),
    "both": Truth(entropy=ramp(0.5, 0.25), mismatch=lambda step: -0.3 * max(0, step - 17) / 5),
    "neither": Truth(entropy=constant(0.5), mismatch=constant(0)),
    "noise": Truth(entropy=constant(0.5), mismatch=constant(0), noise=0.3, cycles=10),
    "together": Truth(entropy=ramp(0.5, 0.3), mismatch=ramp(0, -0.3)),  # mismatch grows with entropy from the start
}


# Every run over all seeds; few seeds of the run that moves both parts.
MANY = pytest.mark.exhaustive("100 seeds of a run; make test has some of each kind")
EVERY = [("both", FEW), *(pytest.param(name, SEEDS, marks=MANY) for name in RUNS)]


@cache
def explained(name: str, seeds: int) -> list[tuple[Explanation, bool]]:
    """Per seed: the explanation of the last step, and whether any step was not called steady."""
    explanations = []
    for seed in range(seeds):
        monitor = DriftMonitor(MonitorSettings(draws=200))
        steps = run(RUNS[name], seed)
        # Where neither the early slope nor every state is looked at, the middle of the run is left out.
        steps = [*steps[:5], *steps[-6:]] if name in ("both", "mismatch") else steps
        seen = [explanation for records in steps if (explanation := monitor.observe(records)) is not None]
        explanations.append((seen[-1], {explanation.state for explanation in seen} != {"steady"}))
    return explanations


def covers(estimate: Estimate, truth: float) -> bool:
    return estimate.low <= truth <= estimate.high


def recovered(parts: list[Decomposition], truth: Truth) -> tuple[int, int]:
    """How many of the splits hold the true entropy part, and the true mismatch part, in their intervals."""
    entropy, mismatch = expected(truth)
    return sum(covers(d.entropy, entropy) for d in parts), sum(covers(d.mismatch, mismatch) for d in parts)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seeds"), EVERY)
def test_parts_are_recovered_under_the_frozen_slope(name: str, seeds: int) -> None:
    parts = [explanation.by_slope["frozen"] for explanation, _ in explained(name, seeds)]
    assert not any(part.unidentified for part in parts)
    assert min(recovered(parts, RUNS[name])) >= 0.93 * seeds


@pytest.mark.parametrize("seeds", [FEW, pytest.param(SEEDS, marks=MANY)])
@pytest.mark.slow
def test_intervals_are_narrow_enough_to_say_something(seeds: int) -> None:
    parts = [explanation.by_slope["frozen"] for explanation, _ in explained("both", seeds)]
    truth = expected(RUNS["both"])
    assert np.mean([part.entropy.error for part in parts]) < 0.25 * abs(truth[0])
    assert sum(part.entropy.excludes_zero() for part in parts) >= 0.95 * seeds


@MANY
def test_early_slope_recovers_entropy_alone() -> None:
    parts = [explanation.by_slope["early"] for explanation, _ in explained("entropy", SEEDS)]
    assert min(recovered(parts, RUNS["entropy"])) >= 93


@MANY
def test_early_slope_takes_mismatch_for_entropy_where_they_move_together() -> None:
    parts = [explanation.by_slope["early"] for explanation, _ in explained("together", SEEDS)]
    assert max(recovered(parts, RUNS["together"])) < 20
    true_mismatch = expected(RUNS["together"])[1]
    assert abs(np.mean([part.mismatch.point for part in parts])) < 0.2 * abs(true_mismatch)  # nearly all of it is gone


@pytest.mark.parametrize(("name", "seeds"), EVERY)
def test_the_parts_add_up(name: str, seeds: int) -> None:
    for explanation, _ in explained(name, seeds):
        for part in (*explanation.parts.values(), *explanation.by_slope.values()):
            if not part.unidentified:
                assert abs(part.change.point - part.entropy.point - part.mismatch.point) < 1e-12


@pytest.mark.parametrize("seeds", [2, pytest.param(SEEDS, marks=MANY)])
def test_no_alarm_where_nothing_happens(seeds: int) -> None:
    for name in ("neither", "noise"):
        assert sum(alarm for _, alarm in explained(name, seeds)) <= 0.05 * seeds


@pytest.mark.parametrize("seeds", [2, pytest.param(SEEDS, marks=MANY)])
@pytest.mark.parametrize(
    ("name", "state"), [("entropy", "entropy-driven"), ("mismatch", "mismatch-driven"), ("neither", "steady")]
)
def test_the_cause_is_named(name: str, state: str, seeds: int) -> None:
    assert sum(explanation.state == state for explanation, _ in explained(name, seeds)) >= 0.95 * seeds


def test_unsigned_slope_as_printed_is_caught() -> None:
    """Eq. 16 with the positive b of Eq. 5 turns both parts around."""
    wrong = []
    for seed in range(3):
        steps = run(RUNS["entropy"], seed)
        reference, now = pooled(steps[:5]), pooled(steps[-3:])
        frozen = DriftMonitor(MonitorSettings(draws=200))
        last = [frozen.observe(records) for records in steps[:5]][-1]
        assert last is not None
        signed = last.slopes["frozen"]
        assert signed.value.high < 0
        printed = Estimate(point=-signed.value.point, draws=-signed.value.draws)
        wrong.append(decompose(Measure(), reference, now, dataclasses.replace(signed, value=printed)))
    assert recovered(wrong, RUNS["entropy"]) == (0, 0)
    assert all(part.entropy.point > 0 > part.mismatch.point for part in wrong)


def pooled(steps: list) -> Window:
    total = Window.of(steps[0], 200)
    for records in steps[1:]:
        total = total + Window.of(records, 200)
    return total


@MANY  # as "split of a rate" in test_coverage.py, at every position
def test_rates_at_each_position_are_recovered() -> None:
    truth = Truth(
        entropy=ramp(0.5, 0.3), mismatch=ramp(0, -0.1), slope=-0.4, level=0.8, rates=True, noise=0.02, spread=0.12
    )
    parts: dict[str, list[Decomposition]] = {f"position/{k}": [] for k in (1, 2, 3)}
    for seed in range(SEEDS):
        rng = np.random.default_rng([3, seed])
        monitor = DriftMonitor(MonitorSettings(draws=200))
        last = [monitor.observe(step_records(truth, step, rng)) for step in (0, 1, 2, 3, 4, 20, 21, 22)][-1]
        assert last is not None
        for name, splits in parts.items():
            splits.append(last.parts[name])
    # 90 of 100 is what intervals of 95 % fall below once in 80 times; six numbers are looked at.
    assert all(min(recovered(splits, truth)) >= 90 for splits in parts.values())


def test_counts_are_explained_where_no_overlap_was_measured() -> None:
    """An engine with ``monitor_every=0`` counts its drafts and measures none of them."""
    rng, monitor = np.random.default_rng(0), DriftMonitor(MonitorSettings(rate="overlap"))
    for step in range(1, 13):
        accepted = rng.binomial(50, 0.8 if step < 12 else 0.02, size=(16, 1)).astype(float)
        counted = [
            DecodeStats.with_drafts(1, cycles=50, tokens=50 + int(a[0]), reached=np.array([50.0]), accepted=a)
            for a in accepted
        ]
        last = monitor.observe(from_stats(counted, step))
    assert last is not None and last.state == "broken" and last.length.known


def test_a_slope_that_blurs_everything_is_unidentified() -> None:
    steps = run(RUNS["entropy"], 0)
    wide = Estimate(point=-0.8, draws=np.random.default_rng(0).normal(-0.8, 3.0, 200))
    slope = Slope(source="early", value=wide, spread=0.1)
    part = decompose(Measure(), pooled(steps[:5]), pooled(steps[-3:]), slope)
    assert "blurs" in part.unidentified and not part.entropy.known and part.change.known
    assert decompose(Measure(), pooled(steps[:5]), pooled(steps[:5]), slope).unidentified == ""  # nothing to split


def test_flat_entropy_leaves_the_early_slope_unidentified() -> None:
    slope = early_slope([0.5 + 0.001 * (i % 3) for i in range(20)], [2.8] * 20, draws=200)
    assert "0.01" in slope.unidentified and not slope.value.known
    steps = run(RUNS["entropy"], 1)
    part = decompose(Measure(), pooled(steps[:5]), pooled(steps[-3:]), slope)
    assert part.unidentified and not part.mismatch.known and part.change.point < -SMALL["tokens"]


def test_breakdown_by_task_tells_which_one_moved() -> None:
    monitor = DriftMonitor(MonitorSettings(draws=200))
    for step in range(10):
        easy, hard = (
            step_records(Truth(entropy=constant(0.5), mismatch=constant(m if step > 5 else 0)), step, seeded)
            for m, seeded in ((0.0, np.random.default_rng([1, step])), (-0.4, np.random.default_rng([2, step])))
        )
        mixed = np.where(easy.task == "even", easy.accepted.T, hard.accepted.T).T
        reached = np.where(easy.task == "even", easy.reached.T, hard.reached.T).T
        cycles = np.where(easy.task == "even", easy.cycles, hard.cycles)
        monitor.observe(
            dataclasses.replace(easy, accepted=mixed, reached=reached, cycles=cycles, emitted=cycles + mixed.sum(1))
        )
    parts = monitor.breakdown("task")
    assert list(parts) == ["even", "odd"]
    assert not parts["even"].change.excludes_zero(0.999)
    assert parts["odd"].change.high < -0.2


def test_keys_are_ordered_and_complete() -> None:
    records = step_records(RUNS["neither"], 0, np.random.default_rng(0))
    position = np.arange(len(records)) * 10
    version = np.arange(len(records)) % 11
    records = dataclasses.replace(records, position=position, version=version)
    assert list(by_key("position", records)) == ["0-63", "64-127", "128-255", "256-511"]
    assert list(by_key("version", records)) == [str(v) for v in range(11)]  # as numbers, not as text
    assert sum(len(rows) for rows in by_key("position", records).values()) == len(records)
