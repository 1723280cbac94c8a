"""Recursive rejection sampling down a tree of drafts (SPEC 3.3); of a chain it is rejection sampling."""

import torch

from bebop.kernels.tree_verify import tree_verify
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput


class TreeWalk:
    """Siblings are tried one after another, each against what is left of the target; the output distribution is the
    target's, at every temperature.

    ``siblings``: how many were tried at each depth.
    """

    exact = True
    stepwise = True
    layers: tuple[int, ...] = ()
    counts: tuple[str, ...] = ("siblings",)

    def __init__(self, *_: object) -> None:
        """Made as every part is, and needs nothing of it."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: torch.Tensor) -> Accepted:
        """See ``AcceptanceRule``."""
        drafts, parents = draft.tokens.shape[1], draft.parents
        if parents is None:
            parents = torch.arange(-1, drafts - 1, device=uniforms.device).expand_as(draft.tokens)
        depth = drafts if draft.depth is None else draft.depth
        accepted, token, path, tried = tree_verify(
            draft.tokens, draft.probs, out.probs, uniforms, parents, depth, draft.lengths
        )
        return Accepted.path(draft, path, accepted, token, counts={"siblings": tried})


EntryClass = TreeWalk
