"""What is a constant in the policy's loss, and what happens far outside of the clip."""

import pytest
import torch
from torch import Tensor

from bebop.config import AlgorithmConfig
from bebop.trainer.losses import policy_loss

BEHAVIOUR, PROXIMAL, LOGP = (0.1, 0.5, 0.8, 0.3), (0.4, 0.5, 0.4, 0.33), (0.44, 0.45, 0.4, 0.33)
ADVANTAGES = (1.0, 3.0, -5.0, 2.0)


def gradients(cap: float) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of the loss by the current, proximal and rollout log-probs, all three of which ask for one."""
    logp, proximal, rollout_logprobs = (
        torch.tensor(x, dtype=torch.float64).log().requires_grad_() for x in (LOGP, PROXIMAL, BEHAVIOUR)
    )
    weights, zero = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    out, _ = policy_loss(
        AlgorithmConfig(tis_cap=cap),
        logp=logp,
        entropy=zero,
        proximal=proximal,
        rollout_logprobs=rollout_logprobs,
        advantages=torch.tensor(ADVANTAGES, dtype=torch.float64),
        answers=torch.tensor([4]),
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
