"""The acceptance rules that several systems share; all of them are exact."""

from dataclasses import replace

import torch
from torch import Tensor

from bebop.kernels import draw
from bebop.kernels.block_verify import block_verify
from bebop.kernels.tree_verify import tree_verify
from bebop.kernels.verify import chain_verify
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput, takes_logits


class ExactRule:
    """What exact rules have in common."""

    exact = True
    stepwise = True
    layers: tuple[int, ...] = ()
    counts: tuple[str, ...] = ()

    def __init__(self, *_: object) -> None:
        """Take what every rule is given, and use none of it."""


@takes_logits
class Rejection(ExactRule):
    """With a one-hot draft this *is* target-only verification, which accepts with p(argmax q); with none, sampling."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Judge the drafts of a cycle."""
        if out.rows is None:
            return Accepted.chain(draft, *chain_verify(draft.tokens, draft.probs, out.probs, uniforms, draft.lengths))
        accepted, token, overlap = draw.verify(
            draft.tokens, draft.rows, out.rows, uniforms, draft.lengths, measure=rows.measure
        )
        return replace(Accepted.chain(draft, accepted, token), overlap=overlap)


class BlockRule(ExactRule):
    """As many drafts as a rule that knows the chain alone can accept; the output distribution is the target's."""

    stepwise = False

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Judge the drafts of a cycle."""
        return Accepted.chain(draft, *block_verify(draft.tokens, draft.probs, out.probs, uniforms, draft.lengths))


class TreeWalk(ExactRule):
    """Siblings are tried one after another, each against the target's remaining mass; the output distribution is the
    target's, at every temperature.

    ``siblings``: how many were tried at each depth.
    """

    counts = ("siblings",)

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: torch.Tensor) -> Accepted:
        """Judge the drafts of a cycle."""
        drafts, parents = draft.tokens.shape[1], draft.parents
        if parents is None:
            parents = torch.arange(-1, drafts - 1, device=uniforms.device).expand_as(draft.tokens)
        depth = drafts if draft.depth is None else draft.depth
        accepted, token, path, tried = tree_verify(
            draft.tokens, draft.probs, out.probs, uniforms, parents, depth, draft.lengths
        )
        return Accepted.path(draft, path, accepted, token, counts={"siblings": tried})
