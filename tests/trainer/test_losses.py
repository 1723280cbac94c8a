import dataclasses
import math
from typing import Literal, get_args, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.job import AlgorithmConfig
from bebop.metrics.metrics import values
from bebop.trainer.losses import (
    ADVANTAGES,
    AGGREGATIONS,
    POLICY_LOSSES,
    TIS_LEVELS,
    advantages,
    entropy_below,
    group_normalised,
    k3,
    leave_one_out,
    mean_only,
    policy_loss,
    ratio_metrics,
    same_weights_metrics,
    weight_metrics,
)
from bebop.trainer.packing import Row, pack
from bebop.trainer.policy import PolicyTrainer
from bebop.trainer.scorer import Scorer
from bebop.trajectory import Group, Prompt, Trajectory
from tests.trainer.builders import (
    TEMPERATURE,
    batch,
    completion,
    job,
    plain,
    plain_logprobs,
    policy,
    raw_loss,
    weights_of,
)


def tensor(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def loss(config: AlgorithmConfig | None = None, **changes: Tensor) -> tuple[float, dict[str, float]]:
    """The loss with weight 1 a token; ratios 1.5, 1.1, 0.5 and advantages 1, -2, -1 unless changed."""
    logp = changes.pop("logp", tensor(1.5, 1.1, 0.5).log())
    fields = dict(entropy=tensor(1, 2, 3), advantages=tensor(1, -2, -1)) | changes
    out, metrics = raw_loss(config or AlgorithmConfig(), logp, fields.pop("proximal", torch.zeros_like(logp)), **fields)
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
    given = {"rollout_logprobs": rollout_logprobs, "advantages": tensor(1, 3, -5)}
    out, metrics = raw_loss(AlgorithmConfig(tis_cap=2.0), logp, logp.detach(), **given)
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
    entropy_below(entropy, answers, 2.0).sum().backward()
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
    value, _ = loss(logp=zero, entropy=zero, advantages=tensor(-4, -1, -2, -3), weights=weights)
    assert value == pytest.approx(by_hand)


def test_ratio_error_looks_at_tokens_of_one_version_alone() -> None:
    """Five tokens: two of version 5 alone, one of 4, two of 5 on what 4 had computed."""
    engine = dataclasses.replace(
        completion([1, 2, 3, 4, 5], [0.0] * 5), versions=np.array([5, 4, 5, 5, 5]), contexts=np.array([5, 4, 5, 4, 3])
    )
    [rows] = pack([Row(prompt=(7,), completion=engine, advantage=1.0, weight=1.0)], 64)
    logp = tensor(1.0, 2.0, 1.1, 1.3, 1.5).log()
    both = values(ratio_metrics(logp, rows.rollout_logprobs))
    assert both["train/ratio_mean"] == pytest.approx(6.9 / 5)
    assert both["rollout/logprob_diff"] == pytest.approx(np.log([2.0, 1.1, 1.3, 1.5]).sum() / 5)
    metrics = values(same_weights_metrics(rows, logp, 5))
    kept = {"train/ratio_error_kept": 0.5, "rollout/logprob_diff_kept": np.log([1.3, 1.5]).sum() / 2}
    current = {"train/ratio_error_max": 0.1, "rollout/logprob_diff_current": np.log(1.1) / 2}
    assert metrics == pytest.approx({"train/ratio_tokens": 2, **current, **kept})
    assert values(same_weights_metrics(rows, logp, 4)).keys() == metrics.keys() - kept.keys()
    assert values(same_weights_metrics(rows, logp, 6)) == {"train/ratio_tokens": 0}, "absent, and it says so"


def test_an_engine_that_does_not_say_is_taken_to_keep_everything() -> None:
    silent = dataclasses.replace(completion([1, 2, 3]), versions=np.array([3, 4, 4]))
    assert silent.oldest.tolist() == [3, 3, 3]
    assert dataclasses.replace(silent, contexts=np.array([3, 4, 4])).oldest.tolist() == [3, 4, 4]


ROWS = [((1, 2), [3, 4, 5]), ((6,), [7]), ((8, 9, 10), [11, 12]), ((13,), [14, 15, 16, 17, 18, 19])]
GAINS = [1.0, -0.5, 0.3, -1.2]


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
            for advantage, row in zip(GAINS, ROWS, strict=True)]  # fmt: skip
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
        for (prompt, answer), advantage, weight in zip(ROWS, GAINS, weights, strict=True)
    ]
    micro = [part.to(torch.device("cpu"), torch.float64) for part in pack(rows, max_tokens=7)]
    assert len(micro) == 3
    total = 0.0
    for part in micro:
        logp, entropy = scorer(part)
        proximal = logp.detach() - 0.1  # a ratio of e^0.1 throughout: inside the clip, but not 1
        weights = part.weights / part.weights.sum() / len(micro) if mean_of_means else part.weights
        given = {"entropy": entropy, "advantages": part.advantages, "answers": part.answers, "weights": weights}
        loss, _ = raw_loss(AlgorithmConfig(), logp, proximal, **given)
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


# ----

REWARDS = np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.0, 4.0]])


def test_mean_only_by_hand() -> None:
    np.testing.assert_allclose(mean_only(REWARDS), [[0.75, -0.25, -0.25, -0.25], [0, 0, -2, 2]])


def test_leave_one_out_by_hand() -> None:
    # 1 - (0 + 0 + 0) / 3; 0 - (1 + 0 + 0) / 3; 2 - (2 + 0 + 4) / 3; ...
    third = 1 / 3
    np.testing.assert_allclose(leave_one_out(REWARDS), [[1, -third, -third, -third], [0, 0, -8 / 3, 8 / 3]], atol=1e-12)


def test_group_normalised_divides_by_the_population_deviation() -> None:
    # Deviations sqrt(3) / 4 and sqrt(2).
    by_hand = np.array([[3, -1, -1, -1], [0, 0, -2, 2]]) / np.sqrt([[3.0], [2.0]])
    np.testing.assert_allclose(group_normalised(REWARDS, eps=0.0), by_hand)
    sample = mean_only(REWARDS) / REWARDS.std(axis=1, ddof=1, keepdims=True)
    assert np.abs(group_normalised(REWARDS) - sample).max() > 0.1


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_give_no_signal_and_groups_do_not_mix(name: str) -> None:
    for reward, size in [(0.1, 3), (1e9 + 0.1, 7), (-3.3e12, 5), (1e-9, 6), (1e308, 7)]:  # the last sum is infinite
        with np.errstate(over="ignore"):
            assert not ADVANTAGES[name](np.full((2, size), reward)).any()
    both = ADVANTAGES[name](REWARDS)
    np.testing.assert_array_equal(both[1:], ADVANTAGES[name](REWARDS[1:]))


def members(*rewards: float, lost: int = 0) -> Group:
    empty = completion([1])
    prompt = Prompt(index=0, task="", text="", token_ids=(1,), item={})
    return Group(prompt=prompt, trajectories=tuple(Trajectory.single(empty, reward) for reward in rewards), lost=lost)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_members_that_are_there_are_compared_with_one_another(name: str) -> None:
    """One advantage a trajectory; whoever was lost is neither a zero nor a row."""
    groups = [
        members(*REWARDS[0]),
        members(1.0, 0.0, lost=2),
        members(3.0, lost=3),
        members(lost=4),
        members(*REWARDS[1]),
    ]
    found = advantages(groups, name)
    by_hand = [ADVANTAGES[name](np.array([rewards])).ravel() for rewards in ([*REWARDS[0]], [1.0, 0.0], [*REWARDS[1]])]
    np.testing.assert_array_equal(found, np.concatenate([by_hand[0], by_hand[1], [0.0], by_hand[2]]))
    assert found[4] == -found[5] > 0.4
    assert advantages([members(lost=2)], name).shape == (0,)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_whole_groups_have_the_advantages_of_a_matrix_to_the_bit(name: str) -> None:
    rewards = np.random.default_rng(0).normal(size=(40, 8))
    np.testing.assert_array_equal(
        advantages([members(*row) for row in rewards], name), ADVANTAGES[name](rewards).ravel()
    )


# ---- What is a constant in the policy's loss, and what happens far outside of the clip

BEHAVIOUR, PROXIMAL, LOGP = (0.1, 0.5, 0.8, 0.3), (0.4, 0.5, 0.4, 0.33), (0.44, 0.45, 0.4, 0.33)
TIS_GAINS = (1.0, 3.0, -5.0, 2.0)


def tis_gradients(
    cap: float, level: Literal["token", "sequence"] = "token"
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Of the loss by the current, proximal and rollout log-probs, all three of which ask for one."""
    logp, proximal, rollout_logprobs = (
        torch.tensor(x, dtype=torch.float64).log().requires_grad_() for x in (LOGP, PROXIMAL, BEHAVIOUR)
    )
    given = {"advantages": tensor(*TIS_GAINS), "answers": torch.tensor([3, 0, 1])}
    config = AlgorithmConfig(tis_cap=cap, tis_level=level)
    out, _ = raw_loss(config, logp, proximal, rollout_logprobs=rollout_logprobs, **given)
    out.backward()
    assert logp.grad is not None
    return logp.grad, proximal.grad, rollout_logprobs.grad


@pytest.mark.parametrize("cap", [2.0, 100.0])
def test_the_importance_weight_is_a_constant(cap: float) -> None:
    """A gradient through it would be that of another objective: the proximal one is that of the ratio alone."""
    current, proximal, rollout_logprobs = tis_gradients(cap)
    assert rollout_logprobs is None
    tis = [min(p / b, cap) for p, b in zip(PROXIMAL, BEHAVIOUR, strict=True)]
    by_hand = [-w * a * c / p for w, a, c, p in zip(tis, TIS_GAINS, LOGP, PROXIMAL, strict=True)]
    assert current.tolist() == pytest.approx(by_hand)  # no ratio here is clipped
    assert proximal is not None and proximal.tolist() == pytest.approx([-g for g in by_hand])


@pytest.mark.parametrize("cap", [1.5, 100.0])
def test_all_tokens_of_an_answer_have_its_weight_and_no_other_has(cap: float) -> None:
    """Answers of three, of no and of one token; the first one's weight is 0.4 * 0.5 * 0.4 / (0.1 * 0.5 * 0.8) = 2."""
    current, proximal, _ = tis_gradients(cap, "sequence")
    tis = [min(2.0, cap)] * 3 + [min(1.1, cap)]
    by_hand = [-w * a * c / p for w, a, c, p in zip(tis, TIS_GAINS, LOGP, PROXIMAL, strict=True)]
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
    filled = values(weight_metrics(AlgorithmConfig(), proximal, rollout, torch.tensor([3, 1, 0])))
    assert filled["train/tis_ess_answers"] == numbers["train/tis_ess_answers"], "a row without tokens is no answer"


def test_a_ratio_beyond_all_bounds_leaves_neither_nan_nor_gradient() -> None:
    """A token that has become e^2000 times as likely, with every sign of advantage."""
    logp = torch.full((3,), -1.0, requires_grad=True)
    far = torch.full((3,), -2001.0)
    out, _ = raw_loss(AlgorithmConfig(), logp, far, advantages=torch.tensor([1.0, 0.0, -1e-9]))
    out.backward()
    assert bool(out.isfinite())
    assert logp.grad is not None and bool(logp.grad.isfinite().all()) and logp.grad[:2].tolist() == [0.0, 0.0]


# ---- The rows of POLICY_LOSSES by hand: values, gradients, what is clipped, and that micro-batches do not matter

RATIOS = (1.5, 1.1, 0.5, 2.0, 1.1)  # of an answer of two tokens and one of three
ANSWERS = (2, 3)
VARIANT_GAINS = (1.0, 1.0, -2.0, -2.0, -2.0)
VARIANT_PROXIMAL = (-1.0, -0.5, -0.3, -2.0, -0.1)
WEIGHTS = (0.1, 0.1, 0.2, 0.2, 0.2)
CLIP = {"clip_low": 0.2, "clip_high": 0.2}


def variant(
    name: str, chosen: slice = slice(5), answers: tuple[int, ...] = ANSWERS
) -> tuple[float, list[float], dict[str, float]]:
    """Value, gradient by the log-probs [A] and metrics over the chosen tokens, which come with a TIS weight of 1/2."""
    ratios, proximal, advantages, weights = (
        torch.tensor(x, dtype=torch.float64)[chosen] for x in (RATIOS, VARIANT_PROXIMAL, VARIANT_GAINS, WEIGHTS)
    )
    logp = (ratios.log() + proximal).requires_grad_()
    given = {"advantages": advantages, "answers": torch.tensor(answers), "weights": weights}
    config = AlgorithmConfig(policy_loss=name, **CLIP)  # type: ignore[arg-type]
    out, metrics = raw_loss(config, logp, proximal, rollout_logprobs=proximal + math.log(2), **given)
    out.backward()
    assert logp.grad is not None
    return float(out.detach()), logp.grad.tolist(), values(metrics)


def test_gspo_clips_the_geometric_mean_of_an_answer() -> None:
    # sqrt(1.5 * 1.1) = 1.285 is clipped at 1.2, the advantage being positive; (0.5 * 2 * 1.1)^(1/3) is not.
    whole = 1.1 ** (1 / 3)
    value, gradient, metrics = variant("gspo")
    assert value == pytest.approx(-0.5 * (0.1 * 2 * 1.2 - 0.2 * 3 * 2 * whole))
    assert gradient == pytest.approx([0, 0, *[0.5 * 0.2 * 2 * whole] * 3])
    assert metrics["train/clip_frac"] == pytest.approx(2 / 5)


def test_cispo_weighs_log_probs_by_the_clipped_ratio_and_drops_no_gradient() -> None:
    clipped = [1.2, 1.1, 0.8, 1.2, 1.1]
    value, gradient, metrics = variant("cispo")
    each = [-0.5 * w * r * a for w, r, a in zip(WEIGHTS, clipped, VARIANT_GAINS, strict=True)]
    logp = [math.log(r) + p for r, p in zip(RATIOS, VARIANT_PROXIMAL, strict=True)]
    assert gradient == pytest.approx(each)
    assert value == pytest.approx(sum(g * x for g, x in zip(each, logp, strict=True)))
    assert metrics["train/clip_frac"] == pytest.approx(3 / 5)


def test_ppo_clips_each_token_for_itself() -> None:
    _, gradient, metrics = variant("ppo_clip")
    assert gradient == pytest.approx([0, -0.5 * 0.1 * 1.1, 0, 0.5 * 0.2 * 2 * 2.0, 0.5 * 0.2 * 2 * 1.1])
    assert metrics["train/clip_frac"] == pytest.approx(2 / 5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_minibatch_is_the_sum_of_its_answers(name: str) -> None:
    value, gradient, _ = variant(name, answers=(2, 0, 3))  # an answer without tokens changes nothing
    first, second = variant(name, slice(2), (2,)), variant(name, slice(2, 5), (3,))
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
