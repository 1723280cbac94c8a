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
    """Base class of exact rules."""

    exact = True
    stepwise = True
    layers: tuple[int, ...] = ()
    counts: tuple[str, ...] = ()

    def __init__(self, *_: object) -> None:
        """Accept the arguments of every rule, and use none of them."""


@takes_logits
class Rejection(ExactRule):
    """Rejection sampling of chains.

    With a one-hot draft this *is* target-only verification, which accepts with p(argmax q); without drafts it is
    sampling.
    """

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Verify the drafts of a cycle by rejection sampling."""
        if out.rows is None:
            return Accepted.chain(draft, *chain_verify(draft.tokens, draft.probs, out.probs, uniforms, draft.lengths))
        accepted, token, overlap = draw.verify(
            draft.tokens, draft.rows, out.rows, uniforms, draft.lengths, measure=rows.measure
        )
        return replace(Accepted.chain(draft, accepted, token), overlap=overlap)


class BlockRule(ExactRule):
    """Block verification: no rule that knows only the chain accepts more drafts.

    The output distribution is the target's.
    """

    stepwise = False

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """Verify the drafts of a cycle by block verification."""
        return Accepted.chain(draft, *block_verify(draft.tokens, draft.probs, out.probs, uniforms, draft.lengths))


class TreeWalk(ExactRule):
    """Verification of trees: siblings are tried one after another, each against the target's remaining mass.

    The output distribution is the target's, at every temperature. The statistic ``siblings`` counts how many were tried
    at each depth.
    """

    counts = ("siblings",)

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: torch.Tensor) -> Accepted:
        """Verify the drafts of a cycle, a tree or a chain."""
        drafts, parents = draft.tokens.shape[1], draft.parents
        if parents is None:
            parents = torch.arange(-1, drafts - 1, device=uniforms.device).expand_as(draft.tokens)
        depth = drafts if draft.depth is None else draft.depth
        accepted, token, path, tried = tree_verify(
            draft.tokens, draft.probs, out.probs, uniforms, parents, depth, draft.lengths
        )
        return Accepted.path(draft, path, accepted, token, counts={"siblings": tried})
