"""Exactness by enumeration in fp64: all chains, with the uniforms integrated out (u_i < h_i has probability h_i)."""

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor

from bebop.kernels.block_verify import block_thresholds, block_verify, residual_distribution
from bebop.kernels.verify import reference as chain_verify
from bebop.kernels.verify import sample

Rule = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def distributions(rows: int, vocabulary: int, seed: int, spread: float = 1.2) -> Tensor:
    noise = torch.randn(rows, vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return (spread * noise).softmax(-1)


class World:
    """BatchSampling after every prefix of up to K tokens, and every chain of K drafts: tokens [V ** K, K], q and p
    along it."""

    def __init__(self, V: int, K: int, seed: int, zeros: bool = False) -> None:
        rows = sum(V**i for i in range(K + 1))
        self.V, self.K = V, K
        self.draft, self.target = distributions(rows, V, seed), distributions(rows, V, seed + 1)
        if zeros:
            self.draft[::2, 0] = self.target[::3, 1] = self.target[1::3, 0] = 0
            self.draft[1::5], self.target[1::5] = (
                distributions(1, V, 7),
                distributions(1, V, 7),
            )  # q = p after some prefixes
            self.draft /= self.draft.sum(-1, keepdim=True)
            self.target /= self.target.sum(-1, keepdim=True)
        self.chains = torch.tensor(list(product(range(V), repeat=K)))
        self.q = torch.stack([self.draft[[self.row(c[:i]) for c in self.chains.tolist()]] for i in range(K)], 1)
        self.p = torch.stack([self.target[[self.row(c[:i]) for c in self.chains.tolist()]] for i in range(K + 1)], 1)
        self.mass = self.q.gather(-1, self.chains[..., None])[..., 0].prod(-1)  # of a chain under the draft

    def row(self, prefix: list[int]) -> int:
        first = sum(self.V**i for i in range(len(prefix)))
        return first + sum(token * self.V ** (len(prefix) - 1 - i) for i, token in enumerate(prefix))

    def sequence(self, tokens: tuple[int, ...]) -> float:
        """Probability of a sequence of at most K + 1 tokens under the target."""
        mass = 1.0
        for i, token in enumerate(tokens):
            mass *= float(self.target[self.row(list(tokens[:i])), token])
        return mass


def block_rule(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P(accepted = n) [B, K + 1], distributions of the next token [B, K + 1, V], and thresholds, from the code under
    test."""
    K = tokens.shape[1]
    weights, h = block_thresholds(tokens, q, p, torch.full((len(tokens),), K))
    return largest(h), next_distributions(weights, q, p), h


def largest(h: Tensor) -> Tensor:
    """P(the largest i with u_i < h_i is n)."""
    none_after = torch.cat([(1 - h).flip(-1).cumprod(-1).flip(-1), torch.ones_like(h[:, :1])], 1)
    return torch.cat([torch.ones_like(h[:, :1]), h], 1) * none_after


def next_distributions(weights: Tensor, q: Tensor, p: Tensor) -> Tensor:
    K = q.shape[1]
    rows = [residual_distribution(weights[:, i], p[:, i], q[:, i]) for i in range(K)] + [p[:, K]]
    probs = torch.stack(rows, 1)
    total = probs.sum(-1, keepdim=True)
    return torch.where(total > 0, probs / total.where(total > 0, 1), p)


def stop_at_first_failure(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _, next_probs, h = block_rule(tokens, q, p)
    reached = torch.cat([torch.ones_like(h[:, :1]), h.cumprod(-1)], 1)
    stop = torch.cat([1 - h, torch.ones_like(h[:, :1])], 1)
    return reached * stop, next_probs, h


def residual_without_weight(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    accepted, _, h = block_rule(tokens, q, p)
    return accepted, next_distributions(torch.ones_like(accepted), q, p), h


def weights_as_thresholds(tokens: Tensor, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    weights, _ = block_thresholds(tokens, q, p, torch.full((len(tokens),), tokens.shape[1]))
    return largest(weights[:, 1:]), next_distributions(weights, q, p), weights[:, 1:]


def output_error(world: World, rule: Rule) -> float:
    """Largest error of the joint distribution of K + 1 tokens: accepted drafts, the next token, then tokens of the
    target."""
    accepted, following, _ = rule(world.chains, world.q, world.p)
    emitted: dict[tuple[int, ...], float] = {}
    for chain, mass, counts, next_probs in zip(world.chains.tolist(), world.mass, accepted, following, strict=True):
        for n, v in product(range(world.K + 1), range(world.V)):
            key = (*chain[:n], v)
            emitted[key] = emitted.get(key, 0.0) + float(mass * counts[n] * next_probs[n, v])
    worst = 0.0
    for tokens in product(range(world.V), repeat=world.K + 1):
        whole, found = world.sequence(tokens), 0.0
        for n in range(1, world.K + 2):
            start = world.sequence(tokens[:n])
            found += emitted.get(tokens[:n], 0.0) * (whole / start if start > 0 else 0.0)
        worst = max(worst, abs(found - whole))
    assert all(world.sequence(tokens) > 0 for tokens, mass in emitted.items() if mass > 1e-15)
    return worst


def block_length(world: World) -> float:
    accepted, _, _ = block_rule(world.chains, world.q, world.p)
    return float((world.mass * (accepted * torch.arange(world.K + 1)).sum(-1)).sum())


def chain_length(world: World) -> float:
    p = world.p[:, : world.K].gather(-1, world.chains[..., None])[..., 0]
    q = world.q.gather(-1, world.chains[..., None])[..., 0]
    passes = (p / q.where(q > 0, 1)).clamp_max(1).cumprod(-1)
    return float((world.mass * passes.sum(-1)).sum())


SIZES = [(2, 1), (2, 4), (3, 3), (4, 2)]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize(("V", "K"), SIZES)
def test_joint_distribution_is_the_targets(V: int, K: int, zeros: bool) -> None:
    for seed in range(2):
        assert output_error(World(V, K, 10 * seed, zeros), block_rule) < 1e-13


@pytest.mark.parametrize("rule", [stop_at_first_failure, residual_without_weight, weights_as_thresholds])
def test_broken_rules_are_caught(rule: Rule) -> None:
    assert output_error(World(3, 3, 0), rule) > 1e-3


@pytest.mark.parametrize(("V", "K"), SIZES)
def test_accepts_at_least_as_much_as_one_by_one(V: int, K: int) -> None:
    gains = []
    for seed in range(6):
        world = World(V, K, 20 * seed)
        gains.append(block_length(world) - chain_length(world))
    assert min(gains) > -1e-12
    assert max(gains) < 1e-12 if K == 1 else max(gains) > 1e-3  # one draft: the same rule


def test_example_of_the_paper() -> None:
    """Two drafts over {a, b}, target (1/3, 2/3), draft (2/3, 1/3): 10/9 accepted one by one, 11/9 as a block."""
    world = World(2, 2, 0)
    world.q, world.p = torch.tensor([2 / 3, 1 / 3]).double().expand(4, 2, 2), torch.tensor([1 / 3, 2 / 3]).double()
    world.p, world.mass = world.p.expand(4, 3, 2), world.q[0, 0][world.chains].prod(-1)
    assert chain_length(world) == pytest.approx(10 / 9, abs=1e-7)
    assert block_length(world) == pytest.approx(11 / 9, abs=1e-7)


@pytest.mark.parametrize("zeros", [False, True])
def test_the_function_decides_as_the_enumerated_rule(zeros: bool) -> None:
    """Largest i with u_i < h_i, then the CDF of the next distribution: the same for random uniforms and ragged
    lengths."""
    world = World(3, 3, 4, zeros)
    pick = torch.multinomial(world.mass, 3000, replacement=True, generator=torch.Generator().manual_seed(0))
    tokens, q, p = world.chains[pick], world.q[pick], world.p[pick]
    u = torch.rand(3000, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    lengths = torch.arange(3000) % 4
    accepted, token = block_verify(tokens, q, p, u, lengths)
    assert accepted[lengths == 0].unique().tolist() == [0] and accepted.unique().tolist() == [0, 1, 2, 3]
    for length in (1, 2, 3):
        row = lengths == length
        _, next_probs, h = block_rule(tokens[row, :length], q[row, :length], p[row, : length + 1])
        qualifies = (u[row, :length] < h).tolist()
        expected = torch.tensor([max([0, *(i + 1 for i, yes in enumerate(line) if yes)]) for line in qualifies])
        assert torch.equal(accepted[row], expected)
        number = torch.where(expected == length, u[row, 4], u[row, 3])
        assert torch.equal(token[row], sample(next_probs[torch.arange(len(expected)), expected], number))
    bonus = lengths == 0
    assert torch.equal(token[bonus], sample(p[bonus, 0], u[bonus, 4]))


def test_one_draft_is_chain_verification() -> None:
    world = World(4, 1, 3)
    u = torch.rand(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    for _ in range(20):
        u = (u + 0.37) % 1
        found, expected = (
            block_verify(world.chains, world.q, world.p, u),
            chain_verify(world.chains, world.q, world.p, u),
        )
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_rounding_never_yields_a_token_without_mass() -> None:
    below_one = 1 - 2.0**-53
    p = torch.zeros(5, 3, 40)
    p[:, :, 5:9] = torch.tensor([1e-38, 1.0, 1e-30, 1e-20])
    q = p[:, :2] * torch.tensor([1.0, 1.01, 0.99, 1.0, 1.0])[:, None, None]
    q[3] = torch.nn.functional.one_hot(torch.tensor([0, 0]), 40)  # the target cannot emit what was drafted
    tokens = torch.tensor([[6, 5], [6, 6], [8, 6], [0, 0], [0, 0]])  # the last: impossible under both
    for value in (0.0, below_one):
        accepted, token = block_verify(tokens, q, p, torch.full((5, 4), value, dtype=torch.float64))
        assert (p[torch.arange(5), accepted, token] > 0).all() and accepted[3:].tolist() == [0, 0]
