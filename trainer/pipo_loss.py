"""The losses of PIPO: on given text (SPEC 2.3) and by distillation on the network's own answers (SPEC 2.4)."""

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.pipo import PairModel
from bebop.trainer.pipo_rows import PairBatch, without_pads


def mean(values: Tensor) -> Tensor:
    """Of no values 0."""
    return values.sum() / max(1, values.numel())


def sft_loss(
    network: PairModel, policy: Policy, batch: PairBatch, *, mtp_weight: float = 1.0, confidence_weight: float = 1.0
) -> tuple[Tensor, dict[str, float]]:
    """Cross-entropy of both tokens, and of the confidence with the probability of the text's token (Eqs. 7, 8).

    Returns:
        The loss; its parts, and means of confidence and of its target.
    """
    h, u = network.read(policy, batch.pairs)
    firsts, seconds = batch.firsts, batch.seconds
    first = cross_entropy(network.logits(policy, h[firsts]), batch.pairs[:, 1:, 0][firsts])
    labels = batch.pairs[:, 1:, 1][seconds]
    logprobs = network.logits(policy, u[seconds]).log_softmax(-1).gather(1, labels[:, None])[:, 0]
    second = mean(-logprobs)
    target = logprobs.detach().exp()
    trust = network.confidence_logits(h[seconds], u[seconds])
    confidence = mean(binary_cross_entropy_with_logits(trust, target, reduction="none"))
    numbers = {"first": first, "second": second, "confidence": confidence,
               "mean_confidence": mean(trust.sigmoid()), "mean_target": mean(target)}  # fmt: skip
    loss = first + mtp_weight * second + confidence_weight * confidence
    return loss, {name: float(value.detach()) for name, value in numbers.items()}


# ---- distillation


@torch.no_grad()
def teacher_logprobs(policy: Policy, network: PairModel, batch: PairBatch) -> tuple[Tensor, Tensor]:
    """What the policy, reading the text without PADs, predicts for both places of pair i + 1: both [B, n - 1, V].

    A second place, also one that holds a PAD, comes after the first token of its pair. The pad token is ruled out, as
    it is for the network.
    """
    text, index = without_pads(batch.pairs, batch.pad)
    length = int((text != batch.pad).sum(1).max())
    text = text[:, :length]
    positions = torch.arange(length, device=text.device).expand_as(text)
    hidden = policy.hidden(text, positions, CausalContext())

    def at(places: Tensor) -> Tensor:
        found = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        return network.logits(policy, found).log_softmax(-1)

    return at(index[:, :-1, 1]), at(index[:, 1:, 0])


def acceptance(student: Tensor, teacher: Tensor, drafts: Tensor) -> Tensor:
    """min(1, p_T(y) / p_S(y)) [N] of drafts y [N] under log-probs [N, V] (Eq. 10); without a gradient."""
    ratio = (teacher - student).gather(-1, drafts[..., None])[..., 0]
    return ratio.detach().exp().clamp_max(1.0)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """KL(p_S || p_T) [N] of log-probs [N, V]; tokens that the student never draws count nothing (Eq. 9)."""
    never = torch.isneginf(student)
    gap = (student - teacher).masked_fill(never, 0)
    return (student.exp() * gap).sum(-1)


def opd_loss(
    network: PairModel,
    policy: Policy,
    batch: PairBatch,
    *,
    mtp_weight: float = 1.0,
    confidence_weight: float = 1.0,
) -> tuple[Tensor, dict[str, float]]:
    """Reverse KL at both places and cross-entropy of the confidence with the acceptance of the draft (Eq. 12).

    The batch is the network's own text, with all second tokens that it drew: those that were not kept count, too, or
    the confidence would learn from accepted drafts alone.
    """
    h, u = network.read(policy, batch.pairs)
    places = batch.firsts, batch.drafted
    states = h[places[0]], u[places[1]]
    teacher = [x[where] for x, where in zip(teacher_logprobs(policy, network, batch), places, strict=True)]
    student = [network.logits(policy, x).log_softmax(-1) for x in states]
    first, second = (mean(reverse_kl(own, other)) for own, other in zip(student, teacher, strict=True))
    target = acceptance(student[1], teacher[1], batch.drafts[:, 1:][places[1]])
    trust = network.confidence_logits(h[places[1]], states[1])
    confidence = mean(binary_cross_entropy_with_logits(trust, target, reduction="none"))
    numbers = {"first": first, "second": second, "confidence": confidence,
               "mean_confidence": mean(trust.sigmoid()), "mean_target": mean(target)}  # fmt: skip
    loss = first + mtp_weight * second + confidence_weight * confidence
    return loss, {name: float(value.detach()) for name, value in numbers.items()}
