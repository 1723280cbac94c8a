"""Ratios, fits and rules of the throughput recipe on numbers whose truth is known."""

import numpy as np
import pytest
import torch

from bebop.metrics.intervals import across_seeds
from recipes.reproduce.throughput.analysis import correlation, facts, modelled, numbers, slope
from recipes.reproduce.throughput.findings import RULES
from recipes.reproduce.throughput.heads import BEST, DRAFTS, HEADS, noisy
from recipes.reproduce.throughput.timing import ARMS, BATCHES, LENGTHS, PLAIN, Costs, Measured, Timed, TimedArm
from recipes.reproduce.verdicts import Finding, judge

SEEDS = (0, 1, 2)
COSTS = Costs(draft=0.1, verify={k: 1 + 0.1 * k for k in LENGTHS})
QUALITY = dict(zip(HEADS, (1.7, 1.75, 1.95, 1.6, 1.3, 0.9), strict=True))  # accepted drafts of 3


def timed(speed: float, accept_length: float = 2.0) -> Timed:
    shares = {"verify": 0.6, "draft": 0.2}
    return Timed(speed=speed, wall=speed, cycles=1000, accepted=1000 * (accept_length - 1), shares=shares)


def test_the_cost_model_by_hand() -> None:
    assert modelled(2.8, 3, 0.1, 1.3) == pytest.approx(1.75)
    assert modelled(2.8, 3, 0.1, 1.3) != pytest.approx(2.8 / (4 * 0.1 + 1.3))  # a draft step too many


def test_a_speed_up_is_the_median_of_ratios_within_rounds() -> None:
    arm = ARMS[1]
    speeds = [(100, 150), (100, 75), (50, 75)]  # the machine was slow for one arm once, for both once
    rounds = [{PLAIN: timed(base), arm: timed(own)} for base, own in speeds]
    measured = Measured(rounds=rounds, costs=[])
    assert measured.ratio(arm, PLAIN) == 1.5
    assert measured.typical(arm) / measured.typical(PLAIN) == 0.75  # the broken variant: a ratio of medians


def test_noise_is_relative_to_each_tensor() -> None:
    torch.manual_seed(0)
    state = {"large": 100 * torch.randn(200, 200), "small": 0.01 * torch.randn(200, 200)}
    made = noisy(state, 0.2, 0)
    for name, tensor in state.items():
        relative = (made[name] - tensor).square().mean().sqrt() / tensor.square().mean().sqrt()
        assert float(relative) == pytest.approx(0.2, rel=0.02)
    assert torch.equal(noisy(state, 0.2, 0)["large"], made["large"])
    assert torch.equal(noisy(state, 0.0, 0)["small"], state["small"])


def test_slope_and_correlation_find_what_was_planted() -> None:
    rng = np.random.default_rng(0)
    x = rng.uniform(-0.3, 0.1, 18)
    y = 0.8 * x + 0.01 + rng.normal(0, 0.005, 18)
    assert slope(x, y) == pytest.approx(0.8, abs=0.05)
    assert slope(y, x) > 1  # the broken variant: axes exchanged
    r = correlation(x.reshape(3, 6), y.reshape(3, 6))
    assert r.value == pytest.approx(np.corrcoef(x, y)[0, 1]) and r.low > 0.95
    unrelated = correlation(x.reshape(3, 6), rng.normal(size=(3, 6)))
    assert unrelated.low <= 0 <= unrelated.high
    assert correlation(x.reshape(3, 6), x.reshape(3, 6)).low > 0.999


def planted(overhead: float = 0.0, speed_of_best: float = 1.0) -> dict[tuple[int, int], Measured]:
    """Speeds as the cost model has them, with a relative ``overhead`` on every cycle that drafts."""
    rng = np.random.default_rng(0)

    def round_() -> dict[TimedArm, Timed]:
        arms = {PLAIN: timed(400 * (1 + 0.002 * rng.normal()), 1.0)}
        for head, system, k in ARMS[1:]:
            length = 1 + QUALITY[head] * k / DRAFTS - 0.1 * (system == "target_only")
            ratio = modelled(length, k, COSTS.draft, COSTS.verify[k]) / (1 + overhead)
            factor = speed_of_best if head == BEST and system == "bebop" else 1.0
            arms[head, system, k] = timed(400 * ratio * factor * (1 + 0.002 * rng.normal()), length)
        return arms

    return {(s, b): Measured(rounds=[round_() for _ in range(3)], costs=[COSTS] * 3) for s in SEEDS for b in BATCHES}


def accepted(factor: float = 1.0) -> dict[int, dict[str, float]]:
    return {s: {h: q * (factor if h == BEST else 1) + 0.001 * s for h, q in QUALITY.items()} for s in SEEDS}


def findings(results: dict[tuple[int, int], Measured], quality: dict[int, dict[str, float]]) -> list[Finding]:
    return judge(RULES, numbers(results, quality), facts(results))


def test_findings_follow_what_was_planted() -> None:
    assert {(f.side, f.untested, f.p < 0.05) for f in findings(planted(), accepted())} == {("confirmed", None, True)}
    slow = {f.statement: f for f in findings(planted(overhead=1.0), accepted(0.8))}
    refuted = [statement for statement, f in slow.items() if f.side == "refuted" and f.p < 0.05]
    wanted = ("End-to-end TV raises acceptance", "Decoding with the adapted head is faster", "The cost model")
    assert all(statement.startswith(wanted) for statement in refuted)
    assert len(refuted) == 1 + 2 * len(BATCHES)
    worse = [f for f in findings(planted(speed_of_best=0.8), accepted()) if f.side == "refuted" and f.p < 0.05]
    assert {f.claim for f in worse} >= {"C2", "C5"}


def test_evidence_names_the_interval() -> None:
    finding = findings(planted(), accepted())[0]
    assert str(across_seeds([1.95 / 1.75 - 1] * 3))[:5] in finding.evidence
