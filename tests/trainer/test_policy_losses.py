"""The rows of POLICY_LOSSES by hand: values, gradients, what is clipped, and that micro-batches do not matter."""

import math
from typing import get_args, get_type_hints

import pytest
import torch
from torch import Tensor

from bebop.config import AlgorithmConfig
from bebop.metrics import values
from bebop.trainer.losses import AGGREGATIONS, POLICY_LOSSES, policy_loss
from bebop.trainer.policy import PolicyTrainer
from tests.trainer.builders import batch, job, policy, weights_of

RATIOS = (1.5, 1.1, 0.5, 2.0, 1.1)  # of an answer of two tokens and one of three
ANSWERS = (2, 3)
ADVANTAGES = (1.0, 1.0, -2.0, -2.0, -2.0)
PROXIMAL = (-1.0, -0.5, -0.3, -2.0, -0.1)
WEIGHTS = (0.1, 0.1, 0.2, 0.2, 0.2)
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def loss(
    name: str, chosen: slice = slice(5), answers: tuple[int, ...] = ANSWERS
) -> tuple[float, list[float], dict[str, float]]:
    """Value, gradient by the log-probs [A] and metrics over the chosen tokens, which come with a TIS weight of 1/2."""
    ratios, proximal, advantages, weights = (
        torch.tensor(x, dtype=torch.float64)[chosen] for x in (RATIOS, PROXIMAL, ADVANTAGES, WEIGHTS)
    )
    logp = (ratios.log() + proximal).requires_grad_()
    out, metrics = policy_loss(
        AlgorithmConfig(policy_loss=name, **CLIP),  # type: ignore[arg-type]
        logp=logp,
        entropy=torch.zeros_like(proximal),
        proximal=proximal,
        rollout_logprobs=proximal + math.log(2),
        advantages=advantages,
        answers=torch.tensor(answers),
        weights=weights,
    )
    out.backward()
    assert logp.grad is not None
    return float(out.detach()), logp.grad.tolist(), values(metrics)


def test_gspo_clips_the_geometric_mean_of_an_answer() -> None:
    # sqrt(1.5 * 1.1) = 1.285 is clipped at 1.2, the advantage being positive; (0.5 * 2 * 1.1)^(1/3) is not.
    whole = 1.1 ** (1 / 3)
    value, gradient, metrics = loss("gspo")
    assert value == pytest.approx(-0.5 * (0.1 * 2 * 1.2 - 0.2 * 3 * 2 * whole))
    assert gradient == pytest.approx([0, 0, *[0.5 * 0.2 * 2 * whole] * 3])
    assert metrics["train/clip_frac"] == pytest.approx(2 / 5)


def test_cispo_weighs_log_probs_by_the_clipped_ratio_and_drops_no_gradient() -> None:
    clipped = [1.2, 1.1, 0.8, 1.2, 1.1]
    value, gradient, metrics = loss("cispo")
    each = [-0.5 * w * r * a for w, r, a in zip(WEIGHTS, clipped, ADVANTAGES, strict=True)]
    logp = [math.log(r) + p for r, p in zip(RATIOS, PROXIMAL, strict=True)]
    assert gradient == pytest.approx(each)
    assert value == pytest.approx(sum(g * x for g, x in zip(each, logp, strict=True)))
    assert metrics["train/clip_frac"] == pytest.approx(3 / 5)


def test_ppo_clips_each_token_for_itself() -> None:
    _, gradient, metrics = loss("ppo_clip")
    assert gradient == pytest.approx([0, -0.5 * 0.1 * 1.1, 0, 0.5 * 0.2 * 2 * 2.0, 0.5 * 0.2 * 2 * 1.1])
    assert metrics["train/clip_frac"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_minibatch_is_the_sum_of_its_answers(name: str) -> None:
    value, gradient, _ = loss(name, answers=(2, 0, 3))  # an answer without tokens changes nothing
    first, second = loss(name, slice(2), (2,)), loss(name, slice(2, 5), (3,))
    assert value == pytest.approx(first[0] + second[0])
    assert gradient == pytest.approx(first[1] + second[1])


def updated(name: str, max_tokens: int) -> dict[str, Tensor]:
    """Weights after one update in four minibatches, all but the first off policy."""
    source = policy()
    algorithm = {"policy_loss": name, "minibatches": 4, "clip_low": 0.01, "clip_high": 0.01}
    trainer = PolicyTrainer(source, job(algorithm=algorithm, trainer={"max_tokens": max_tokens, "lr": 1e-3}))
    trainer.update(batch())
    return weights_of(source)


def test_updates_do_not_depend_on_micro_batches_and_losses_differ() -> None:
    together, apart = updated("gspo", 4096), updated("gspo", 1)
    for name, weight in together.items():
        torch.testing.assert_close(apart[name], weight, rtol=0, atol=2e-5, msg=name)
    for other in ("ppo_clip", "cispo"):
        assert max((w - together[n]).abs().max() for n, w in updated(other, 4096).items()) > 1e-4, other


def test_nothing_to_learn_from_is_no_loss() -> None:
    """The blank micro-batch of a rank without rows."""
    nothing = torch.zeros(0, requires_grad=True)
    for name in POLICY_LOSSES:
        fixed = dict.fromkeys(("entropy", "proximal", "rollout_logprobs", "advantages", "weights"), nothing.detach())
        config = AlgorithmConfig(policy_loss=name)  # type: ignore[arg-type]
        out, _ = policy_loss(config, logp=nothing, answers=torch.tensor([0]), **fixed)
        out.backward()
        assert float(out.detach()) == 0.0


def test_settings_are_the_rows() -> None:
    hints = get_type_hints(AlgorithmConfig)
    assert get_args(hints["policy_loss"]) == tuple(POLICY_LOSSES)
    assert get_args(hints["aggregation"]) == tuple(AGGREGATIONS)
