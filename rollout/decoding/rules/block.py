"""Block verification (arXiv 2403.10444): the drafts of a row are judged as a whole, and more of them are accepted."""

from torch import Tensor

from bebop.kernels.block_verify import block_verify
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput


class BlockRule:
    """As many drafts as a rule that knows the chain alone can accept; the output distribution is the target's."""

    exact = True
    stepwise = False
    layers: tuple[int, ...] = ()
    counts: tuple[str, ...] = ()

    def __init__(self, *_: object) -> None:
        """Made as every part is, and needs nothing of it."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        """See ``AcceptanceRule``."""
        return Accepted.chain(draft, *block_verify(draft.tokens, draft.probs, out.probs, uniforms, draft.lengths))


EntryClass = BlockRule
