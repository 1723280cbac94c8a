"""Slopes and a rule of the temperature recipe on data whose slope is known."""

import numpy as np
import pytest

from bebop.adaptation.probe import NUMBERS, Probe
from recipes.reproduce.measured import Number
from recipes.reproduce.temperature.slopes import (
    EDGES,
    answers,
    bin_names,
    by_entropy,
    line,
    pairs,
    points,
    slope_difference,
    tokens,
)
from recipes.reproduce.temperature.study import LOSSES, RULES
from recipes.reproduce.verdicts import Finding, judge
from tests.recipes.reproduce.synthetic import number

RNG = np.random.default_rng(0)


def steps(slope: float, answer_effect: float = 0.0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """60 completions of 40 steps; acceptance falls by ``slope`` within them, and they differ by an effect."""
    rng = np.random.default_rng(1)
    rows = np.repeat(np.arange(60), 40)
    level = rng.normal(size=60)
    x = 1 + 0.3 * level[rows] + rng.normal(0, 0.5, rows.shape)
    y = 0.7 + slope * x + answer_effect * level[rows] + rng.normal(0, 0.05, rows.shape)
    return rows, x, y


def synthetic(x: np.ndarray, y: np.ndarray) -> Probe:
    """A probe whose overlap is y [n, K] and whose target entropy is x [n, K]; two tasks take turns."""
    n = len(x)
    blank = np.full(x.shape, np.nan)
    table = {name: blank for name in NUMBERS} | {"overlap": y, "target_entropy": x}
    row = np.arange(n) // 10
    return Probe(
        row=row, place=np.arange(n), task=np.where(row % 2 == 0, "easy", "hard"), numbers=table,
        accept=np.ones(n), accept_greedy=np.ones(n),
    )  # fmt: skip


def test_token_slope_is_least_squares_over_all_tokens() -> None:
    rows, x, y = steps(-0.25)
    sums = tokens(rows, x, y)
    assert float(sums.slope()[0]) == pytest.approx(np.polyfit(x, y, 1)[0], abs=1e-10)
    assert sums.interval().low < -0.25 < sums.interval().high < 0


def test_the_interval_resamples_completions_and_not_tokens() -> None:
    rows, x, y = steps(0.0, answer_effect=0.3)
    honest = tokens(rows, x, y).interval()
    naive = tokens(np.arange(len(x)), x, y).interval()  # every token its own completion
    assert honest.high - honest.low > 2 * (naive.high - naive.low)


def test_completions_leave_out_what_tasks_differ_by() -> None:
    rows, x, y = steps(-0.2)
    tasks = np.where(rows % 2 == 0, "easy", "hard")
    shifted_x, shifted_y = x + (tasks == "hard"), y + 0.9 * (tasks == "hard")  # a hard task that drafts well
    within = float(answers(rows, shifted_x, shifted_y, tasks).slope()[0])
    confounded = float(answers(rows, shifted_x, shifted_y, np.full(len(rows), "all")).slope()[0])
    assert within == pytest.approx(-0.2, abs=0.05)
    assert confounded > 0.1


def test_slope_difference_is_paired() -> None:
    rows, x, y = steps(-0.2, answer_effect=0.3)
    difference = slope_difference(tokens(rows, x, y + 0.05 * x), tokens(rows, x, y))
    assert difference.value == pytest.approx(0.05) and difference.high - difference.low < 1e-9


def test_pairs_skip_steps_that_do_not_exist_and_choose_position_and_task() -> None:
    x = RNG.uniform(0, 2, (40, 3))
    y = 1 - 0.3 * x
    x[-1, 1:] = y[-1, 1:] = np.nan
    probe = synthetic(x, y)
    assert len(pairs(probe, "overlap")[0]) == 40 * 3 - 2
    assert len(pairs(probe, "overlap", 2)[0]) == 39
    assert set(pairs(probe, "overlap", task="easy")[0].tolist()) == {0, 2}
    for of in ("tokens", "answers"):
        assert float(points(probe, "overlap", of).slope()[0]) == pytest.approx(-0.3, abs=1e-9)


def test_line_gives_slope_and_how_straight_it_is() -> None:
    x = np.array([0.1, 0.2, 0.3, 0.4])
    assert line(x, 0.9 - 0.5 * x) == pytest.approx((-0.5, 1.0))
    assert line(x, np.array([1.0, 0.0, 0.0, 1.0]))[1] == pytest.approx(0.0, abs=1e-12)


def test_bins_hold_every_step_once() -> None:
    x = np.array([0.0, 0.02, 0.1, 0.3, 0.7, 1.1, 1.1, 1.1])
    bins = by_entropy(x, x * 2)
    assert len(bins) == len(EDGES) + 1 == len(bin_names())
    assert [many for _, _, many in bins] == [1, 1, 1, 1, 1, 3, 0]
    assert bins[5][:2] == pytest.approx((1.1, 2.2))


def test_any_flatter_needs_one_loss_in_both_ways() -> None:
    up, down, level = number(0.2, 0.01, 3), number(-0.2, 0.01, 3), number(0.0, 0.001, 3)

    def judged(**ways: tuple[Number, Number]) -> Finding:
        numbers = {}
        for loss in LOSSES:
            for way, rise in zip(("temperatures", "tokens"), ways.get(loss, (down, down)), strict=True):
                numbers |= {
                    f"{loss} - ce, {way}": rise,
                    f"{loss}, sampled, {way}": level,
                    f"ce, sampled, {way}": level,
                }
        return judge([RULES[-1]], numbers)[0]

    assert (judged().side, judged().p < 0.05) == ("refuted", True)
    assert (judged(tv=(up, up)).side, judged(tv=(up, up)).p < 0.05) == ("confirmed", True)
    assert judged(tv=(up, down), nla=(down, up)).p > 0.05
