"""What is a constant in the policy's loss, and what happens far outside of the clip."""

from typing import Literal

import pytest
import torch
from torch import Tensor

from bebop.config import AlgorithmConfig
from bebop.metrics import values
from bebop.trainer.losses import TIS_LEVELS, policy_loss, weight_metrics

BEHAVIOUR, PROXIMAL, LOGP = (0.1, 0.5, 0.8, 0.3), (0.4, 0.5, 0.4, 0.33), (0.44, 0.45, 0.4, 0.33)
ADVANTAGES = (1.0, 3.0, -5.0, 2.0)


def gradients(cap: float, level: Literal["token", "sequence"] = "token") -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of the loss by the current, proximal and rollout log-probs, all three of which ask for one."""
    logp, proximal, rollout_logprobs = (
        torch.tensor(x, dtype=torch.float64).log().requires_grad_() for x in (LOGP, PROXIMAL, BEHAVIOUR)
    )
    weights, zero = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    out, _ = policy_loss(
        AlgorithmConfig(tis_cap=cap, tis_level=level),
        logp=logp,
        entropy=zero,
        proximal=proximal,
        rollout_logprobs=rollout_logprobs,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        answers=torch.tensor([3, 0, 1]),
        weights=weights,
    )
    out.backward()
    assert logp.grad is not None
    return logp.grad, proximal.grad, rollout_logprobs.grad


@pytest.mark.parametrize("cap", [2.0, 100.0])
def test_the_importance_weight_is_a_constant(cap: float) -> None:
    """A gradient through it would be that of another objective: the proximal one is that of the ratio alone."""
    current, proximal, rollout_logprobs = gradients(cap)
    assert rollout_logprobs is None
    tis = [min(p / b, cap) for p, b in zip(PROXIMAL, BEHAVIOUR, strict=True)]
    by_hand = [-w * a * c / p for w, a, c, p in zip(tis, ADVANTAGES, LOGP, PROXIMAL, strict=True)]
    assert current.tolist() == pytest.approx(by_hand)  # no ratio here is clipped
    assert proximal is not None and proximal.tolist() == pytest.approx([-g for g in by_hand])


@pytest.mark.parametrize("cap", [1.5, 100.0])
def test_all_tokens_of_an_answer_have_its_weight_and_no_other_has(cap: float) -> None:
    """Answers of three, of no and of one token; the first one's weight is 0.4 * 0.5 * 0.4 / (0.1 * 0.5 * 0.8) = 2."""
    current, proximal, _ = gradients(cap, "sequence")
    tis = [min(2.0, cap)] * 3 + [min(1.1, cap)]
    by_hand = [-w * a * c / p for w, a, c, p in zip(tis, ADVANTAGES, LOGP, PROXIMAL, strict=True)]
    assert current.tolist() == pytest.approx(by_hand)
    assert proximal is not None and proximal.tolist() == pytest.approx([-g for g in by_hand])


def test_the_weight_of_a_long_answer_is_bounded_without_a_cap() -> None:
    """A thousand tokens that each became e times as likely, or unlikely: neither inf nor NaN."""
    change = torch.cat([torch.ones(1000), -torch.ones(1000)])
    weight = TIS_LEVELS["sequence"](change, torch.tensor([1000, 1000])).exp()
    assert bool(weight.isfinite().all()) and float(weight[0]) > 1e8 and 0 < float(weight[-1]) < 1e-8


def test_what_weights_cost_is_said_by_hand() -> None:
    """Weights 4, 1, 0.5 of one answer and 1.1 of another; the cap of 2 cuts one of four, and none of the answers."""
    proximal, rollout = torch.tensor(PROXIMAL).log(), torch.tensor(BEHAVIOUR).log()
    answers = torch.tensor([3, 1])
    numbers = values(weight_metrics(AlgorithmConfig(), proximal, rollout, answers))
    assert numbers["train/tis_ess"] == pytest.approx(4.6**2 / (4 * (4 + 1 + 0.25 + 1.21)), rel=1e-5)
    assert numbers["train/tis_capped"] == 0.25
    assert numbers["train/tis_ess_answers"] == pytest.approx(3.1**2 / (2 * (4 + 1.21)), rel=1e-5)
    whole = values(weight_metrics(AlgorithmConfig(tis_level="sequence", tis_cap=1.5), proximal, rollout, answers))
    assert whole["train/tis_ess"] == pytest.approx(5.6**2 / (4 * (3 * 2.25 + 1.21)), rel=1e-5)
    assert whole["train/tis_capped"] == 0.75
    assert whole["train/tis_ess_answers"] == numbers["train/tis_ess_answers"]


def test_a_ratio_beyond_all_bounds_leaves_neither_nan_nor_gradient() -> None:
    """A token that has become e^2000 times as likely, with every sign of advantage."""
    logp = torch.full((3,), -1.0, requires_grad=True)
    far = torch.full((3,), -2001.0)
    out, _ = policy_loss(
        AlgorithmConfig(),
        logp=logp,
        entropy=torch.zeros(3),
        proximal=far,
        rollout_logprobs=far,
        advantages=torch.tensor([1.0, 0.0, -1e-9]),
        answers=torch.tensor([3]),
        weights=torch.ones(3),
    )
    out.backward()
    assert bool(out.isfinite())
    assert logp.grad is not None and bool(logp.grad.isfinite().all()) and logp.grad[:2].tolist() == [0.0, 0.0]
