"""Sides of the boundary, and what a switch between both kinds of draft is worth, where the truth is known."""

import numpy as np
import pytest

from bebop.adaptation.probe import NUMBERS, Probe
from bebop.kernels.stats import pair_stats
from recipes.reproduce.boundary.sides import Sides, sides, switched, threshold

RNG = np.random.default_rng(0)


def probed(sampled: np.ndarray, greedy: np.ndarray, draft_entropy: np.ndarray) -> Probe:
    """A probe [n, K] with these numbers; ten anchors a completion."""
    row = np.arange(len(sampled)) // 10
    blank = np.full(sampled.shape, 0.5)
    table = {name: blank for name in NUMBERS}
    table |= {"overlap": sampled, "target_only": greedy, "draft_entropy": draft_entropy}
    return Probe(
        row=row, place=row, task=np.where(row % 3 == 0, "a", "b"), numbers=table,
        accept=row.astype(float), accept_greedy=row.astype(float),
    )  # fmt: skip


def two_regimes(noise: float = 0.0) -> Sides:
    """Greedy wins by 0.1 where the draft's entropy is below 1, sampled by 0.3 above: half of the positions each."""
    entropy = RNG.uniform(0, 2, (400, 3))
    greedy = np.where(entropy < 1, 0.9, 0.4) + RNG.normal(0, noise, entropy.shape)
    return sides(probed(np.where(entropy < 1, 0.8, 0.7), greedy, entropy))


def test_the_side_follows_the_printed_condition() -> None:
    import torch

    torch.manual_seed(0)
    q, p = (torch.randn(300, 9).mul(2).softmax(-1).double() for _ in range(2))
    stats = pair_stats(q, p, from_logits=False)
    table = [x.numpy().astype(float)[:, None] for x in (stats.overlap, stats.target_only, stats.draft_entropy)]
    distance = 0.5 * (p - q).abs().sum(-1)
    printed = distance < 1 - p.gather(1, q.argmax(-1, keepdim=True))[:, 0]
    assert sides(probed(*table)).values("sampled_wins").astype(bool).tolist() == printed.tolist()
    assert 0.1 < printed.double().mean() < 0.99


def test_choices_and_their_means() -> None:
    regimes = two_regimes()
    assert regimes.mean("sampled") == pytest.approx(0.75, abs=0.02)
    assert regimes.mean("greedy") == pytest.approx(0.65, abs=0.02)
    assert regimes.mean("best") == pytest.approx(0.80, abs=0.02)
    assert regimes.mean("switch") == pytest.approx(regimes.mean("best"), abs=0.005)
    assert regimes.mean("sampled_wins") + regimes.mean("greedy_wins") == pytest.approx(1.0)
    assert regimes.advantage().low < 0.1 < regimes.advantage().high


def test_a_switch_gains_nothing_where_entropy_says_nothing() -> None:
    n = 4000
    answer, entropy = np.arange(n) // 10, RNG.uniform(0, 2, n)
    sampled, greedy = RNG.uniform(0, 1, n), RNG.uniform(0, 1, n)
    fair = switched(answer, entropy, sampled, greedy).mean()
    fixed = max(sampled.mean(), greedy.mean())
    assert fair < fixed + 0.01
    # Fitted and judged on the same few positions it seems to gain: what the two halves are for.
    few = slice(0, 60)
    bound = threshold(entropy[few], sampled[few], greedy[few])
    seems = np.where(entropy[few] > bound, sampled[few], greedy[few]).mean()
    assert seems > max(sampled[few].mean(), greedy[few].mean())


def test_threshold_ends() -> None:
    entropy = np.array([0.1, 0.2, 0.3])
    assert threshold(entropy, np.ones(3), np.zeros(3)) == -np.inf
    assert threshold(entropy, np.zeros(3), np.ones(3)) == 0.3
    assert threshold(entropy, np.array([0.0, 1.0, 1.0]), np.array([1.0, 0.0, 0.0])) == 0.1


def test_steps_that_do_not_exist_are_left_out() -> None:
    sampled = np.full((20, 3), 0.5)
    sampled[-1, 1:] = np.nan
    table = sides(probed(sampled, sampled - 0.1, sampled))
    assert len(table.sampled) == 58 and table.position.tolist().count(3) == 19
    assert len(table.only(table.position == 2).sampled) == 19
