"""Labels of candidates, and the numbers that say how good labels and scores are."""

from collections import Counter

import numpy as np
import pytest
from scipy.stats import mannwhitneyu

from bebop.adaptation.candidates import wrong_steps
from bebop.systems.pad.labels import (
    Rollouts,
    auc,
    calibration,
    expected_calibration_error,
    kappa,
    loss_of_value,
    pivots,
    split_of,
)

NONE = np.zeros(1, dtype=bool)


def rollouts(value: str, reference: str, residual: str) -> Rollouts:
    return Rollouts(prompt=0, prefix=(1,), token=2, p=0.1, q=0.5, entropy=1.0, value=value, reference=reference,
                    residual=residual)  # fmt: skip


def test_both_definitions_by_hand() -> None:
    """The counter-example of SPEC 4.4: a keeps the prefix' value, and loses against what would have come instead."""
    a = rollouts(value="1" * 67 + "0" * 33, reference="1" * 66 + "0" * 34, residual="1" * 100)
    paper, residual = (loss_of_value([a], d) for d in ("paper", "residual"))  # type: ignore[arg-type]
    assert paper == pytest.approx([-0.01]) and residual == pytest.approx([0.33])
    assert not pivots(paper, 0.1, NONE)[0] and pivots(residual, 0.1, NONE)[0] and pivots(paper, 0.1, ~NONE)[0]
    assert loss_of_value([rollouts("1000", "1110", "0000")], "paper", 2, 4) == pytest.approx([0.5])


def test_auc_is_the_rank_statistic() -> None:
    rng = np.random.default_rng(0)
    labels = rng.random(200) < 0.3
    scores = np.round(rng.normal(size=200) + labels, 1)  # with ties
    found = mannwhitneyu(scores[labels], scores[~labels]).statistic / (labels.sum() * (~labels).sum())
    assert auc(scores, labels) == pytest.approx(found) and 0.6 < found < 0.9
    assert auc(-scores, labels) == pytest.approx(1 - found)
    doubled = np.repeat(scores, 1 + labels), np.repeat(labels, 1 + labels)
    assert auc(scores, labels, 1.0 + labels) == pytest.approx(auc(*doubled))
    assert np.isnan(auc(scores, np.ones(200, dtype=bool)))


def test_kappa_by_hand() -> None:
    first, second = np.array([1, 1, 1, 0, 0, 0, 0, 0], bool), np.array([1, 1, 0, 0, 0, 0, 0, 1], bool)
    chance = (3 / 8) * (3 / 8) + (5 / 8) * (5 / 8)
    assert kappa(first, second) == pytest.approx((0.75 - chance) / (1 - chance))
    assert kappa(first, first) == 1.0 and kappa(first, ~first) < 0 and np.isnan(kappa(NONE, NONE))


def test_calibration_sees_scores_that_are_too_sure() -> None:
    rng = np.random.default_rng(1)
    chance = rng.random(20_000)
    labels = rng.random(20_000) < chance
    assert expected_calibration_error(chance, labels) < 0.02
    assert expected_calibration_error(np.where(chance > 0.5, 0.99, 0.01), labels) > 0.2
    assert sum(count for *_, count in calibration(chance, labels)) == 20_000
    assert calibration(np.array([1.0]), ~NONE) == [(1.0, 1.0, 1)]


def test_a_prompt_is_in_one_split() -> None:
    shares = Counter(split_of(prompt, 3) for prompt in range(5000))
    assert [round(shares[name] / 5000, 1) for name in ("train", "validation", "test")] == [0.6, 0.2, 0.2]
    assert any(split_of(prompt, 3) != split_of(prompt, 4) for prompt in range(20))


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Step by step: 8-4=4 and 4+1=5; 5-9=-4, then -4+7=3\nSo it is <answer>3</answer>", 0),
        ("8-4=4; 4+1=6", 1),
        ("-4+7=-3", 1),
        ("2-1=1, then 1=1", 0),
        ("least 3 left 21 76, then most 76 left 21", 0),
        ("least 63 left 76 21 85 3; least 21 left 76 85 3", 2),
        ("nothing to check: 5, 7", 0),
        ("3+4=70", 1),
        ("3+4=7", 0),
    ],
)
def test_wrong_steps_are_counted(text: str, wrong: int) -> None:
    assert wrong_steps(text) == wrong
