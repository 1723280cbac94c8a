"""Our policy losses against verl's own functions: values and gradients on random answers."""

import pytest
import torch
from verl.trainer.ppo.core_algos import get_policy_loss_fn
from verl.workers.config import ActorConfig

from bebop.config.job import AlgorithmConfig
from bebop.metrics.metrics import values
from bebop.trainer.losses import AGGREGATIONS, policy_loss

ROWS, LONGEST, LOW, HIGH, CAP = 12, 11, 0.03, 0.04, 2.0
VERL = {"ppo_clip": "vanilla", "gspo": "gspo", "cispo": "cispo"}


def config_of_verl(name: str) -> ActorConfig:
    """verl clips a third time where the advantage is negative (dual clip, ``clip_ratio_c``), which we do not have."""
    return ActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=LOW, clip_ratio_high=HIGH,
        clip_ratio_c=1e9, policy_loss={"loss_mode": VERL[name]},
    )  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("name", VERL)
def test_values_and_gradients_are_verls(name: str, aggregation: str, seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)

    def random(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, LONGEST, generator=numbers, dtype=torch.float64)

    lengths = torch.randint(1, LONGEST + 1, (ROWS,), generator=numbers)
    mask = torch.arange(LONGEST) < lengths[:, None]
    proximal = random(1.0) - 2
    rollout_logprobs, current = proximal + random(0.5), proximal + random(0.2)
    advantages = random(1.0)[:, :1].expand(-1, LONGEST)
    theirs, ours = current.clone().requires_grad_(), current[mask].requires_grad_()

    wanted, metrics_of_verl = get_policy_loss_fn(VERL[name])(
        old_log_prob=proximal, log_prob=theirs, advantages=advantages, response_mask=mask.double(),
        loss_agg_mode=aggregation, config=config_of_verl(name),
        rollout_is_weights=(proximal - rollout_logprobs).exp().clamp(max=CAP),
    )  # fmt: skip
    wanted.backward()
    per_row = torch.from_numpy(AGGREGATIONS[aggregation](lengths.numpy(), LONGEST))
    loss, metrics = policy_loss(
        AlgorithmConfig(policy_loss=name, clip_low=LOW, clip_high=HIGH, tis_cap=CAP),  # type: ignore[arg-type]
        logp=ours,
        entropy=torch.zeros(len(ours)),
        proximal=proximal[mask],
        rollout_logprobs=rollout_logprobs[mask],
        advantages=advantages[mask],
        answers=lengths,
        weights=per_row.repeat_interleave(lengths),
    )
    loss.backward()
    assert theirs.grad is not None and ours.grad is not None
    torch.testing.assert_close(loss, wanted, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.grad, theirs.grad[mask], rtol=0, atol=1e-6)
    clipped = values(metrics)["train/clip_frac"]
    assert 0 < clipped < 1 and clipped == pytest.approx(metrics_of_verl["actor/pg_clipfrac"], abs=1e-6)
