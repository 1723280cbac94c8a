"""The choices of the RL algorithm as pure functions: advantages, aggregation, policy losses, importance weights.

An advantage says how much better a completion is than the others of its prompt, from the rewards [n_groups, G], one row
per group. A completion gets 0 if all rewards of its group are equal, or if it is alone. There is nothing to compare it
with then, and the group teaches nothing (beyond a KL term). Members lost with their environments are in no group; the
remaining ones are compared with one another.

A token has three log-probs: *rollout* (the engine, when it produced the token), *proximal* (the trainer at the start of
the update) and the current one. The trust region is around proximal, the ratio pi / pi_prox. A constant weight,
min(pi_prox / pi_rollout, cap), corrects for the rollout distribution (decoupled PPO, Hilton et al. 2021), for each
token by itself or for the whole completion.

Averages are over the whole minibatch, not over micro-batches. The weight of each token is fixed beforehand from the
global counts, and a micro-batch contributes its weighted *sum*. Sums over micro-batches and ranks then give exactly the
loss of the undivided minibatch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.config.job import AlgorithmConfig
from bebop.metrics.metrics import Max, Mean, Metrics, SampleSize, Sum
from bebop.model.routing import Replay
from bebop.trainer.packing import PackedRows
from bebop.trajectory import Group

Rewards = NDArray[np.float64]
Lengths = NDArray[np.int64]
Weights = NDArray[np.float64]


def group_normalised(rewards: Rewards, eps: float = 1e-6) -> Rewards:
    """Return (r - mean) / (std + eps), SPEC Eq. 3.

    std is the *population* standard deviation, reported as ``reward/std``.
    """
    return mean_only(rewards) / (rewards.std(axis=1, keepdims=True) + eps)


def mean_only(rewards: Rewards) -> Rewards:
    """Return r - mean, without the division that gives nearly solved and nearly hopeless prompts more weight.

    If all rewards are equal the result is exactly 0. The rounding error of the mean, divided by a deviation of 0, would
    give 0.1 for large rewards.
    """
    equal = (rewards == rewards[:, :1]).all(axis=1, keepdims=True)
    return np.where(equal, 0.0, rewards - rewards.mean(axis=1, keepdims=True))


def leave_one_out(rewards: Rewards) -> Rewards:
    """Return r - mean of the *other* completions: an unbiased baseline; equals ``mean_only`` times G / (G - 1)."""
    size = rewards.shape[1]
    return mean_only(rewards) * size / max(size - 1, 1)


ADVANTAGES: dict[str, Callable[[Rewards], Rewards]] = {
    "group_normalised": group_normalised,
    "mean_only": mean_only,
    "leave_one_out": leave_one_out,
}


def advantages(groups: Sequence[Group], name: str) -> Rewards:
    """Return advantages [N] of all trajectories, group by group, by the function ``name`` of ``ADVANTAGES``.

    Groups may have fewer members than others, or none.
    """
    rewards = [np.array([[t.reward for t in group.trajectories]], dtype=np.float64) for group in groups]
    found = [ADVANTAGES[name](row)[0] for row in rewards if row.size]
    return np.concatenate([np.zeros(0), *found])


def token_mean(lengths: Lengths, max_new_tokens: int) -> Weights:
    """Return equal weights for all tokens of the minibatch: 1 / tokens."""
    return np.full(len(lengths), 1 / max(1, lengths.sum()))


def seq_mean_token_mean(lengths: Lengths, max_new_tokens: int) -> Weights:
    """Return weights that count every completion alike, SPEC Eq. 3: tokens of long completions count less."""
    return 1 / (len(lengths) * np.maximum(1, lengths))


def seq_mean_token_sum_norm(lengths: Lengths, max_new_tokens: int) -> Weights:
    """Return weights for the sum over a completion's tokens / ``max_new_tokens``, averaged over completions.

    They have no bias towards any length.
    """
    return np.full(len(lengths), 1 / (max(1, len(lengths)) * max_new_tokens))


# Completion lengths of the whole minibatch [R] -> the weight of each of a row's tokens [R].
AGGREGATIONS: dict[str, Callable[[Lengths, int], Weights]] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionTokens:
    """Inputs of a policy loss, for the A completion tokens of one micro-batch of R completions."""

    logp: Tensor  # [A], current; carries the gradient
    proximal: Tensor  # [A], at the start of the update
    advantages: Tensor  # [A]
    answers: Tensor  # [R] tokens of each completion, summing to A
    clip_low: float
    clip_high: float

    def clip(self, ratio: Tensor) -> Tensor:
        """Return the ratio, clipped to the trust region."""
        return ratio.clamp(1 - self.clip_low, 1 + self.clip_high)

    def pessimistic(self, ratio: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smaller of the gains with and without the clip, and where the clipped one is smaller."""
        gain, clipped = ratio * self.advantages, self.clip(ratio) * self.advantages
        return torch.minimum(gain, clipped), clipped < gain


def ppo_clip(tokens: CompletionTokens) -> tuple[Tensor, Tensor]:
    """Return the gain of each token by its ratio, clipped where that lowers the gain (Schulman et al. 2017)."""
    return tokens.pessimistic(bounded_exp(tokens.logp - tokens.proximal))


def gspo(tokens: CompletionTokens) -> tuple[Tensor, Tensor]:
    """Return the gain by the ratio of the whole completion, the geometric mean over its tokens, clipped as in PPO.

    This is GSPO-token (Zheng et al. 2025): each token's ratio has the completion's value and the token's own gradient,
    so that advantages may differ.
    """
    difference = (tokens.logp - tokens.proximal).detach()
    per_answer = torch.segment_reduce(difference, "mean", lengths=tokens.answers)  # NaN without tokens
    of_answer = per_answer.repeat_interleave(tokens.answers)
    return tokens.pessimistic(bounded_exp(tokens.logp - tokens.logp.detach() + of_answer))


def cispo(tokens: CompletionTokens) -> tuple[Tensor, Tensor]:
    """Return the gain with the clipped ratio of each token as a constant weight of its log-prob (MiniMax-M1).

    All tokens keep a gradient.
    """
    ratio = bounded_exp(tokens.logp - tokens.proximal).detach()
    clipped = tokens.clip(ratio)
    return clipped * tokens.advantages * tokens.logp, clipped != ratio


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Return exp of the log-ratio, between e^-20 and e^20; beyond that the clip decides, and inf * 0 would be NaN."""
    return log_ratio.clamp(-20, 20).exp()


# Tokens -> the gain of each token [A], to be maximised, and whether it was clipped [A].
POLICY_LOSSES: dict[str, Callable[[CompletionTokens], tuple[Tensor, Tensor]]] = {
    "ppo_clip": ppo_clip,
    "gspo": gspo,
    "cispo": cispo,
}


def per_token(log_ratio: Tensor, answers: Tensor) -> Tensor:
    """Return the log weight of each token by itself: little variance, but blind to the rest of the completion."""
    return log_ratio


def per_completion(log_ratio: Tensor, answers: Tensor) -> Tensor:
    """Return one log weight for all tokens of a completion: no bias but for the cap, more variance for more tokens."""
    per_answer = torch.segment_reduce(log_ratio, "sum", lengths=answers)
    return per_answer.clamp(-20, 20).repeat_interleave(answers)


# log pi_prox / pi_rollout [A] and the tokens of each completion [R] -> log of each token's importance weight [A].
TIS_LEVELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"token": per_token, "sequence": per_completion}


def policy_loss(
    config: AlgorithmConfig,
    *,
    logp: Tensor,
    entropy: Tensor,
    proximal: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    answers: Tensor,
    weights: Tensor,
    reference: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """Return the share of one micro-batch in the minibatch's loss (a weighted sum), and its metrics.

    All tensors are [A], one number per completion token, but ``answers`` [R], the tokens of each completion.
    ``entropy`` needs a gradient only with an entropy bonus. ``reference`` are log-probs of the initial policy, for the
    KL term.
    """
    tokens = CompletionTokens(
        logp=logp,
        proximal=proximal,
        advantages=advantages,
        answers=answers,
        clip_low=config.clip_low,
        clip_high=config.clip_high,
    )
    gain, clipped = POLICY_LOSSES[config.policy_loss](tokens)
    log_weight = TIS_LEVELS[config.tis_level](proximal - rollout_logprobs, answers)
    tis = log_weight.exp().clamp(max=config.tis_cap).detach()
    loss = -tis * gain
    metrics: Metrics = {
        "train/clip_frac": mean(clipped),
        "train/tis_mean": mean(tis),
        "policy/entropy": mean(entropy),
    }
    if reference is not None:
        kl = k3(logp, reference)
        loss = loss + config.kl_coefficient * kl
        metrics["train/kl"] = mean(kl)
    if config.entropy_coefficient:
        loss = loss - config.entropy_coefficient * entropy_below(entropy, answers, config.entropy_target)
    return (loss * weights).sum(), metrics


def entropy_below(entropy: Tensor, answers: Tensor, target: float | None) -> Tensor:
    """Return the entropy [A] of completions [R] whose mean lies below ``target`` nats, and 0 for the others.

    With None all entropies count. A bonus for all may run away: the flatter the policy, the less reward tells its
    completions apart, and nothing opposes the bonus any more. The choice is by completion and not by batch, so that
    parts of a minibatch need no communication.
    """
    if target is None:
        return entropy
    mean_of_answer = torch.segment_reduce(entropy.detach(), "mean", lengths=answers)
    return entropy * (mean_of_answer < target).repeat_interleave(answers)


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """Return Schulman's estimator of KL(pi || reference) on tokens from pi.

    It is x - log x - 1 with x = reference / pi, and never negative. The value estimates KL(pi || reference). Its
    *gradient* at fixed tokens is that of KL(reference || pi), which has the same minimum (GRPO uses it unchanged).
    """
    log_x = (reference - logp).clamp(-20, 20)
    return log_x.exp() - log_x - 1


def ratio_metrics(proximal: Tensor, rollout_logprobs: Tensor) -> Metrics:
    """Return the distance of the trainer's log-probs at the start of an update from the engine's, both [A].

    ``rollout/logprob_diff`` is the mean |log p - log p|, over tokens of all weights. Tokens of older weights add what
    was learned since.
    """
    difference = proximal - rollout_logprobs
    return {"train/ratio_mean": mean(difference.exp()), "rollout/logprob_diff": mean(difference.abs())}


def weight_metrics(config: AlgorithmConfig, proximal: Tensor, rollout_logprobs: Tensor, answers: Tensor) -> Metrics:
    """Return the effective sample size under importance weights, and the share that the cap cuts.

    Arguments are those of ``policy_loss``. ``train/tis_ess_answers`` is for whole completions without a cap, whatever
    ``tis_level`` says: the sample size that an unbiased estimate would have.
    """
    log_ratio = (proximal - rollout_logprobs).double()
    weight = TIS_LEVELS[config.tis_level](log_ratio, answers).exp()
    whole = torch.segment_reduce(log_ratio, "sum", lengths=answers).clamp(-20, 20).exp()
    return {
        "train/tis_ess": SampleSize.of(weight.clamp(max=config.tis_cap).cpu().numpy()),
        "train/tis_capped": mean(weight > config.tis_cap),
        # Micro-batches that only fill up a rank have a row without a token.
        "train/tis_ess_answers": SampleSize.of(whole[answers > 0].cpu().numpy()),
    }


def same_weights_metrics(rows: PackedRows, logp: Tensor, version: int) -> Metrics:
    """Return the distance of the trainer's log-probs [A] under the weights ``version`` from the engine's.

    They count over the tokens that these weights produced, so two implementations of one distribution are compared.

    *Current* tokens are those whose whole context was computed under these weights, ``train/ratio_tokens`` of them. For
    these, ``train/ratio_error_max`` beyond rounding is a bug. *Kept* tokens are those that saw keys and values of older
    weights (``rollout.on_update=keep``). There the engine's distribution differs, and the distance says by how much.
    """
    difference = logp - rows.target_logprobs
    own = rows.versions == version
    current, kept = own & (rows.contexts == version), own & (rows.contexts < version)
    metrics: Metrics = {"train/ratio_tokens": Sum(float(current.sum()))}
    for tokens, average, largest in (
        (current, "rollout/logprob_diff_current", "train/ratio_error_max"),
        (kept, "rollout/logprob_diff_kept", "train/ratio_error_kept"),
    ):
        if bool(tokens.any()):
            metrics[average] = mean(difference[tokens].abs())
            metrics[largest] = Max(float((difference[tokens].exp() - 1).abs().max()))
    return metrics


def routing_metrics(routing: Replay) -> Metrics:
    """Return how much of a pass's routing was recorded, and how often the trainer's own routers choose the same."""
    if not routing.known:
        return {}
    tokens, routers = len(routing.recorded), len(routing.known)  # type: ignore[arg-type]
    known = float(torch.stack([*routing.known.values()]).sum())
    agreed = float(torch.stack([*routing.agreed.values()]).sum())
    return {
        "train/routing_recorded": Mean(known, tokens * routers),
        "train/routing_agreement": Mean(agreed, known),
    }


def busiest_expert(loads: Tensor) -> Metrics:
    """Return the largest share of a layer's choices that one expert has, over loads [R, E] of R layers."""
    return {"train/expert_load_max": Max(float((loads / loads.sum(1, keepdim=True)).max()))}


def mean(values: Tensor) -> Mean:
    """Return the mean over tokens [A], summed in fp64."""
    return Mean(float(values.detach().double().sum()), values.numel())
