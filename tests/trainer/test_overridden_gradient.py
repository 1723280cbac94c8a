"""PAD in training (SPEC 4.4): weighted by log P the expected policy gradient is the target's; by log p it is not.

Small enough to enumerate: every answer counts with its probability, so that nothing is left to chance.
"""

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from bebop.config.job import AlgorithmConfig
from bebop.kernels.pivot import bias, emitted_probs
from tests.trainer.builders import raw_loss

VOCAB = 5
GENERATOR = torch.Generator().manual_seed(3)


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, VOCAB, dtype=torch.float64, generator=GENERATOR)


LOGITS, DRAFT, ALLOWED, ADVANTAGES = random(), random().softmax(-1), random() > -0.3, random()


def gradient(rollout: str, cap: float = math.inf, allowed: Tensor = ALLOWED) -> tuple[Tensor, Tensor]:
    """Expected gradient of the trainer's own loss on answers of one token drawn from P, and the exact one."""
    logits = LOGITS.clone().requires_grad_()
    logp = logits.log_softmax(-1)
    p = logp.detach().exp()
    emitted = emitted_probs(p, DRAFT, allowed)
    given = {"rollout_logprobs": {"log P": emitted, "log p": p}[rollout].log(), "advantages": ADVANTAGES}
    given |= {"answers": torch.ones(VOCAB, dtype=torch.long), "weights": emitted}
    loss, _ = raw_loss(AlgorithmConfig(tis_cap=cap, clip_low=0.5, clip_high=0.5), logp, logp.detach(), **given)
    (expected,) = torch.autograd.grad(loss, logits)
    again = LOGITS.clone().requires_grad_()
    (exact,) = torch.autograd.grad(-(again.softmax(-1) * ADVANTAGES).sum(), again)
    return expected, exact


def test_weighted_by_what_was_drawn_from_the_gradient_is_exact() -> None:
    p = LOGITS.softmax(-1)
    assert float(bias(p, DRAFT, ALLOWED)) > 0.1
    expected, exact = gradient("log P")
    assert torch.allclose(expected, exact, atol=1e-12)
    expected, exact = gradient("log p")
    assert float((expected - exact).norm() / exact.norm()) > 0.1
    nothing = torch.zeros_like(ALLOWED)
    assert torch.allclose(*gradient("log p", allowed=nothing), atol=1e-12), "rejection sampling needs no weights"


def test_a_cap_on_the_weights_leaves_some_bias() -> None:
    """p / P is largest where the draft proposes a token too rarely and rejections do not make up for it."""
    p = LOGITS.softmax(-1)
    largest = float((p / emitted_probs(p, DRAFT, ALLOWED)).max())
    assert 1 < largest < math.inf
    assert torch.allclose(*gradient("log P", cap=largest + 1e-9), atol=1e-12)
    expected, exact = gradient("log P", cap=1 + (largest - 1) / 2)
    weighted, unweighted = (float((gradient(name, cap=2.0)[0] - exact).norm()) for name in ("log P", "log p"))
    assert not torch.allclose(expected, exact, atol=1e-3) and weighted < unweighted


def paths(scale: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Answers of two tokens, one draft a cycle: the second is the bonus if the first draft stood, else drafted anew.

    ``scale`` [] of the logits is what is learned. log p of the first token [V, 1] and of the second [V, V]; then for
    either way [2, V, V] (the draft stood, or it did not) its probability, and log P of both tokens.
    """
    generator = torch.Generator().manual_seed(8)
    tables = [torch.randn(*shape, dtype=torch.float64, generator=generator) for shape in ((5,), (5, 5), (5,), (5, 5))]
    first, second = ((t * scale).log_softmax(-1) for t in tables[:2])
    p, then = first.detach().exp(), second.detach().exp()
    q, again = (t.softmax(-1) for t in tables[2:])
    members = q > 0.15
    emitted, fresh = emitted_probs(p, q, members), emitted_probs(then, again, again > 0.2)
    stays = torch.where(members, q, torch.minimum(p, q))
    chance = torch.stack([stays[:, None] * then, (emitted - stays)[:, None] * fresh])
    return first[:, None], second, chance, emitted.log()[:, None].expand(2, 5, 5), torch.stack([then, fresh]).log()


def two_token_error(level: Literal["token", "sequence"], known: bool = True, cap: float = math.inf) -> float:
    """How far the expected gradient of the trainer's own loss on answers of two tokens is from the exact one.

    ``known``: the rollout log-probs are log P; else log p.
    """
    value = torch.randn(VOCAB, VOCAB, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    scale = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    first, second, chance, drawn_first, drawn_second = paths(scale)
    assert abs(float(chance.sum()) - 1) < 1e-12
    (exact,) = torch.autograd.grad(((first + second).exp() * value).sum(), scale, retain_graph=True)

    def tokens(one: Tensor, two: Tensor) -> Tensor:
        return torch.stack([x.expand(2, VOCAB, VOCAB) for x in (one, two)], -1).flatten()

    logp = tokens(first, second)
    given = {"advantages": tokens(value, value), "weights": tokens(chance, chance)}
    given |= {"rollout_logprobs": tokens(drawn_first, drawn_second) if known else logp.detach()}
    config = AlgorithmConfig(tis_level=level, tis_cap=cap, clip_low=0.5, clip_high=0.5)
    loss, _ = raw_loss(config, logp, logp.detach(), answers=torch.full((2 * VOCAB**2,), 2), **given)
    return abs(float(torch.autograd.grad(-loss, scale)[0] - exact))


def test_weights_of_whole_answers_are_exact_wherever_cycles_begin() -> None:
    """P depends on where cycles begin, which is chance as well: weights that are right given it are right on average.

    Weights of single tokens, as importance sampling in GRPO usually has them, leave out what the overrides did to the
    rest of the answer, and are nearer to the exact gradient than no weights.
    """
    assert two_token_error("sequence") < 1e-12
    unweighted = two_token_error("token", known=False)
    assert 0.01 < two_token_error("token") < unweighted
    assert two_token_error("sequence", known=False) == pytest.approx(unweighted)
    assert 1e-3 < two_token_error("sequence", cap=1.5) < unweighted, "a cap leaves some bias"
