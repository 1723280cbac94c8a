"""Losses of PIPO, on given text (SPEC 2.3) and on the network's own completions (SPEC 2.4), and their batches.

In a row of pairs [n, 2] place (i, 0) holds a token and (i, 1) a token or the pad token. A *split* is the token before a
PAD that is not at the end of prompt or completion.
"""

import dataclasses
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy
from torch.nn.utils.rnn import pad_sequence

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.systems.pipo.network import PairModel, as_pairs
from bebop.trainer.chains import TokenRow

# ---- text as pairs of tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class PairRow:
    """Prompt and completion in pairs. pairs=((2, 17), (4, 0), (9, 1)), prompt=2."""

    pairs: tuple[tuple[int, int], ...]
    prompt: int  # pairs of the prompt
    drafts: tuple[int, ...] = ()  # second token drawn for each pair of the completion, pad if none; () in SFT

    def line(self) -> str:
        """Return the row as a line of JSON."""
        return json.dumps(dataclasses.asdict(self)) + "\n"

    @classmethod
    def read(cls, line: str) -> Self:
        """Return the row of a line of JSON."""
        row = json.loads(line)
        pairs = tuple((first, second) for first, second in row["pairs"])
        return cls(pairs=pairs, prompt=row["prompt"], drafts=tuple(row["drafts"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairBatch:
    """Batch of rows, padded on the right with pairs of two PADs."""

    pairs: Tensor  # [B, n, 2]
    answer: Tensor  # [B, n] whether a pair belongs to the completion
    drafts: Tensor  # [B, n] drawn second tokens, pad if none
    pad: int

    @property
    def firsts(self) -> Tensor:
        """Return a mask [B, n - 1] of the pairs i + 1 whose first token is trained on."""
        return self.answer[:, 1:] & (self.pairs[:, 1:, 0] != self.pad)

    @property
    def seconds(self) -> Tensor:
        """Return a mask [B, n - 1] of the pairs i + 1 whose second token, that of the text, is trained on."""
        return self.answer[:, 1:] & (self.pairs[:, 1:, 1] != self.pad)

    @property
    def drafted(self) -> Tensor:
        """Return a mask [B, n - 1] of the pairs i + 1 for which a second token was drawn, kept or not."""
        return self.answer[:, 1:] & (self.drafts[:, 1:] != self.pad)


def split_row(row: TokenRow, pad: int, share: float, numbers: random.Random) -> PairRow:
    """Return a text in pairs, with PADs at random places of the completion; prompt and completion have whole pairs
    each.

    PADs come after random tokens, and the following tokens are paired anew, as after a rejected draft. The paper turns
    (a, b) into (a, PAD), (b, PAD), which keeps every token at a place that it would not have in decoding.

    Args:
        row: prompt and completion.
        pad: the token that replaces a second token.
        share: share of the completion's tokens that a PAD follows.
        numbers: random numbers that choose them.
    """
    prompt, answer = as_pairs(row.prompt, pad), list(row.answer)
    chosen = set(numbers.sample(range(len(answer)), round(share * len(answer))))
    placed: list[tuple[int, int]] = []
    at = 0
    while at < len(answer):
        alone = at in chosen or at + 1 == len(answer)
        placed.append((answer[at], pad if alone else answer[at + 1]))
        at += 1 if alone else 2
    return PairRow(pairs=(*prompt, *placed), prompt=len(prompt))


def batch_rows(rows: Sequence[PairRow], pad: int, device: torch.device | None = None) -> PairBatch:
    """Collate rows of different lengths into one batch."""

    def side_by_side(values: list[Tensor]) -> Tensor:
        return pad_sequence(values, batch_first=True, padding_value=pad).to(device)

    pairs = side_by_side([torch.tensor(row.pairs) for row in rows])
    starts = torch.tensor([row.prompt for row in rows])[:, None]
    drafts = side_by_side([torch.tensor([*[pad] * row.prompt, *row.drafts]).long() for row in rows])
    if drafts.shape[1] < pairs.shape[1]:
        drafts = torch.nn.functional.pad(drafts, (0, pairs.shape[1] - drafts.shape[1]), value=pad)
    places = torch.arange(pairs.shape[1])
    ends = torch.tensor([len(row.pairs) for row in rows])[:, None]
    answer = ((places >= starts) & (places < ends)).to(device)
    return PairBatch(pairs=pairs, answer=answer, drafts=drafts, pad=pad)


def without_pads(pairs: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Return rows of pairs [B, n, 2] as text for a model of single tokens, and the index of each place in it.

    Returns:
        The tokens without PADs [B, 2 n], padded with ``pad``; and for each place [B, n, 2] the index of the newest
        token at it or before it, so that a PAD stands for the token before it.
    """
    flat = pairs.flatten(1)
    real = flat != pad
    order = real.logical_not().long().argsort(dim=1, stable=True)
    index = (real.long().cumsum(1) - 1).clamp_min(0)
    return flat.gather(1, order), index.view_as(pairs)


# ---- losses on given text


def mean(values: Tensor) -> Tensor:
    """Return the mean; 0 without values."""
    return values.sum() / max(1, values.numel())


def sft_loss(
    network: PairModel, policy: Policy, batch: PairBatch, *, mtp_weight: float = 1.0, confidence_weight: float = 1.0
) -> tuple[Tensor, dict[str, float]]:
    """Return the cross-entropy of both tokens and of the confidence, whose target is p of the text's token (Eqs. 7, 8).

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
    """Return the policy's log-probs for both places of pair i + 1, reading the text without PADs: both [B, n - 1, V].

    A second place, including one with a PAD, comes after the first token of its pair. The pad token is excluded, as it
    is for the network.
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
    """Return min(1, p_T(y) / p_S(y)) [N] of drafts y [N] under log-probs [N, V] (Eq. 10); without a gradient."""
    ratio = (teacher - student).gather(-1, drafts[..., None])[..., 0]
    return ratio.detach().exp().clamp_max(1.0)


def reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """Return KL(p_S || p_T) [N] of log-probs [N, V]; tokens that the student never draws contribute nothing (Eq. 9)."""
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
    """Return the reverse KL at both places and the confidence's cross-entropy with the draft's acceptance (Eq. 12).

    The batch is the network's own text, with all second tokens that it drew. Dropped drafts count too: otherwise the
    confidence would learn only from accepted drafts.
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
