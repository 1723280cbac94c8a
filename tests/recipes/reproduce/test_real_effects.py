"""Intervals over seeds and prompts: what they hold of simulated crossed data, and which shortcuts do not."""

import math
from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest
from numpy.typing import NDArray

from bebop.adaptation.probe import NUMBERS, Probe
from bebop.metrics.intervals import NORMAL_95, across_seeds, resampled
from recipes.reproduce.measured import student_tail
from recipes.reproduce.real.effects import (
    DECISIVE,
    Effect,
    accept_length,
    contrast,
    mean_of,
    noise,
    paired,
    prompts,
    seeds_of,
    single,
    slope_of,
)
from tests.covering import Row, Trial, cases, shares, short

Array = NDArray[np.float64]
PROMPTS, SEEDS, TRUTH = 40, 3, 0.03


def chains(row: NDArray[np.int64], accept: Array) -> Probe:
    """Chains with an estimate of the accept length each; overlap and entropy are made of it."""
    overlap = np.stack([accept - 1, accept - 1.1], 1)
    numbers = dict.fromkeys(NUMBERS, overlap) | {"target_entropy": 1 - 2 * overlap}
    return Probe(
        row=row, place=np.arange(len(row)), task=np.full(len(row), "gcd"), numbers=numbers, accept=accept,
        accept_greedy=accept,
    )  # fmt: skip


def arms(
    rng: np.random.Generator, over_seeds: float, over_prompts: float, both: float = 0.05
) -> tuple[list[Probe], list[Probe]]:
    """Two arms of three seeds on the same prompts; the first is better by TRUTH, on some seeds and prompts more."""
    lengths = rng.integers(3, 12, PROMPTS)
    row = np.repeat(np.arange(PROMPTS), lengths) * 2  # every other text has no chain
    hard = rng.normal(0, 0.2, PROMPTS)
    helped = rng.normal(0, over_prompts, PROMPTS)
    found: tuple[list[Probe], list[Probe]] = ([], [])
    for _ in range(SEEDS):
        gains = (TRUTH + rng.normal(0, over_seeds) + helped + rng.normal(0, both, PROMPTS), np.zeros(PROMPTS))
        for arm, gain in zip(found, gains, strict=True):
            level = (1.6 + hard + gain)[row // 2]
            arm.append(chains(row, level + 0.1 * rng.normal(size=len(row))))
    return found


# ---- coverage


def of_effect(effect: Effect) -> Trial:
    return Trial(effect.value, effect.low, effect.high, TRUTH)


def shortcuts(first: list[Probe], second: list[Probe]) -> dict[str, Trial]:
    """What one might do instead."""
    gains = [a.accept - b.accept for a, b in zip(first, second, strict=True)]
    everything = np.concatenate(gains)
    row = np.unique(first[0].row, return_inverse=True)[1]
    totals, counts = np.sum([np.bincount(row, gain) for gain in gains], 0), SEEDS * np.bincount(row)
    apart = [np.bincount(row, gain) for gain in gains]  # prompts of each seed taken for other prompts
    parts, sizes = np.concatenate(apart), np.tile(np.bincount(row), SEEDS)
    seeds = np.array([gain.mean() for gain in gains])
    three = np.random.default_rng(0).integers(SEEDS, size=(1000, SEEDS))
    low, high = np.percentile(seeds[three].mean(1), [2.5, 97.5])
    student = across_seeds(seeds)
    found = {
        "chains": resampled(lambda w: (w @ everything) / w.sum(1), len(everything), draws=300),
        "prompts": resampled(lambda w: (w @ totals) / (w @ counts), len(totals)),
        "prompts of each seed": resampled(lambda w: (w @ parts) / (w @ sizes), len(parts)),
        "seeds": student,
    }
    trials = {name: Trial(each.value, each.low, each.high, TRUTH) for name, each in found.items()}
    return trials | {"bootstrapped seeds": Trial(student.value, float(low), float(high), TRUTH)}


def crossed(seed: int, over_seeds: float, over_prompts: float) -> Mapping[str, Trial]:
    first, second = arms(np.random.default_rng([70, seed]), over_seeds, over_prompts)
    found = paired(first, second, accept_length)
    return {"both": of_effect(found), **shortcuts(first, second)}


ROWS = {
    name: Row(
        f"paired, {name}",
        "seeds and prompts",
        partial(crossed, over_seeds=seeds, over_prompts=prompts),
        runs=200,
        quick=40 * (name == "alike"),
    )
    for name, (seeds, prompts) in {"seeds differ": (0.04, 0.01), "prompts": (0.0, 0.15), "alike": (0.02, 0.12)}.items()
}


@pytest.mark.parametrize("row", cases(ROWS.values()), ids=str)
def test_the_interval_holds_the_truth_whichever_level_it_varies_over(row: Row) -> None:
    held = shares(row)["both"]
    assert held >= 0.93 and "both" in short(row, narrower=10), held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shortcut", "most"),
    [
        ("seeds differ", "prompts", 0.6),
        ("seeds differ", "chains", 0.6),
        ("seeds differ", "bootstrapped seeds", 0.82),
        ("prompts", "chains", 0.75),
        ("prompts", "prompts of each seed", 0.82),
        ("prompts", "seeds", 0.75),
    ],
)
def test_shortcuts_do_not(name: str, shortcut: str, most: float) -> None:
    assert shares(ROWS[name])[shortcut] <= most


# ---- p-values


def test_p_is_the_level_at_which_the_interval_reaches_zero() -> None:
    effect = single(arms(np.random.default_rng(0), 0.02, 0.1)[0], lambda c: mean_of(c, c.accept - 1.55))
    assert effect.reach(effect.p) == pytest.approx(abs(effect.value), rel=1e-6)
    assert effect.value - effect.low == pytest.approx(effect.reach(0.05))


@pytest.mark.slow
def test_no_effect_has_a_small_p_as_rarely_as_it_says() -> None:
    for over_seeds, over_prompts in ((0.04, 0.01), (0.0, 0.15), (0.02, 0.1)):
        p = []
        for seed in range(150):
            first, second = arms(np.random.default_rng([71, seed]), over_seeds, over_prompts)
            p.append(contrast([mean_of(c, c.accept - TRUTH) for c in first], [accept_length(c) for c in second]).p)
        assert np.mean(np.array(p) < 0.05) < 0.09 and np.mean(np.array(p) < 0.01) < 0.04
        assert np.mean(np.array(p) < 0.5) > 0.3, "nor is it always large"


@pytest.mark.parametrize(("seed_error", "prompt_error"), [(0.01, 0.0), (0.01, 0.01), (0.002, 0.01), (0.0, 0.01)])
def test_the_rules_see_the_same_interval_and_no_smaller_p(seed_error: float, prompt_error: float) -> None:
    shape = Effect(value=0, low=0, high=0, p=1, floor=0.01, seeds=3, seed_error=seed_error, prompt_error=prompt_error)
    for level in (0.05, 0.01, DECISIVE):
        value, half = shape.reach(level), shape.reach(0.05)
        effect = Effect(
            value=value, low=value - half, high=value + half, p=level, floor=0.01, seeds=3, seed_error=seed_error,
            prompt_error=prompt_error,
        )  # fmt: skip
        number = effect.number()
        assert (number.low, number.high) == (effect.low, effect.high)
        assert 2 * number.above(0) == pytest.approx(level, rel=0.25) or 2 * number.above(0) > level
        assert level > DECISIVE or 2 * number.above(0) >= level * 0.999
    normal = 2 * student_tail(shape.reach(DECISIVE) / (shape.reach(0.05) / NORMAL_95), 10**3)
    assert seed_error == 0 or normal < DECISIVE, "to take it for normal would be too sure"


def test_a_head_does_not_differ_from_itself() -> None:
    first, _ = arms(np.random.default_rng(8), 0.05, 0.1)
    found = paired(first, first, accept_length)
    assert (found.value, found.p) == (0.0, 1.0) and found.number().above(0) == 1.0


# ---- noise


def test_the_noise_floor_is_how_far_two_seeds_of_one_arm_lie_apart() -> None:
    first, second = arms(np.random.default_rng(3), 0.05, 0.02)
    found = paired(first, second, accept_length)
    pairs = [[np.mean(a.accept) - np.mean(b.accept) for b in arm for a in arm if a is not b] for arm in (first, second)]
    assert found.floor == pytest.approx(max(np.sqrt(np.mean(np.square(p))) for p in pairs))
    assert found.size == pytest.approx(found.value / found.floor)


@pytest.mark.slow
def test_arms_that_share_their_seeds_show_less_than_the_noise_floor() -> None:
    """What a seed does to every arm alike, such as the order of completions, cancels between arms: no noise floor."""
    rng, apart, floors = np.random.default_rng(4), [], []
    for _ in range(60):
        shared, row = rng.normal(0, 0.05, SEEDS), np.repeat(np.arange(10), 4)
        arms_of = [[chains(row, 1.5 + s + 0.01 * rng.normal() + np.zeros(40)) for s in shared] for _ in range(2)]
        found = paired(*arms_of, accept_length)
        apart.append(noise(seeds_of(arms_of[0], accept_length) - seeds_of(arms_of[1], accept_length)))
        floors.append(found.floor)
    truth = math.sqrt(2) * math.hypot(0.05, 0.01)
    assert np.sqrt(np.mean(np.square(floors))) == pytest.approx(truth, rel=0.2)
    assert np.sqrt(np.mean(np.square(apart))) < truth / 2
    one = chains(row, np.linspace(1, 2, 40))
    assert noise(seeds_of([one, one, one], accept_length)) == 0, "a repeated head is no repeated seed"


def test_one_seed_tells_nothing_of_seeds() -> None:
    (only, *_), (other, *_) = arms(np.random.default_rng(5), 0.0, 0.1)
    found = paired([only], [other], accept_length)
    assert math.isnan(found.low) and math.isnan(found.floor) and found.p == 1.0 and found.prompt_error > 0
    assert math.isnan(found.number().low) and found.number().above(0) == 1.0


# ---- statistics


def test_statistics_are_those_of_all_chains() -> None:
    one = arms(np.random.default_rng(6), 0.0, 0.1)[0][0]
    entropy, overlap = one.numbers["target_entropy"].copy(), one.numbers["overlap"].copy()
    overlap[::3, 1] = np.nan
    known = np.isfinite(overlap)
    overlap += 0.1 * entropy**2
    weights = np.ones((1, len(np.unique(one.row))))
    assert mean_of(one, overlap)(weights) == pytest.approx(np.nanmean(overlap))
    slope = np.polyfit(entropy[known], overlap[known], 1)[0]
    assert slope_of(one, entropy, overlap)(weights) == pytest.approx(slope)
    weights[0, 1] = 3.0
    place, count = prompts(one), np.where(prompts(one) == 1, 3, 1)
    assert place.max() + 1 == weights.shape[1]
    assert accept_length(one)(weights) == pytest.approx(np.average(one.accept, weights=count))


def test_heads_on_other_prompts_are_not_compared() -> None:
    first, second = arms(np.random.default_rng(7), 0.0, 0.1)
    fewer = second[2].row < 20
    second[2] = chains(second[2].row[fewer], second[2].accept[fewer])
    with pytest.raises(AssertionError, match="the same prompts"):
        paired(first, second, accept_length)
    with pytest.raises(AssertionError, match="the same seeds"):
        paired(first, second[:2], accept_length)
