"""Objectives for training an MTP head: one function each, from hidden states of a chain to a loss.

The backbone, its embedding and its language-model head are constants here: every tensor of theirs is detached, so that
no gradient can reach the policy. Logits exist for a chunk of rows at a time (``kernels.linear_losses``).
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bebop.config.job import SamplingConfig
from bebop.errors import UserError
from bebop.kernels.draft_losses import LOSSES, needs_labels
from bebop.kernels.linear_losses import linear_draft_loss, linear_e2e_tv_loss
from bebop.model.mtp import MTPHead, chain, gather_rows
from bebop.trainer.chains import ChainRows, Per
from bebop.trainer.draft_vocabulary import DraftHead, RowNumbers, end_to_end_of_rows, mean_of_rows, row_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling settings that turn logits into the compared distributions, as in rollouts."""

    temperature: float = 1.0
    target_top_p: float = 1.0  # truncation of the target's distribution; the draft learns to follow it
    target_top_k: int = 0  # 0 is all

    def options(self) -> dict[str, Any]:
        """Return the settings as keyword arguments of the losses."""
        return {name: getattr(self, name) for name in ("temperature", "target_top_p", "target_top_k")}

    @classmethod
    def of(cls, config: SamplingConfig) -> "Sampling":
        """Return the settings with which completions are sampled, as far as losses know them."""
        return cls(temperature=config.temperature, target_top_p=config.top_p, target_top_k=config.top_k)


WHOLE = Sampling()  # temperature 1, no truncation


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Chains over rows as hidden states, the input of an objective."""

    draft: Tensor  # [B, A, K, d], of the head; carries the gradient
    target: Tensor  # [B, A, K, d], of the backbone at the positions that the steps stand for
    weight: Tensor  # [V, d], the language-model head of both
    tokens: Tensor  # [B, A, K], of the data
    mask: Tensor  # [B, A, K]
    sampling: Sampling
    head: DraftHead | None = None  # of a drafter that has one of its own; None: ``weight``

    def rows(self, chosen: Tensor, kind: str, labels: bool) -> RowNumbers:
        """Return the numbers of the steps ``chosen`` [B * A * K] (bool), for a drafter with a head of its own."""
        assert self.head is not None
        draft, target, tokens = (x.flatten(0, 2)[chosen] for x in (self.draft, self.target, self.tokens))
        return row_numbers(
            draft, self.head, target, self.weight, kind=kind, labels=tokens if labels else None,
            **self.sampling.options(),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Objective:
    """A loss of chains, and the unit of its mean: micro-batches are weighted by how many steps or anchors they have."""

    loss: Callable[[Steps], Tensor]
    per: Per = "step"


def unroll(
    head: MTPHead,
    embeddings: Tensor,
    hidden: Tensor,
    weight: Tensor,
    rows: ChainRows,
    sampling: Sampling,
    least: int = 1,
) -> Steps:
    """Run the head's recursive steps on given text; embeddings and hidden states [B, L, d] belong to its tokens.

    Step i at anchor t predicts token t + i + 1 and is compared with the backbone's distribution at position t + i (SPEC
    0.5). ``least``: the minimum number of steps although the rows have fewer, for ranks whose steps are collectives.
    """
    # A rank without a step runs along: the others wait for its collectives.
    depth = max(1, least, int(rows.steps.max()))
    embeddings, hidden = embeddings.detach(), hidden.detach()
    last = hidden.shape[1] - 1
    draft = list(chain(head, embeddings, hidden, depth, rows.anchors))
    target = [gather_rows(hidden, (rows.anchors + step).clamp_max(last)) for step in range(1, depth + 1)]
    return Steps(
        draft=torch.stack(draft, 2),
        target=torch.stack(target, 2),
        weight=weight.detach(),
        tokens=torch.stack([rows.tokens(step) for step in range(1, depth + 1)], 2),
        mask=rows.mask(depth),
        sampling=sampling,
    )


def mean_over_steps(steps: Steps, kind: str) -> Tensor:
    """Return the mean of a single-step loss over all steps that exist, whatever their depth; 0 if there is none."""
    chosen = steps.mask
    if steps.head is not None:
        return mean_of_rows(steps.rows(chosen.flatten(), kind, needs_labels(kind)))
    labels = steps.tokens[chosen] if needs_labels(kind) else None
    sampling = steps.sampling.options()
    losses = linear_draft_loss(
        steps.draft[chosen], steps.weight, steps.target[chosen], steps.weight, kind=kind, labels=labels, **sampling
    )
    return losses.loss.sum() / max(1, len(losses.loss))


def end_to_end(steps: Steps, corrected: bool) -> Tensor:
    """Return 1 - expected accepted drafts / K_eff, averaged over anchors (SPEC Eq. 13).

    With ``corrected`` it is the unbiased form (1.3).
    """
    if steps.head is not None:
        rows = partial(steps.rows, kind="tv", labels=corrected)
        return end_to_end_of_rows(rows, steps.mask.flatten(0, 1), corrected)
    draft, target, tokens, mask = (x.flatten(0, 1) for x in (steps.draft, steps.target, steps.tokens, steps.mask))
    sampling = steps.sampling.options()
    return linear_e2e_tv_loss(
        draft, steps.weight, target, steps.weight, mask, tokens=tokens if corrected else None, **sampling
    )


OBJECTIVES: dict[str, Objective] = {
    **{kind: Objective(partial(mean_over_steps, kind=kind), per="step") for kind in LOSSES},
    "e2e_tv": Objective(partial(end_to_end, corrected=False), per="anchor"),
    "e2e_tv_corrected": Objective(partial(end_to_end, corrected=True), per="anchor"),
}


def make_objective(name: str) -> Objective:
    """Return the objective with this name; raise ``UserError`` if there is none."""
    if name not in OBJECTIVES:
        raise UserError(f"objective={name!r} is not possible: choose one of {', '.join(OBJECTIVES)}")
    return OBJECTIVES[name]
