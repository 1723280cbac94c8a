import random
from collections.abc import Callable
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bebop.kernels.block_verify import block_thresholds, block_verify, residual_distribution
from bebop.kernels.verify import _count, chain_verify, one_hot, sample
from bebop.kernels.verify import reference as chain_reference

BELOW_ONE = 1 - 2.0**-53
Verify = Callable[..., tuple[Tensor, Tensor]]


def pick(probs: list[float], u: float) -> int:
    """First token with cumsum > u * total, else the last of positive mass."""
    total, running = 0.0, 0.0
    for mass in probs:
        total += mass
    for token, mass in enumerate(probs):
        running += mass
        if running > u * total:
            return token
    return max(token for token, mass in enumerate(probs) if mass > 0)


def loop(tokens: list[int], q: list[list[float]], p: list[list[float]], u: list[float], k: int) -> tuple[int, int]:
    """SPEC 0.3 for one row with ``k`` of its drafts in use; ``u``: the tests, the residual, the bonus."""
    n = k
    for i in range(k):
        if not u[i] * q[i][tokens[i]] < p[i][tokens[i]]:
            n = i
            break
    if n == k:
        return n, pick(p[k], u[-1])
    residual = [max(0.0, a - b) for a, b in zip(p[n], q[n], strict=True)]
    return n, pick(residual if sum(residual) > 0 else p[n], u[-2])


NUMBERS = (0.0, 0.5, BELOW_ONE)  # beside numbers between them


@st.composite
def chains(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Random chains: distributions of small integers (so with zeros and ties), drafts of positive q, ragged lengths.

    One seed a chain: to draw each of some hundred masses by itself takes ten times as long.
    """
    batch, drafts, vocab = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rng = random.Random(draw(st.integers(0, 10**9)))

    def distributions(rows: int) -> Tensor:
        x = torch.tensor(rng.choices((0, 0, 1, 2, 5), k=batch * rows * vocab), dtype=torch.float64)
        x = x.view(batch, rows, vocab)
        x[..., rng.randrange(vocab)] += (x == 0).all(-1)
        return x / x.sum(-1, keepdim=True)

    def numbers(count: int) -> Tensor:
        drawn = [rng.choice((*NUMBERS, rng.random(), rng.random(), rng.random())) for _ in range(batch * count)]
        return torch.tensor(drawn, dtype=torch.float64).view(batch, count)

    q, p = distributions(drafts), distributions(drafts + 1)
    lengths = torch.tensor([rng.randint(0, drafts) for _ in range(batch)])
    return sample(q, numbers(drafts)), q, p, numbers(drafts + 2), lengths


@settings(max_examples=200, deadline=None)
@given(chains())
def test_equals_the_plain_loop(chain: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> None:
    tokens, q, p, u, lengths = chain
    accepted, token = chain_verify(tokens, q, p, u, lengths)
    for row in range(len(tokens)):
        k = int(lengths[row])
        expected = loop(tokens[row].tolist(), q[row].tolist(), p[row].tolist(), u[row].tolist(), k)
        assert (int(accepted[row]), int(token[row])) == expected
        n = int(accepted[row])
        emitted = [*tokens[row, :n].tolist(), int(token[row])]
        assert all(p[row, i, v] > 0 for i, v in enumerate(emitted))


@settings(max_examples=100, deadline=None)
@given(chains())
def test_drafts_that_were_not_sampled_need_no_distribution(
    chain: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Greedy or looked-up drafts: without a distribution what the dense one-hot distribution gives, by chain and by
    block."""
    tokens, _, p, u, lengths = chain
    dense = one_hot(tokens, p.shape[-1], p.dtype)
    for verify in (chain_verify, block_verify):
        expected = verify(tokens, dense, p, u, lengths)
        assert all(torch.equal(a, b) for a, b in zip(verify(tokens, None, p, u, lengths), expected, strict=True))


@settings(max_examples=50, deadline=None)
@given(chains())
def test_no_draft_is_plain_decoding(chain: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> None:
    tokens, q, p, u, _ = chain
    for verify in (chain_verify, block_verify):
        for probs in (None, q[:, :0]):
            accepted, token = verify(tokens[:, :0], probs, p[:, :1], u[:, :2])
            assert accepted.tolist() == [0] * len(tokens) and torch.equal(token, sample(p[:, 0], u[:, 1]))


@settings(max_examples=100, deadline=None)
@given(chains())
def test_no_lengths_means_all_drafts(chain: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> None:
    tokens, q, p, u, _ = chain
    full = chain_verify(tokens, q, p, u, torch.full((len(tokens),), tokens.shape[1]))
    assert all(torch.equal(a, b) for a, b in zip(chain_verify(tokens, q, p, u), full, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sample_at_the_ends_of_the_unit_interval(dtype: torch.dtype) -> None:
    probs = torch.tensor([[0, 0.2, 0, 0.3, 0, 0.5, 0, 0]], dtype=dtype).expand(4, -1)
    u = torch.tensor([0.0, 0.2, BELOW_ONE, 1.0], dtype=torch.float64)  # BELOW_ONE is 1 in single precision
    assert sample(probs, u).tolist() == [1, 3 if dtype == torch.float64 else sample(probs[:1], u[1:2]).item(), 5, 5]
    wrong = (probs.cumsum(-1) < u[:, None].to(dtype) * probs.sum(-1, keepdim=True)).sum(-1)  # ">=" in place of ">"
    assert wrong[0] == 0 and probs[0, 0] == 0  # picks a token of probability zero at u = 0


def test_sums_that_may_not_be_monotone_are_sampled_alike() -> None:
    probs = torch.randn(64, 300, generator=torch.Generator().manual_seed(0)).mul(3).softmax(-1)
    probs[:, 250:] = 0
    u = torch.linspace(0, BELOW_ONE, 64, dtype=torch.float64)
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    bound = u[:, None].float() * total
    assert torch.equal(_count(probs, cdf, bound, total), sample(probs, u))
    cdf[:, 7] = 0  # as parallel sums might
    assert (probs.gather(-1, _count(probs, cdf, bound, total)[:, None]) > 0).all()


def test_sample_follows_the_distribution() -> None:
    probs = torch.tensor([0.1, 0.0, 0.25, 0.4, 0.0, 0.25], dtype=torch.float64)
    u = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    counts = sample(probs.expand(4000, -1) * 7.0, u).bincount(minlength=6).double() / 4000  # unnormalised on purpose
    assert (counts - probs).abs().max() < 1e-9


def grid(n: int) -> Tensor:
    return (torch.arange(n, dtype=torch.float64) + 0.5) / n


def output_distribution(verify: Verify, p: Tensor, q: Tensor, bonus: Tensor, n: int = 200) -> tuple[Tensor, Tensor]:
    """BatchSampling [V] of the first and (joint with an accepted first) second token of one draft, without randomness.

    Each draft in proportion to q, the test and the next token's number over a grid of n x n.
    """
    first, second = torch.zeros_like(p), torch.zeros_like(p)
    tests, draws = grid(n).repeat_interleave(n), grid(n).repeat(n)
    for y in q.nonzero()[:, 0]:
        tokens = y.expand(n * n, 1)
        u = torch.stack([tests, draws, draws], 1)
        size = (n * n, -1, -1)
        accepted, token = verify(tokens, q.expand(size[0], 1, -1), torch.stack([p, bonus]).expand(size), u)
        weight = q[y] / (n * n)
        shown = torch.where(accepted == 1, tokens[:, 0], token)
        first += weight * shown.bincount(minlength=len(p))
        second += weight * token[accepted == 1].bincount(minlength=len(p))
    return first, second


P = torch.tensor([0.05, 0.0, 0.45, 0.2, 0.3], dtype=torch.float64)
Q = torch.tensor([0.3, 0.25, 0.05, 0.4, 0.0], dtype=torch.float64)
BONUS = torch.tensor([0.0, 0.7, 0.1, 0.0, 0.2], dtype=torch.float64)
ONE_HOT = torch.tensor([0, 0, 0, 1.0, 0], dtype=torch.float64)


@pytest.mark.parametrize("q", [Q, P, ONE_HOT, torch.tensor([0, 1.0, 0, 0, 0], dtype=torch.float64)])
def test_output_distribution_is_the_targets(q: Tensor) -> None:
    first, second = output_distribution(chain_verify, P, q, BONUS)
    assert (first - P).abs().max() < 0.008
    overlap = torch.minimum(P, q).sum()
    assert (second.sum() - overlap).abs() < 0.008
    assert (second - overlap * BONUS).abs().max() < 0.008


def wrong_residual(tokens: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """After a rejection draws from p itself."""
    accepted, token = chain_verify(tokens, q, p, u)
    return accepted, torch.where(accepted == 1, token, sample(p[:, 0], u[:, 1]))


def wrong_test(tokens: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Accepts with probability p, as if q were one-hot."""
    accepted, token = chain_verify(tokens, torch.ones_like(q), p, u)
    residual = sample((p[:, 0] - q[:, 0]).clamp_min(0), u[:, 1])
    return accepted, torch.where(accepted == 1, token, residual)


def wrong_bonus(tokens: Tensor, q: Tensor, p: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """Draws the bonus from row K, as printed in the paper."""
    return chain_verify(tokens, q, p[:, [0, 0]], u)


@pytest.mark.parametrize("verify", [wrong_residual, wrong_test, wrong_bonus])
def test_broken_rules_are_caught(verify: Verify) -> None:
    first, second = output_distribution(verify, P, Q, BONUS)
    overlap = torch.minimum(P, Q).sum()
    assert max((first - P).abs().max(), (second - overlap * BONUS).abs().max()) > 0.03


def test_one_hot_draft_is_target_only() -> None:
    """Accepted iff u < p(draft); else drawn from p without the draft: the same numbers decide both forms."""
    n = 50
    u = torch.rand(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    target = torch.stack([P, BONUS]).expand(n, -1, -1)
    accepted, token = chain_verify(torch.full((n, 1), 3), ONE_HOT.expand(n, 1, -1), target, u)
    assert torch.equal(accepted == 1, u[:, 0] < P[3])
    rest = P * (1 - ONE_HOT)
    expected = torch.where(accepted == 1, sample(target[:, 1], u[:, 2]), sample(rest.expand(n, -1), u[:, 1]))
    assert torch.equal(token, expected) and 0 < accepted.sum() < n


def test_equal_distributions_accept_everything_and_survive_rounding() -> None:
    p = torch.rand(64, 1, 50, generator=torch.Generator().manual_seed(1)).softmax(-1)
    target, u = torch.cat([p, p], 1), torch.full((64, 3), BELOW_ONE, dtype=torch.float64)
    tokens = sample(p, torch.rand(64, 1, dtype=torch.float64))
    assert chain_verify(tokens, p, target, u)[0].tolist() == [1] * 64
    # q a hair above p everywhere: a test may fail, the residual has no mass, and the target's distribution steps in.
    q = p * 1.01
    accepted, token = chain_verify(tokens, q, target, u)
    assert accepted.tolist() == [0] * 64
    assert torch.equal(token, sample(p[:, 0], u[:, 1]))


# ---- Exactness by enumeration in fp64: all chains, with the uniforms integrated out (u_i < h_i has probability h_i)

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
def test_broken_block_rules_are_caught(rule: Rule) -> None:
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
            chain_reference(world.chains, world.q, world.p, u),
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
