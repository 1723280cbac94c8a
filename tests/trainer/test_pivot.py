"""The pivot classifier: its training on examples whose pivots are known, and the labels of candidates.

Then the numbers that say how good labels and scores are.
"""

from collections import Counter

import numpy as np
import pytest
import torch
from scipy.stats import mannwhitneyu

from bebop.adaptation.candidates import wrong_steps
from bebop.systems.pad.labels import (
    Rollouts,
    auc,
    calibration,
    expected_calibration_error,
    gained,
    kappa,
    loss_of_value,
    pivots,
    reliability,
    rules_at,
    split_of,
)
from bebop.systems.pad.network import Features, PivotNetwork
from bebop.systems.pad.training import Examples, PivotTrainer, scores


def examples(seed: int, count: int = 600) -> Examples:
    """A pivot in four, by the first number of the state alone."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, 6, generator=generator) * 20 + 7
    p, entropy = (torch.rand(count, generator=generator) for _ in range(2))
    return Examples(hidden=hidden, p=p, entropy=entropy, pivots=(hidden[:, 0] > 7 + 0.67 * 20).long())


def trainer(features: Features = "all") -> PivotTrainer:
    torch.manual_seed(0)
    network = PivotNetwork(size=6, layer=0, features=features, inner=8, middle=8)
    return PivotTrainer(network, examples(1), examples(2), lr=3e-3, weight_decay=0.0, seed=0)


def area(one: PivotTrainer) -> float:
    held_out = examples(3)
    return auc(scores(one.network, held_out), held_out.pivots.numpy().astype(bool))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("features", "low", "high"), [("all", 0.97, 1.0), ("hidden", 0.97, 1.0), ("scalars", 0.35, 0.65)]
)
def test_it_learns_what_its_features_say(features: Features, low: float, high: float) -> None:
    one = trainer(features)
    for _ in range(150):
        one.update(64)
    assert low < area(one) <= high


def test_classes_count_alike() -> None:
    """Of 600 examples every fourth is a pivot; at the start both classes make up half of the loss."""
    one = trainer()
    share = float(one.train.pivots.float().mean())
    assert 0.2 < share < 0.3
    assert one.weights.tolist() == pytest.approx([0.5 / (1 - share), 0.5 / share])
    for _ in range(150):
        one.update(64)
    assert float(scores(one.network, one.train).mean()) == pytest.approx(share, abs=0.12)


def test_the_best_on_validation_is_kept() -> None:
    one = trainer()
    for _ in range(60):
        one.update(64)
    good = one.evaluate()
    for group in one.optimizer.param_groups:
        group["lr"] = 3.0
    for _ in range(20):
        one.update(64)
    assert one.evaluate() < good
    assert one.take_best() == (good, 60)
    assert auc(scores(one.network, one.validation), one.validation.pivots.numpy().astype(bool)) == good


def test_a_resumed_training_repeats_an_uninterrupted_one_to_the_bit() -> None:
    whole, half = trainer(), trainer()
    for _ in range(5):
        whole.update(32), half.update(32)
    half.evaluate(), whole.evaluate()
    resumed = trainer()
    resumed.load_state_dict(half.state_dict())
    for one in (whole, resumed):
        losses = [one.update(32) for _ in range(5)]
    assert losses and whole.version == resumed.version == 10
    for name, tensor in whole.network.state_dict().items():
        assert torch.equal(tensor, resumed.network.state_dict()[name])
    assert resumed.take_best() == whole.take_best()


def test_overrides_by_rules_by_hand() -> None:
    losses = np.array([0.5, 0.0, -0.1, 0.4])
    found = rules_at(0.5, np.array([0.9, 0.1, 0.2, 0.8]), losses, np.array([0.1, 0.2, 0.3, 0.4]), np.ones(4))
    assert found["classifier"] == found["oracle"] == pytest.approx(0.05) and found["inverted"] == pytest.approx(-0.45)
    assert found["probability"] == pytest.approx(-0.15) and found["random"] == pytest.approx(-0.2)
    one = gained(np.array([0.9, 0.1, 0.2, 0.8]), losses, np.array([0.0, 0.0, 1.0, 1.0]), 0.5)
    assert one["share"]["value"] == 0.5 and one["change"]["value"] == pytest.approx(0.05)


def test_labels_that_are_noise_do_not_agree() -> None:
    rng = np.random.default_rng(0)

    def rows(chance: np.ndarray) -> list[Rollouts]:
        bits = ["".join("01"[int(b)] for b in rng.random(16) < c) for c in chance]
        fixed = dict(prompt=0, prefix=(1,), token=2, p=0.1, q=0.5, entropy=1.0)
        return [Rollouts(**fixed, value=b, reference="1" * 16, residual="1" * 16) for b in bits]  # type: ignore[arg-type]

    clear, noise = np.where(np.arange(300) % 2, 0.98, 0.3), np.full(300, 0.9)
    assert reliability(rows(clear), rows(clear), 0.1)["paper"]["kappa"] > 0.8
    assert abs(reliability(rows(noise), rows(noise), 0.1)["residual"]["kappa"]) < 0.2


# ---- labels


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
