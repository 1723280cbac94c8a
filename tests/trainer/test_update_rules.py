"""What an optimizer step may do: the norm it clips to, what it decays, and that it starts from no gradient."""

import math

import pytest
import torch

from bebop.metrics import values
from bebop.trainer.policy import PolicyTrainer
from tests.trainer.builders import batch, job, policy, weights_of


def gradient_norm(source: object) -> float:
    """Of what the last update has left in the policy."""
    found = [p.grad for p in source.weights().values() if p.grad is not None]  # type: ignore[attr-defined]
    return math.sqrt(sum(float((g.double() ** 2).sum()) for g in found))


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_the_gradient_is_clipped_to_its_norm(clip: float) -> None:
    source = policy()
    trainer = PolicyTrainer(source, job(trainer={"max_grad_norm": clip}))
    before = values(trainer.update(batch()))["train/grad_norm"]
    assert 0.02 < before < 1e5
    assert gradient_norm(source) == pytest.approx(min(clip, before), rel=1e-3)


def test_a_step_knows_nothing_of_the_gradient_before() -> None:
    source = policy()
    trainer = PolicyTrainer(source, job(trainer={"lr": 0.0, "max_grad_norm": 1e6}))
    norms = [values(trainer.update(batch()))["train/grad_norm"] for _ in range(3)]
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-6)


def test_matrices_decay_and_norms_do_not() -> None:
    source = policy()
    trainer = PolicyTrainer(source, job(trainer={"lr": 0.5, "lr_warmup_steps": 0, "weight_decay": 0.1}))
    before = weights_of(source)
    for parameter in trainer.scorer.parameters():
        parameter.grad = torch.zeros_like(parameter)  # Adam takes no step of its own: decay is all that happens
    trainer._descend()
    for name, parameter in source.weights().items():
        shrunk = 0.95 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), shrunk * before[name], msg=name)
