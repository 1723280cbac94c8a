"""Rejection sampling (SPEC 0.3): accepts with the full overlap sum_v min(p, q), and the output distribution is p."""

from torch import Tensor

from bebop.kernels.verify import chain_verify
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput


class Rejection:
    """With a one-hot draft this *is* target-only verification, which accepts with p(argmax q); with none, sampling."""

    exact = True
    stepwise = True
    layers: tuple[int, ...] = ()
    counts: tuple[str, ...] = ()

    def __init__(self, *_: object) -> None:
        """Made as every part is, and needs nothing of it."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """See ``AcceptanceRule``."""
        return Accepted.chain(draft, *chain_verify(draft.tokens, draft.probs, out.probs, uniforms, draft.lengths))


EntryClass = Rejection
