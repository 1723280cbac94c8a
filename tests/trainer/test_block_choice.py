"""Labels of block sizes on tables made by hand, and a predictor that has to find a marker in the prompt."""

import math
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.model.attention import CausalContext
from bebop.systems.block.losses import Evaluated, Sweep, best, evaluate, fit, goals, labels, split
from bebop.systems.block.network import FEATURES, BlockLengthNetwork, PromptEnd
from tests.builders import tiny_policy

SIZES = (2, 4, 6, 8)


def sweep(tokens: object, cycles: object) -> Sweep:
    table = np.asarray(cycles, float)
    return Sweep(sizes=SIZES, tokens=np.asarray(tokens, float), cycles=table, features=torch.zeros(len(table), 1))


# ---- labels


def test_a_label_is_the_size_of_the_most_tokens_a_cycle() -> None:
    """30 tokens in 20, 12, 10 and 11 cycles; then an answer that every size needs as many cycles for."""
    table = sweep([[30] * 4, [9] * 4], [[20, 12, 10, 11], [6, 6, 6, 6]])
    assert labels(table).tolist() == [2, 0], "of sizes that tie, the smallest"


def test_ties_go_to_the_smallest_size_whatever_rounding_does() -> None:
    third = 1 / 3
    assert best(np.array([[0.1, third, 1 - 2 * third, third]])).tolist() == [1]
    assert np.argmax([0.1, third, 1 - 2 * third, third]) == 2, "rounding alone would decide"


def test_a_larger_block_has_to_be_worth_its_time() -> None:
    """By tau the size of 6 wins; its 1.2 times as many tokens do not pay a cycle of 1.5 times the length."""
    table = sweep([[30] * 4], [[20, 12, 10, 10]])
    assert labels(table).tolist() == [2]
    assert labels(table, np.array([0.9, 1.0, 1.5, 2.0])).tolist() == [1]
    assert labels(table, np.array([1.0, 1.0, 1.1, 2.0])).tolist() == [2]


def test_the_splits_are_disjoint_and_whole() -> None:
    parts = split(50, 3)
    assert [len(part) for part in parts] == [30, 10, 10]
    assert sorted(np.concatenate(parts).tolist()) == list(range(50))
    assert not np.array_equal(parts[0], split(50, 4)[0])


# ---- a planted signal


def prompts(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Prompts [N, 8] of random tokens of which the last is a marker, 1 or 2; and which [N]."""
    numbers = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 23, (count, 8), generator=numbers)
    marked = torch.randint(0, 2, (count,), generator=numbers)
    ids[:, 7] = 1 + marked
    return ids, marked


@cache
def planted(count: int = 1600) -> Sweep:
    """After marker 2 text is predictable, and large blocks are good; after marker 1 small ones are, within noise."""
    policy = tiny_policy(24, seed=3)
    ids, marked = prompts(count, 0)
    with torch.no_grad():
        hidden = policy.hidden(ids, torch.arange(8).expand_as(ids), CausalContext())
        features = policy.logits(hidden[:, -1])
    means = np.array([[2.5, 2.2, 1.9, 1.6], [1.6, 1.9, 2.2, 2.5]])[marked.numpy()]
    tau = means + np.random.default_rng(0).normal(0, 0.05, means.shape)
    return Sweep(sizes=SIZES, tokens=tau * 100, cycles=np.full_like(tau, 100), features=features)


def found(table: Sweep, features: Tensor, target: str = "classify") -> Evaluated:
    """What a predictor that was trained on three fifths of the prompts makes of a fifth that it has not seen."""
    train, _, test = split(len(table.tau), 0)
    wanted = goals(table, target)
    torch.manual_seed(0)
    network = BlockLengthNetwork(inputs=features.shape[1], candidates=SIZES, default=4, hidden=64)
    fit(
        network,
        features[torch.from_numpy(train)],
        wanted[torch.from_numpy(train)],
        steps=1000 if target == "regress" else 300,
        lr=5e-3,
        batch=64,
        seed=0,
    )
    with torch.no_grad():
        sizes = network.sizes(features[torch.from_numpy(test)])
    choice = np.searchsorted(SIZES, sizes.numpy())
    return evaluate(table.part(test), choice, int(table.part(train).tau.mean(0).argmax()))


def test_a_marker_that_decides_predictability_is_found() -> None:
    table = planted()
    seen = found(table, table.features)
    assert seen.accuracy > 0.9 and seen.share.low > 0.8
    assert seen.tau["best_fixed"].value < seen.tau["predicted"].value <= seen.tau["oracle"].value


@pytest.mark.slow
def test_a_regression_of_the_tokens_of_every_size_finds_it_too() -> None:
    table = planted()
    seen = found(table, table.features, "regress")
    assert seen.accuracy > 0.9 and seen.share.low > 0.8


def test_what_is_regressed_on_has_the_label_as_its_largest_value() -> None:
    table = planted(50)
    for seconds in (None, np.array([1.0, 1.1, 1.3, 1.6])):
        assert goals(table, "regress", seconds).argmax(1).tolist() == labels(table, seconds).tolist()
    assert goals(table, "classify").tolist() == labels(table).tolist()


def test_sorted_logits_do_not_tell_tokens_apart() -> None:
    """Any order of the vocabulary gives the same; the entropy of four equal logits is ln 4, their margin 0."""
    logits = torch.randn(3, 24, generator=torch.Generator().manual_seed(0))
    hidden, lengths = torch.zeros(3, 2), torch.tensor([5, 6, 700])
    seen = [
        FEATURES["sorted"](PromptEnd(logits=given, hidden=hidden, lengths=lengths))
        for given in (logits, logits[:, torch.randperm(24)])
    ]
    torch.testing.assert_close(*seen)
    even = PromptEnd(logits=torch.zeros(1, 4), hidden=hidden, lengths=lengths)
    torch.testing.assert_close(FEATURES["sorted"](even)[0], torch.tensor([0.0, 0, 0, 0, math.log(4), 0]))
    assert FEATURES["length"](even)[2].item() == pytest.approx(7)


def test_permuted_features_find_nothing() -> None:
    """Trained on the features of other prompts, a predictor cannot beat the best fixed size."""
    table = planted()
    order = torch.randperm(len(table.features), generator=torch.Generator().manual_seed(1))
    blind = found(table, table.features[order])
    assert blind.accuracy < 0.7 and abs(blind.share.value) < 0.25


# ---- the comparison


def test_the_oracle_has_all_of_the_gain_and_the_best_fixed_size_none() -> None:
    table = planted(100)
    fixed = int(table.tau.mean(0).argmax())
    assert evaluate(table, labels(table), fixed).share.value == pytest.approx(1)
    nothing = evaluate(table, np.full(100, fixed), fixed)
    assert nothing.share.value == 0 and nothing.tau["predicted"].value == pytest.approx(table.tau[:, fixed].mean())
