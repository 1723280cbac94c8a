"""What cycles take, from planted seconds: found again, followed as they change, and let be where nothing is seen."""

import math

import numpy as np
import pytest

from bebop.config.job import Costs
from bebop.rollout.decoding.timed_lengths import CycleSeconds, Work

TRUE = (0.02, 0.004, 0.0005, 0.003)  # plain, drafted, a draft, a pass
GIVEN = Costs(draft=0.15, verify=0.05)


def of(one: CycleSeconds, rows: int, work: Work) -> float:
    """Seconds of some work."""
    return float(one.each(rows) @ work)


def works(count: int, seed: int = 0) -> list[Work]:
    """A third of them plain, the others of 1 to 40 drafts and up to 3 passes."""
    rng = np.random.default_rng(seed)
    drafted = rng.integers(3, size=count) > 0
    drafts, passes = rng.integers(1, 41, size=count), rng.integers(4, size=count)
    rows = zip(drafted.tolist(), drafts.tolist(), passes.tolist(), strict=True)
    return [Work(1.0, float(d), float(d * n), float(d * p)) for d, n, p in rows]


def learned(seconds: CycleSeconds, cycles: list[Work], true: tuple[float, ...], rows: int = 8) -> CycleSeconds:
    """Cycles that take what ``true`` says, give or take a tenth."""
    rng = np.random.default_rng(1)
    for work in cycles:
        seconds.measured(rows, work, float(np.dot(true, work) * rng.lognormal(0.0, 0.1)))
    return seconds


def test_numbers_are_found_again_in_their_unit() -> None:
    """Within a fifth after 300 cycles that vary by a tenth, from ratios that were far off; the cost of a draft is that
    of one in every row."""
    one = learned(CycleSeconds(8, GIVEN), works(300), TRUE)
    assert one.each(8) == pytest.approx(TRUE, rel=0.2)
    costs = one.costs(8)
    assert costs.draft == pytest.approx(0.15, rel=0.25) and costs.verify == pytest.approx(8 * 0.025, rel=0.25)
    assert of(one, 8, Work(1.0, 1.0, 20.0, 2.0)) == pytest.approx(0.04, rel=0.1)


def test_before_anything_is_known_ratios_are_those_given() -> None:
    one = CycleSeconds(4, GIVEN)
    assert one.costs(4).draft == pytest.approx(0.15) and one.costs(3).verify == pytest.approx(0.05, rel=0.15)
    one.measured(4, Work(1.0, 1.0, 8.0, 1.0), 3.0)
    assert of(one, 4, Work(1.0, 1.0, 8.0, 1.0)) == pytest.approx(3.0), "the first cycle sets the unit"
    assert one.costs(4).draft == pytest.approx(0.15)


def test_a_machine_that_slows_down_is_followed_whatever_cycles_do_and_what_they_do_not_do_seems_cheap() -> None:
    one = learned(CycleSeconds(8, GIVEN), works(300), TRUE)
    drafts = Work(1.0, 1.0, 20.0, 2.0)
    before = np.array([of(one, 8, work) for work in (Work(), drafts)])
    learned(one, [Work()] * 60, tuple(2 * second for second in TRUE))
    plain, drafted = np.array([of(one, 8, work) for work in (Work(), drafts)]) / before
    assert plain == pytest.approx(2.0, rel=0.1) and drafted < plain
    learned(one, works(100, seed=2), tuple(2 * second for second in TRUE))
    assert np.array([of(one, 8, work) for work in (Work(), drafts)]) / before == pytest.approx([2.0] * 2, rel=0.15)


def test_drafts_that_become_dearer_do_not_make_plain_cycles_seem_dear() -> None:
    """Though none is seen: at their old price they are tried."""
    one = learned(CycleSeconds(8, GIVEN), works(300), TRUE)
    plain, drafts = of(one, 8, Work()), [work for work in works(150, seed=2) if work.drafted]
    learned(one, drafts, (TRUE[0], 5 * TRUE[1], 3 * TRUE[2], 2 * TRUE[3]))
    assert of(one, 8, Work()) < 1.5 * plain


def test_what_only_drafts_take_is_learned_without_moving_the_plain_seconds() -> None:
    one = learned(CycleSeconds(8, GIVEN), works(300), TRUE)
    dearer = (TRUE[0], TRUE[1], 3 * TRUE[2], TRUE[3])
    learned(one, works(300, seed=2), dearer)
    assert one.each(8)[2] == pytest.approx(dearer[2], rel=0.25) and one.each(8)[0] == pytest.approx(TRUE[0], rel=0.15)


def test_an_outlier_counts_for_little() -> None:
    one = learned(CycleSeconds(8, GIVEN), works(300), TRUE)
    before = of(one, 8, Work())
    one.measured(8, Work(), 100.0)
    assert of(one, 8, Work()) < 1.4 * before
    one.measured(8, Work(), 0.0)
    assert math.isfinite(of(one, 8, Work()))


def test_rows_between_two_sizes_are_on_a_straight_line_and_teach_both() -> None:
    one = CycleSeconds(8, GIVEN)
    for rows, factor in ((4, 1.0), (8, 3.0)):
        learned(one, works(300), tuple(factor * second for second in TRUE), rows)
    middle, small = one.each(6), one.each(2)
    assert middle == pytest.approx((one.each(4) + one.each(8)) / 2)
    learned(one, [Work()] * 30, tuple(5 * second for second in TRUE), rows=6)
    assert one.each(6)[0] > 1.5 * middle[0] and (one.each(2) == small).all(), "a third size is let be"


def test_numbers_that_nothing_says_anything_about_become_uncertain_within_bounds() -> None:
    """After thousands of plain cycles a few that draft are enough to know what drafts take."""
    one = learned(CycleSeconds(8, GIVEN), works(300), TRUE)
    learned(one, [Work()] * 3000, TRUE)
    assert (np.diagonal(one.spread, axis1=1, axis2=2) <= 1.01).all()
    one.spread *= 1e4  # as if for years
    learned(one, [Work()], TRUE)
    assert (np.diagonal(one.spread[-1]) <= 1.01).all()
    learned(one, works(60, seed=3), (TRUE[0], TRUE[1], 4 * TRUE[2], TRUE[3]))
    assert one.each(8)[2] == pytest.approx(4 * TRUE[2], rel=0.4)
