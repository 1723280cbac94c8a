"""Slopes and straightness of the real study against plain computations over lists of points, under weights too."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from bebop.adaptation.probe import Probe
from bebop.trainer.objectives import Sampling
from recipes.reproduce.real.effects import Statistic
from recipes.reproduce.real.slopes import (
    TENTHS,
    bend,
    between_prompts,
    between_tokens,
    correlation,
    over_points,
    over_temperatures,
    r_squared,
    slope,
    temperature_points,
    tenth_points,
    told_by,
)
from tests.recipes.reproduce.synthetic import PROMPTS, synthetic

Array = NDArray[np.float64]
TEMPERATURES = (0.4, 0.6, 0.8, 1.0, 1.2, 1.4)


def times(seed: int) -> NDArray[np.int64]:
    """How often each prompt is drawn."""
    return np.random.default_rng(seed).multinomial(PROMPTS, np.full(PROMPTS, 1 / PROMPTS))


def drawn(chains: Probe, counts: NDArray[np.int64]) -> list[tuple[str, Array, Array, Array]]:
    """Kind, target entropies, overlaps and draft entropies of each prompt that is drawn, steps that exist alone."""
    found = []
    for row, count in enumerate(counts):
        own = chains.row == row
        columns = [chains.numbers[name][own].ravel() for name in ("target_entropy", "overlap", "draft_entropy")]
        known = np.isfinite(columns[0])
        found += count * [(str(chains.task[own][0]), *(column[known] for column in columns))]
    return found


def points(chains: Probe, counts: NDArray[np.int64]) -> tuple[Array, Array, Array]:
    x, y, z = (np.concatenate(column) for column in list(zip(*drawn(chains, counts), strict=True))[1:])
    return x, y, z


def line(x: Array, y: Array) -> float:
    return float(np.polyfit(x, y, 1)[0])


def squared(x: Array, y: Array) -> float:
    rest = y - np.polyval(np.polyfit(x, y, 1), x)
    return 1 - float((rest**2).sum() / ((y - y.mean()) ** 2).sum())


def prompt_points(chains: Probe, counts: NDArray[np.int64], centred: bool = True) -> tuple[Array, Array]:
    kinds, x, y, _ = zip(*drawn(chains, counts), strict=True)
    a, b = (np.array([one.mean() for one in column]) for column in (x, y))
    for kind in set(kinds) if centred else ():
        own = np.array(kinds) == kind
        a[own] -= a[own].mean()
        b[own] -= b[own].mean()
    return a, b


def looks(seed: int = 0) -> list[Probe]:
    return [synthetic(seed, Sampling(temperature=t)) for t in TEMPERATURES]


def sweep_points(counts: NDArray[np.int64]) -> tuple[Array, Array]:
    means = [[column.mean() for column in points(look, counts)[:2]] for look in looks()]
    x, y = np.array(means).T
    return x, y


ONE = synthetic(0)
CASES: dict[str, tuple[Statistic, Callable[[NDArray[np.int64]], float]]] = {
    "over temperatures": (over_temperatures(looks(), "overlap"), lambda c: line(*sweep_points(c))),
    "straightness over temperatures": (
        over_points(temperature_points(looks(), "overlap"), r_squared), lambda c: squared(*sweep_points(c)),
    ),
    "bend over temperatures": (
        over_points(temperature_points(looks(), "overlap"), bend),
        lambda c: line(*(v[3:] for v in sweep_points(c))) - line(*(v[:3] for v in sweep_points(c))),
    ),
    "between prompts": (between_prompts(ONE, "overlap"), lambda c: line(*prompt_points(ONE, c))),
    "between tokens": (between_tokens(ONE, "overlap"), lambda c: line(*points(ONE, c)[:2])),
    "correlation": (
        correlation(ONE, "target_entropy", "draft_entropy"), lambda c: float(np.corrcoef(*points(ONE, c)[::2])[0, 1]),
    ),
    "told by draft": (told_by(ONE, "draft_entropy"), lambda c: squared(*points(ONE, c)[:0:-1])),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_statistics_are_those_of_the_points_of_the_prompts_that_are_drawn(name: str) -> None:
    statistic, plain = CASES[name]
    draws = np.stack([np.ones(PROMPTS, int), *(times(seed) for seed in range(4))])
    assert statistic(draws.astype(float)) == pytest.approx([plain(counts) for counts in draws], rel=1e-9)


def test_a_kind_that_is_hard_as_a_whole_is_no_slope_between_prompts() -> None:
    """Broken: points that are not less the mean of their kind."""
    every = np.ones(PROMPTS, int)
    found = float(between_prompts(ONE, "overlap")(every[None].astype(float))[0])
    wrong = line(*prompt_points(ONE, every, centred=False))
    assert found == pytest.approx(-0.1, abs=0.03) and wrong > 0.02


def test_tenths_hold_as_many_steps_each_in_the_order_of_entropy() -> None:
    sums = tenth_points(ONE, "overlap").sum(0).reshape(TENTHS, 3)
    x, y, _ = points(ONE, np.ones(PROMPTS, int))
    order = np.argsort(x)
    parts = [order[len(order) * j // TENTHS + (len(order) * j % TENTHS > 0) :] for j in range(TENTHS)]
    assert np.ptp(sums[:, 0]) <= 1 and sums[:, 0].sum() == len(x)
    for j, (n, a, b) in enumerate(sums):
        own = parts[j][: int(n)]
        assert (a / n, b / n) == pytest.approx((x[own].mean(), y[own].mean()))


def test_tenths_of_one_line_are_straight_and_those_of_a_curve_are_not() -> None:
    """Broken: R squared of the tokens themselves, which the noise of single tokens makes small."""
    x = ONE.numbers["target_entropy"]
    noise = np.random.default_rng(1).normal(0, 0.3, x.shape)
    for values, straight in ((-0.1 * x, True), (0.3 * np.abs(x - 1.3), False)):
        ONE.numbers["tested"] = values + noise
        found = over_points(tenth_points(ONE, "tested"), r_squared)(np.ones((1, PROMPTS)))[0]
        assert (found > 0.8) == straight
        assert told_by(ONE, "target_entropy", "tested")(np.ones((1, PROMPTS)))[0] < 0.3
    del ONE.numbers["tested"]


def test_a_bend_is_the_upper_slope_less_the_lower_one() -> None:
    x = np.array([[0.0, 1.0, 2.0, 4.0, 5.0, 6.0]])
    y = np.where(x < 3, 1 - 0.1 * x, 1 - 0.3 * x)
    assert bend(x, y) == pytest.approx(-0.2) and bend(x, 2 - x) == pytest.approx(0, abs=1e-12)
    assert slope(x, 2 - x) == pytest.approx(-1) and r_squared(x, 2 - x) == pytest.approx(1)
