"""The study of training on PAD's answers: what its jobs are told, how tau is chosen, what is computed from it all."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bebop.config import JobConfig
from bebop.options import PadOptions
from bebop.trajectory import DecodeStats
from recipes.reproduce.pad_training import decoded
from recipes.reproduce.pad_training.analysis import Results, arm_row, by_position, numbers, weighted
from recipes.reproduce.pad_training.decoded import Answers, chosen
from recipes.reproduce.pad_training.jobs import ARMS, LARGE, PADS, PLAIN, SMALL, UNWEIGHTED, WHOLE, configuration
from recipes.reproduce.study import SEEDS
from tests.recipes.reproduce.test_names import missing

TAUS = {SMALL: 0.2, LARGE: 0.7}
ONE = Answers(
    reward=np.array([1.0, 0.0, 1.0, 0.0]),
    log_weight=np.log([0.5, 1.0, 2.0, 4.0]),
    tokens=40,
    truncated=0.0,
    seconds=2.0,
    stats=DecodeStats(reached=np.array([6.0, 4.0]), counts={"bias": np.array([0.3, 0.1])}),
    unweighable=0,
)
ROW = {"reward/mean": 0.5, "rollout/accept_length": 3.0, "response/length": 70.0, "response/truncated": 0.0,
       "train/clip_frac": 0.0, "train/tis_mean": 0.5, "train/tis_ess": 0.25, "train/tis_ess_answers": 0.1,
       "train/tis_capped": 0.0, "rollout/bias/1": 0.1, "rollout/bias/2": 0.3}  # fmt: skip


def results() -> Results:
    keys = [(arm, seed) for arm in ARMS for seed in SEEDS]
    return Results(
        taus=TAUS,
        rows={key: [dict(ROW), dict(ROW)] for key in keys},
        held_out={(arm, seed): 0.1 * ARMS.index(arm) + 0.01 * seed for arm, seed in keys},
        start=dict.fromkeys(SEEDS, 0.2),
        decoded={(arm, seed): replace(ONE, seconds=2.0 + seed) for arm in (PLAIN, SMALL, LARGE) for seed in SEEDS},
    )


def test_every_number_that_a_rule_asks_for_is_computed() -> None:
    by_name = numbers(results())
    assert missing("pad_training", by_name) == set()
    assert missing("pad_training", [name for name in by_name if name != "gain"]) == {"gain"}
    assert by_name[f"{LARGE} - plain"].value == pytest.approx(0.2)
    assert by_name["weights - no weights"].value == pytest.approx(-0.2)
    assert by_name["weighted small tau"].value == pytest.approx((0.5 + 2.0) / 4 - 0.5)


@pytest.mark.slow
def test_arms_differ_by_what_their_name_says() -> None:
    configs = {arm: configuration(arm, 1, TAUS) for arm in ARMS}
    assert configs[PLAIN].decoding.system == "bebop"
    for arm in PADS:
        assert configs[arm].decoding.of(PadOptions).tau == TAUS[SMALL if arm == SMALL else LARGE]
    assert [arm for arm in ARMS if configs[arm].algorithm.tis_level == "sequence"] == [WHOLE]
    assert [arm for arm in ARMS if configs[arm].algorithm.rescore] == [UNWEIGHTED]
    plain = configs[PLAIN]
    same = [replace(c, decoding=plain.decoding, algorithm=plain.algorithm) for c in configs.values()]
    assert all(config == plain for config in same)
    assert configuration(PLAIN, 2, TAUS).task.seed != plain.task.seed


@pytest.mark.slow
def test_tau_is_the_smallest_that_moves_the_distribution_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(policy: Any, config: JobConfig, count: int, seed: int) -> Answers:
        tau = config.decoding.of(PadOptions).tau
        return replace(ONE, stats=replace(ONE.stats, counts={"bias": np.array([tau, 0.0])}))  # R_N is tau / 10

    monkeypatch.setattr(decoded, "answers", one)

    def config(tau: float) -> JobConfig:
        return configuration(SMALL, 0, {SMALL: tau})

    policy: Any = None
    assert chosen(policy, config, [0.025, 0.045]) == [0.3, 0.5]
    assert chosen(policy, config, [0.05]) == [0.5]
    assert chosen(policy, config, [0.001, 0.002]) == [0.1, 0.1]
    assert chosen(policy, config, [0.05, 0.5]) == [0.5, 1.0], "the largest, where none moves it so far"


def test_numbers_of_answers_and_steps_by_hand() -> None:
    assert ONE.per_draft("bias") == pytest.approx(0.04) and ONE.per_draft("overridden") == 0
    assert weighted(ONE) == pytest.approx(2.5 / 4)
    assert by_position(ROW, "bias") == pytest.approx(0.2) and by_position(ROW, "overridden") == 0
    row = arm_row(results(), LARGE)
    assert row["weight variance"].value == pytest.approx(0.5**2 * 3)
    assert arm_row(results(), UNWEIGHTED)["sample size"] == ""
