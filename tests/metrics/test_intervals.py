"""Bootstrap intervals hold what they promise, when sequences are what is resampled."""

import numpy as np
import pytest
from scipy.stats import t

from bebop.metrics.intervals import Array, Interval, across_seeds, ratio, ratio_difference, resampled, student_t

SEQUENCES, MEAN = 40, 0.7


def data(seed: int) -> tuple[Array, Array, Array]:
    """Totals and counts of 40 answers, and the hits of their cycles; each answer has an acceptance of its own."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(5, 30, SEQUENCES)
    rates = rng.beta(3.5, 1.5, SEQUENCES)  # mean 0.7, standard deviation 0.19
    hits = [rng.random(n) < rate for n, rate in zip(counts, rates, strict=True)]
    return np.array([h.sum() for h in hits], float), counts.astype(float), np.concatenate(hits).astype(float)


def covered(interval: Interval) -> bool:
    return interval.low <= MEAN <= interval.high


def test_intervals_over_sequences_cover_and_those_over_cycles_do_not() -> None:
    by_sequence, by_cycle = [], []
    for seed in range(100):
        totals, counts, hits = data(seed)
        by_sequence.append(covered(ratio(totals, counts)))
        if seed < 30:
            by_cycle.append(covered(resampled(lambda w, x=hits: w @ x / len(x), len(hits), draws=200)))  # type: ignore[misc]
    assert 0.90 <= np.mean(by_sequence) <= 0.99
    assert np.mean(by_cycle) < 0.80


def test_ratios_by_hand() -> None:
    found = ratio([1, 2, 3], [2, 2, 4])
    assert found.value == 6 / 8 and 0 <= found.low < found.value < found.high <= 1.5
    assert ratio([2, 4, 6], [1, 2, 3]) == Interval(2, 2, 2), "no spread, no width"


def test_differences_are_resampled_together() -> None:
    totals, counts, _ = data(1)
    better = totals + 0.1 * counts
    paired = ratio_difference((better, counts), (totals, counts))
    assert (paired.value, paired.low, paired.high) == pytest.approx((0.1, 0.1, 0.1))
    apart = ratio(better, counts, seed=1), ratio(totals, counts, seed=2)
    assert apart[0].overlaps(apart[1]), "separate intervals could not tell"


def test_empty_sequences_are_left_out_and_nothing_is_nan() -> None:
    assert ratio([1, 0, 1], [2, 0, 2]).value == 0.5
    assert np.isnan(ratio([0, 0], [0, 0]).value) and np.isnan(ratio([], []).low)
    alone = ratio([3], [4])
    assert alone.value == 0.75 and np.isnan(alone.low), "one sequence has no interval"


def test_across_seeds_by_hand() -> None:
    found = across_seeds([1.0, 2.0, 3.0])  # standard error 1 / sqrt(3), two degrees of freedom
    assert found.value == 2 and found.high - 2 == pytest.approx(4.302653 / 3**0.5) == 2 - found.low
    assert np.isnan(across_seeds([1.0]).low)
    assert all(student_t(n, level) == pytest.approx(t.isf(level / 2, n)) for n in (1, 2, 40) for level in (0.05, 1e-9))


def test_what_an_interval_says() -> None:
    a, b, c = Interval(2.0, 1.0, 3.0), Interval(3.5, 3.0, 4.0), Interval(9.0, 8.0, 9.5)
    assert str(a) == "2.000 [1.000, 3.000]"
    assert a.overlaps(b) and b.overlaps(a) and not a.overlaps(c)
