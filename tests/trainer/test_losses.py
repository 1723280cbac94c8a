import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config import AlgorithmConfig
from bebop.metrics import values
from bebop.trainer.losses import AGGREGATIONS, bounded, k3, policy_loss, ratio_metrics, same_weights_metrics
from bebop.trainer.packing import Row, pack
from bebop.trainer.scorer import Scorer
from tests.trainer.builders import TEMPERATURE, completion, plain, plain_logprobs, policy


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def loss(config: AlgorithmConfig | None = None, **changes: Tensor) -> tuple[float, dict[str, float]]:
    """The loss with weight 1 a token; ratios 1.5, 1.1, 0.5 and advantages 1, -2, -1 unless changed."""
    logp = changes.pop("logp", tensor(1.5, 1.1, 0.5).log())
    fields = dict(entropy=tensor(1, 2, 3), proximal=tensor(0, 0, 0), rollout_logprobs=tensor(0, 0, 0))
    fields |= dict(advantages=tensor(1, -2, -1), weights=tensor(1, 1, 1), answers=torch.tensor([len(logp)])) | changes
    out, metrics = policy_loss(config or AlgorithmConfig(), logp=logp, **fields)  # type: ignore[arg-type]
    return float(out), values(metrics)


def test_clip_is_asymmetric_and_pessimistic_by_hand() -> None:
    # min(1.5, 1.28) * 1 = 1.28; min(1.1 * -2, 1.1 * -2) = -2.2; min(0.5 * -1, 0.8 * -1) = -0.8.
    value, metrics = loss()
    assert value == pytest.approx(-(1.28 - 2.2 - 0.8))
    assert metrics["train/clip_frac"] == pytest.approx(2 / 3)
    assert metrics["policy/entropy"] == 2.0


def test_a_positive_advantage_is_not_clipped_below() -> None:
    value, metrics = loss(advantages=tensor(1, 1, 1))
    assert value == pytest.approx(-(1.28 + 1.1 + 0.5))
    assert metrics["train/clip_frac"] == pytest.approx(1 / 3)


def test_truncated_importance_weight_by_hand_and_without_gradient() -> None:
    # pi_prox / pi_behaviour = 4 (capped at 2), 1, 0.5; the ratio to proximal is 1 throughout.
    rollout_logprobs, proximal = tensor(0.1, 0.5, 0.8).log(), tensor(0.4, 0.5, 0.4).log()
    logp = proximal.clone().requires_grad_()
    out, metrics = policy_loss(
        AlgorithmConfig(tis_cap=2.0),
        logp=logp,
        entropy=tensor(0, 0, 0),
        proximal=logp.detach(),
        rollout_logprobs=rollout_logprobs,
        advantages=tensor(1, 3, -5),
        answers=torch.tensor([3]),
        weights=tensor(1, 1, 1),
    )
    assert float(out.detach()) == pytest.approx(-(2 * 1 + 1 * 3 - 0.5 * 5))
    assert values(metrics)["train/tis_mean"] == pytest.approx(3.5 / 3)
    out.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == pytest.approx([-2, -3, 2.5])


def test_entropy_bonus_and_kl_by_hand() -> None:
    base, _ = loss()
    with_bonus, _ = loss(AlgorithmConfig(entropy_coefficient=0.1))
    assert with_bonus == pytest.approx(base - 0.1 * 6)
    reference = tensor(3.0, 1.1, 0.5).log()  # x = 2, 1, 1
    with_kl, metrics = loss(AlgorithmConfig(kl_coefficient=0.5), reference=reference)
    assert with_kl == pytest.approx(base + 0.5 * (2 - math.log(2) - 1))
    assert metrics["train/kl"] == pytest.approx((1 - math.log(2)) / 3)


def test_an_entropy_target_leaves_the_bonus_to_answers_below_it_by_hand() -> None:
    # Answers of 2, 1 and 0 tokens with mean entropies 1.5 and 3, target 2: the bonus is of the first, 1 + 2.
    config = AlgorithmConfig(entropy_coefficient=0.1, entropy_target=2.0)
    answers = torch.tensor([2, 1, 0])
    base, _ = loss(answers=answers)
    assert loss(config, answers=answers)[0] == pytest.approx(base - 0.1 * 3)
    assert loss(dataclasses.replace(config, entropy_target=5.0), answers=answers)[0] == pytest.approx(base - 0.1 * 6)
    entropy = tensor(1, 2, 3).requires_grad_()
    bounded(entropy, answers, 2.0).sum().backward()
    assert entropy.grad is not None and entropy.grad.tolist() == [1, 1, 0]


def test_k3_is_unbiased_for_the_kl_and_plain_x_minus_one_is_not() -> None:
    p, q = tensor(0.5, 0.3, 0.2), tensor(0.2, 0.2, 0.6)
    kl = float((p * (p / q).log()).sum())
    assert float((p * k3(p.log(), q.log())).sum()) == pytest.approx(kl)
    assert abs(float((p * (q / p - 1)).sum()) - kl) > 0.1


@pytest.mark.parametrize(
    ("name", "by_hand"),
    [
        # Answers of 1 and 3 tokens, token losses 4 | 1 2 3; max_new_tokens 10.
        ("token-mean", 10 / 4),
        ("seq-mean-token-mean", (4 + 2) / 2),
        ("seq-mean-token-sum-norm", (4 / 10 + 6 / 10) / 2),
    ],
)
def test_aggregations_by_hand(name: str, by_hand: float) -> None:
    per_row = AGGREGATIONS[name](np.array([1, 3]), 10)
    weights = torch.from_numpy(per_row).repeat_interleave(torch.tensor([1, 3]))
    zero = torch.zeros(4, dtype=torch.float64)
    value, _ = loss(
        logp=zero,
        entropy=zero,
        proximal=zero,
        rollout_logprobs=zero,
        advantages=tensor(-4, -1, -2, -3),
        weights=weights,
    )
    assert value == pytest.approx(by_hand)


def test_ratio_error_looks_at_tokens_of_one_version_alone() -> None:
    """Five tokens: two of version 5 alone, one of 4, two of 5 on what 4 had computed."""
    engine = dataclasses.replace(
        completion([1, 2, 3, 4, 5], [0.0] * 5),
        versions=np.array([5, 4, 5, 5, 5]),
        contexts=np.array([5, 4, 5, 4, 3]),
    )
    [rows] = pack([Row(prompt=(7,), completion=engine, advantage=1.0, weight=1.0)], 64)
    logp = tensor(1.0, 2.0, 1.1, 1.3, 1.5).log()
    both = values(ratio_metrics(logp, rows.rollout_logprobs))
    assert both["train/ratio_mean"] == pytest.approx(6.9 / 5)
    assert both["rollout/logprob_diff"] == pytest.approx(np.log([2.0, 1.1, 1.3, 1.5]).sum() / 5)
    metrics = values(same_weights_metrics(rows, logp, 5))
    assert metrics == pytest.approx(
        {
            "train/ratio_tokens": 2,
            "train/ratio_error_max": 0.1,
            "train/ratio_error_kept": 0.5,
            "rollout/logprob_diff_current": np.log(1.1) / 2,
            "rollout/logprob_diff_kept": np.log([1.3, 1.5]).sum() / 2,
        }
    )
    assert values(same_weights_metrics(rows, logp, 4)).keys() == metrics.keys() - {
        "train/ratio_error_kept",
        "rollout/logprob_diff_kept",
    }
    assert values(same_weights_metrics(rows, logp, 6)) == {"train/ratio_tokens": 0}, "absent, and it says so"


def test_an_engine_that_does_not_say_is_taken_to_keep_everything() -> None:
    silent = dataclasses.replace(completion([1, 2, 3]), versions=np.array([3, 4, 4]))
    assert silent.oldest.tolist() == [3, 3, 3]
    assert dataclasses.replace(silent, contexts=np.array([3, 4, 4])).oldest.tolist() == [3, 4, 4]


ROWS = [((1, 2), [3, 4, 5]), ((6,), [7]), ((8, 9, 10), [11, 12]), ((13,), [14, 15, 16, 17, 18, 19])]
ADVANTAGES = [1.0, -0.5, 0.3, -1.2]


def double(model: torch.nn.Module) -> torch.nn.Module:
    """The model in fp64 throughout: transformers' norms compute in fp32 whatever the dtype, torch's do not."""
    for parent in list(model.modules()):
        for name, norm in list(parent.named_children()):
            if type(norm).__name__.endswith("RMSNorm"):
                twin = torch.nn.RMSNorm(norm.weight.shape, eps=norm.variance_epsilon, dtype=torch.float64)
                twin.load_state_dict(norm.state_dict())
                setattr(parent, name, twin)
    return model.double()


def gradients(module: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])


def naive(name: str) -> tuple[float, Tensor]:
    """The loss as the formulas have it: row by row, transformers' own attention, full logits."""
    model = double(plain(policy()))
    sums = [(-advantage * torch.exp((lp := plain_logprobs(model, *row)) - lp.detach() + 0.1)).sum()
            for advantage, row in zip(ADVANTAGES, ROWS, strict=True)]  # fmt: skip
    counts = [len(answer) for _, answer in ROWS]
    total = {
        "token-mean": lambda: sum(sums) / sum(counts),
        "seq-mean-token-mean": lambda: sum(s / n for s, n in zip(sums, counts, strict=True)) / len(ROWS),
        "seq-mean-token-sum-norm": lambda: sum(s / 20 for s in sums) / len(ROWS),
    }[name]()
    total.backward()
    return float(total.detach()), gradients(model)


def packed(name: str, mean_of_means: bool = False) -> tuple[float, Tensor]:
    """The trainer's way: three micro-batches, gathered rows, chunked head. Broken: each takes its own mean."""
    source = policy()
    double(source.backbone)
    scorer = Scorer(source, TEMPERATURE)
    weights = AGGREGATIONS[name](np.array([len(answer) for _, answer in ROWS]), 20)
    rows = [
        Row(prompt=prompt, completion=completion(answer), advantage=advantage, weight=weight)
        for (prompt, answer), advantage, weight in zip(ROWS, ADVANTAGES, weights, strict=True)
    ]
    micro = [part.to(torch.device("cpu"), torch.float64) for part in pack(rows, max_tokens=7)]
    assert len(micro) == 3
    total = 0.0
    for part in micro:
        logp, entropy = scorer(part)
        proximal = logp.detach() - 0.1  # a ratio of e^0.1 throughout: inside the clip, but not 1
        loss, _ = policy_loss(
            AlgorithmConfig(),
            logp=logp,
            entropy=entropy,
            proximal=proximal,
            rollout_logprobs=proximal,
            advantages=part.advantages,
            answers=part.answers,
            weights=part.weights / part.weights.sum() / len(micro) if mean_of_means else part.weights,
        )
        loss.backward()
        total += float(loss.detach())
    return total, gradients(source.backbone)


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_packed_and_accumulated_gradient_equals_the_naive_one(name: str) -> None:
    (value, gradient), (wanted, wanted_gradient) = packed(name), naive(name)
    assert value == pytest.approx(wanted, abs=1e-12)
    torch.testing.assert_close(gradient, wanted_gradient, rtol=0, atol=1e-10)
    _, broken = packed(name, mean_of_means=True)
    assert (broken - wanted_gradient).abs().max() > 1e-3
