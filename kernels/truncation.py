"""Top-k and top-p truncation of target distributions in the losses: tokens that sampling cannot emit get a logit of
-inf.

Order and border are those of ``rollout/decoding/sampling.py``: temperature, top-k, renormalise, top-p. A token is kept
while the mass before it is below p by more than rounding. Of equal tokens at the border the first ones in index order
are kept.
"""

import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.row_losses import accumulator
from bebop.kernels.row_threads import share

# Rounding of float32 sums: mass that is short of p by less than this counts as p. Without it [.5, .3, .1, .1] keeps
# three tokens at p = .8, as the sum of the first two comes out a bit below .8 or not, depending on the softmax.
BORDER = 1e-6
CHUNK_ELEMENTS = {"cuda": 2**24, "cpu": 2**17}  # truncated together; they take some 30 bytes each
# Likeliest tokens that top-p tries first; a row that keeps more is sorted. At V = 49,152 on one core this takes 0.4 ms
# a row, sorting it 4.4 ms.
CANDIDATES = 1024


def check(top_p: float, top_k: int) -> None:
    """Raise ``UserError`` unless top_p is in (0, 1] and top_k is at least 0."""
    if not 0 < top_p <= 1:
        raise UserError(f"target_top_p must be above 0 and at most 1, not {top_p}")
    if top_k < 0:
        raise UserError(f"target_top_k must be at least 1, or 0 for all tokens, not {top_k}")


@torch.no_grad()
def truncate_(logits: Tensor, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0) -> Tensor:
    """Set the logits [N, V] of tokens outside of the truncated distribution at ``temperature`` to -inf, in place."""
    if top_p == 1 and top_k == 0:
        return logits
    rows = max(1, CHUNK_ELEMENTS.get(logits.device.type, 2**17) // logits.shape[-1])
    parts = logits.split(rows)

    def truncate(block: int) -> None:
        part = parts[block]
        probs = (part.to(accumulator(part, part)) / temperature).softmax(-1)
        part.masked_fill_(~_kept(probs, top_p, top_k), -torch.inf)

    share(truncate, len(parts), elements=logits.numel(), device=logits.device)
    return logits


def _kept(probs: Tensor, top_p: float, top_k: int) -> Tensor:
    """Return which tokens [N, V] (bool) belong to the truncated distribution."""
    vocabulary = probs.shape[-1]
    ranked = probs.topk(min(top_k or CANDIDATES, vocabulary)).values
    count = _count(ranked, top_p, renormalise=top_k > 0)
    if top_k == 0 and ranked.shape[-1] < vocabulary and bool((count == ranked.shape[-1]).any()):
        ranked = probs.sort(descending=True).values
        count = _count(ranked, top_p, renormalise=False)
    border = ranked.gather(-1, count[:, None] - 1)
    above, tied = probs > border, probs == border
    return above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= (count - above.sum(-1))[:, None]))


def _count(ranked: Tensor, top_p: float, renormalise: bool) -> Tensor:
    """Return how many of the largest probabilities [N, M] a row keeps, at least 1."""
    if renormalise:
        ranked = ranked / ranked.sum(-1, keepdim=True)
    # Rounding may take a sum to 1 before the tail: p = 1 keeps all.
    bound = top_p - BORDER if top_p < 1 else torch.inf
    return (ranked.cumsum(-1) - ranked < bound).sum(-1).clamp_min(1)
