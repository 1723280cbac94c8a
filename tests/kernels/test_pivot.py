"""Overridden rejections (SPEC 4.2, 4.4): the emitted distribution is the one that was worked out, not the target's."""

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.kernels.pivot import bias, emitted_probs, overridable, pivot_verify, residual
from bebop.kernels.uniforms import uniforms
from bebop.kernels.verify import chain_verify, one_hot, sample
from tests.goodness_of_fit import p_value

DRAWS, VOCAB, LEVEL = 40_000, 6, 1e-3


def distributions(*shape: int, seed: int = 0) -> Tensor:
    """Random distributions [*shape, VOCAB] in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, VOCAB, generator=generator, dtype=torch.float64).mul(1.3).softmax(-1)


def numbers(rows: int, drafts: int, seed: int = 0) -> Tensor:
    """Uniforms [rows, 2 * drafts + 2]."""
    return uniforms(torch.full((rows,), seed), torch.arange(rows), 2 * drafts + 2)


def block(
    q: Tensor, p: Tensor, scores: Tensor, tau: float, rows: int = DRAWS, p_min: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Drafts [rows, K], accepted, next token and overridden of one context: q, scores [K, V] and p [K + 1, V]."""
    drafts = len(q)
    u = numbers(rows, drafts)
    tokens = torch.stack([sample(q[k].expand(rows, -1), u[:, drafts + 2 + k]) for k in range(drafts)], 1)
    at = tokens[..., None]
    chosen = scores.expand(rows, -1, -1).gather(-1, at)[..., 0]
    possible = p[:drafts].expand(rows, -1, -1).gather(-1, at)[..., 0]
    allowed = overridable(chosen, possible, torch.zeros_like(tokens, dtype=torch.bool), tau=tau, p_min=p_min)
    wide = (x.expand(rows, -1, -1) for x in (q, p))
    return tokens, *pivot_verify(tokens, *wide, u[:, : drafts + 2], allowed)


def emitted(tokens: Tensor, accepted: Tensor, token: Tensor) -> Tensor:
    """What comes out [rows, K + 1]; beyond the accepted drafts and one token it means nothing."""
    return torch.cat([tokens, token[:, None]], 1).scatter(1, accepted[:, None], token[:, None])


def histogram(tokens: Tensor) -> np.ndarray:
    return np.bincount(tokens.numpy(), minlength=VOCAB)


@pytest.mark.parametrize("sampled", [True, False])
def test_tau_zero_is_rejection_sampling_to_the_bit(sampled: bool) -> None:
    rows, drafts = 500, 3
    q, p, u = (
        distributions(rows, drafts, seed=1).float(),
        distributions(rows, drafts + 1, seed=2).float(),
        numbers(500, 3),
    )
    tokens = sample(q, u[:, -drafts:])
    lengths = torch.arange(rows) % (drafts + 1)
    chance = p[:, :drafts].gather(-1, tokens[..., None])[..., 0]
    draft = q if sampled else None
    for tau in (0.0, 0.5):
        allowed = overridable(torch.rand(rows, drafts), chance, tokens == 0, tau=tau, p_min=1e-3)
        accepted, token, overridden = pivot_verify(tokens, draft, p, u[:, : drafts + 2], allowed, lengths)
        plain = chain_verify(tokens, draft, p, u[:, : drafts + 2], lengths)
        same = bool((accepted == plain[0]).all() and (token == plain[1]).all())
        assert same == (tau == 0) == (not overridden.any())
        assert bool((accepted <= lengths).all() and (accepted >= plain[0]).all())


def test_beyond_one_the_draft_comes_out() -> None:
    """D2: tau > 1 and p_min = 0 accept all drafts, so that the output has the draft's distribution, and not p."""
    q, p = distributions(2, seed=3), distributions(3, seed=4)
    tokens, accepted, token, _ = block(q, p, torch.full((2, VOCAB), 0.5), tau=1.1)
    assert bool((accepted == 2).all())
    joint = np.bincount((tokens[:, 0] * VOCAB + tokens[:, 1]).numpy(), minlength=VOCAB**2)
    assert (
        p_value(joint, (q[0, :, None] * q[1]).numpy()) > LEVEL > 1e-9 > p_value(joint, (p[0, :, None] * p[1]).numpy())
    )
    assert p_value(histogram(token), p[2].numpy()) > LEVEL, "the bonus is the target's"


def worked_out(p: Tensor, q: Tensor, members: set[int]) -> list[float]:
    """P of SPEC 4.4 in plain Python, from what becomes of each drafted token."""
    chances, rejected = [0.0] * VOCAB, 0.0
    for v in range(VOCAB):
        stands = 1.0 if v in members else min(1.0, float(p[v] / q[v]))
        chances[v] += float(q[v]) * stands
        rejected += float(q[v]) * (1 - stands)
    excess = [max(0.0, float(p[v] - q[v])) for v in range(VOCAB)]
    return [chance + rejected * e / sum(excess) for chance, e in zip(chances, excess, strict=True)]


@pytest.mark.parametrize("seed", range(4))
def test_the_emitted_distribution_is_the_one_worked_out(seed: int) -> None:
    """D3: of both drafts of a block; it is not the target's, which the same test sees."""
    q, p, scores = distributions(2, seed=seed), distributions(3, seed=seed + 10), distributions(2, seed=seed + 20)
    tau = float(scores.median()) + 1e-9
    tokens, accepted, token, _ = block(q, p, scores, tau)
    out = emitted(tokens, accepted, token)
    for k in range(2):
        reached = accepted >= k
        probs = emitted_probs(p[k], q[k], scores[k] < tau)
        by_hand = worked_out(p[k], q[k], {v for v in range(VOCAB) if scores[k, v] < tau})
        assert torch.allclose(probs, torch.tensor(by_hand, dtype=probs.dtype), atol=1e-12)
        moved = float((probs - p[k]).abs().sum() / 2)
        assert abs(moved - float(bias(p[k], q[k], scores[k] < tau))) < 1e-12, "TV(P, p) = R_N"
        counts = histogram(out[reached, k])
        assert p_value(counts, probs.numpy()) > LEVEL
        assert moved < 0.02 or p_value(counts, p[k].numpy()) < 1e-6


def test_faults_are_seen_by_the_test_of_the_distribution() -> None:
    """A residual p in place of max(0, p - q); a block that ends at an override with a token of its own."""
    q, p, scores = distributions(1, seed=2), distributions(2, seed=12), distributions(1, seed=22)
    tau = float(scores.median()) + 1e-9
    tokens, accepted, token, overridden = block(q, p, scores, tau)
    probs = emitted_probs(p[0], q[0], scores[0] < tau).numpy()
    assert overridden.sum() > 1000 and (accepted == 0).sum() > 1000
    assert p_value(histogram(emitted(tokens, accepted, token)[:, 0]), probs) > LEVEL
    fresh = torch.rand(len(tokens), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    wrong = torch.where(accepted == 0, sample(p[0].expand(len(tokens), -1), fresh), tokens[:, 0])
    assert p_value(histogram(wrong), probs) < LEVEL / 100
    stopped = torch.where(overridden[:, 0], sample(residual(p[0], q[0]).expand(len(tokens), -1), fresh),
                          emitted(tokens, accepted, token)[:, 0])  # fmt: skip
    assert p_value(histogram(stopped), probs) < LEVEL / 100


def test_the_bias_is_exact_and_without_it_nothing_moves() -> None:
    p, q = distributions(200, seed=5), distributions(200, seed=6)
    allowed = distributions(200, seed=7) < 0.12
    probs = emitted_probs(p, q, allowed)
    assert torch.allclose(probs.sum(-1), torch.ones(200, dtype=probs.dtype), atol=1e-12)
    assert torch.allclose((probs - p).abs().sum(-1) / 2, bias(p, q, allowed), atol=1e-12)
    nothing = torch.zeros_like(allowed)
    assert torch.allclose(emitted_probs(p, q, nothing), p, atol=1e-12)
    assert torch.allclose(emitted_probs(p, p, allowed), p, atol=1e-12)
    assert torch.allclose(emitted_probs(p, q, ~nothing), q, atol=1e-12)
    wrong = torch.minimum(p, q) + (q - p).clamp_min(0) * allowed + bias(p, q, ~allowed)[:, None] * p
    assert not torch.allclose((wrong - p).abs().sum(-1) / 2, bias(p, q, allowed), atol=1e-3)


def test_a_draft_that_was_looked_up_is_a_one_hot_one() -> None:
    rows = 300
    p, u = distributions(rows, 3, seed=8), numbers(rows, 2)
    tokens = torch.randint(VOCAB, (rows, 2), generator=torch.Generator().manual_seed(1))
    allowed = torch.rand(rows, 2, generator=torch.Generator().manual_seed(2)) < 0.4
    found = pivot_verify(tokens, None, p, u[:, :4], allowed)
    dense = pivot_verify(tokens, one_hot(tokens, VOCAB, p.dtype), p, u[:, :4], allowed)
    assert all(torch.equal(a, b) for a, b in zip(found, dense, strict=True)) and found[2].any()


def test_acceptance_grows_with_tau() -> None:
    """D4, for the same numbers; the rate of overrides of a first draft estimates R_N."""
    q, p, scores = distributions(3, seed=9), distributions(4, seed=19), distributions(3, seed=29)
    before, means = torch.zeros(DRAWS, dtype=torch.long), []
    for tau in (0.0, 0.05, 0.1, 0.2, 0.5, 1.1):
        _, accepted, _, overridden = block(q, p, scores, tau)
        assert bool((accepted >= before).all())
        means.append(float(accepted.double().mean()))
        expected = float(bias(p[0], q[0], scores[0] < tau))
        assert abs(float(overridden[:, 0].double().mean()) - expected) < 4 * (expected / DRAWS) ** 0.5 + 1e-12
        before = accepted
    assert means[0] < means[2] < means[3] < means[-1] == 3


def test_what_is_never_overridden() -> None:
    """A stop token, a token below p_min, and one that is impossible."""
    scores, p = torch.zeros(3), torch.tensor([0.5, 0.5, 1e-4])
    stops = torch.tensor([False, True, False])
    assert overridable(scores, p, stops, tau=0.5, p_min=1e-3).tolist() == [True, False, False]
    assert not overridable(scores, p, stops, tau=0.0, p_min=0.0).any(), "a classifier may be sure"
    assert overridable(scores, torch.tensor([0.0, 1e-30, 0.5]), stops, tau=0.5, p_min=0.0).tolist() == [
        False,
        False,
        True,
    ]
    impossible = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]])
    u = torch.full((1, 3), 0.5)
    accepted, token, overridden = pivot_verify(
        torch.zeros(1, 1, dtype=torch.long), torch.tensor([[[1.0, 0.0]]]), impossible, u, torch.ones(1, 1).bool()
    )
    assert (int(accepted), int(token), bool(overridden)) == (0, 1, False)


def test_a_token_that_is_no_pivot_may_cost_utility() -> None:
    """D5, the counter-example to Lemma 1 (SPEC 4.4): .6675 without overrides, .585 with one that the paper allows."""
    p, q, value = (
        torch.tensor(x, dtype=torch.float64) for x in ([0.25, 0.5, 0.25], [0.5, 0.25, 0.25], [0.67, 1.0, 0.0])
    )
    prefix = float((p * value).sum())
    a_alone = torch.tensor([True, False, False])
    assert float(value[0]) >= prefix, "by the paper's definition a is no pivot"
    probs = emitted_probs(p, q, a_alone)
    assert torch.allclose(probs, q)
    assert round(prefix, 4) == 0.6675 and round(float((probs * value).sum()), 4) == 0.585
    assert torch.equal(residual(p, q), torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64))
    assert float(value[0]) < float((residual(p, q) * value).sum()), "against the residual it is one"
