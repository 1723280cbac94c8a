"""Which rank the tokens of an answer have in the drafts of every place, and how many cycles follow from that.

Drafts of one anchor do not depend on one another, and at temperature 0 a draft stands if it is the token that comes. So
the ranks of one plain answer tell exactly how far any tree of drafts would be accepted anywhere (SPEC 3.3).
"""

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from bebop.model.backbone import Policy
from bebop.model.firp import PseudoStates
from bebop.model.firp_text import RealText, pseudo_beside
from bebop.trainer.chains import TokenRow
from bebop.tree_shape import reached

BEYOND = -1  # where the text has ended

# Real states and anchors [B,A] -> logits [B,A,K,V] of the tokens 2..K + 1 places on.
Drafts = Callable[[RealText, Tensor], Tensor]


def drafts_of(policy: Policy, network: PseudoStates) -> Drafts:
    """Those of pseudo states."""

    def logits(real: RealText, anchors: Tensor) -> Tensor:
        return policy.logits(pseudo_beside(policy, network, real, anchors, len(network.layers))[0])

    return logits


@torch.no_grad()
def token_ranks(
    drafts: Drafts, rows: Sequence[TokenRow], read: Sequence[RealText], batch: int = 16
) -> list[list[list[int]]]:
    """Of every row and every place of its answer: the rank of the tokens that come in the drafts of each step, [T][K].

    Place e is what is drafted while e tokens of the answer are known: the anchor is the token before the newest.
    ``read``: the rows, which have prompts of two tokens or more, for the layers that ``drafts`` reads. Behind the text
    there is ``BEYOND``.
    """
    assert all(len(row.prompt) > 1 for row in rows), "the first cycle drafts from the token before the last"
    found: list[list[list[int]]] = []
    for first in range(0, len(rows), batch):
        part = rows[first : first + batch]
        real = RealText.beside(read[first : first + batch])
        length, device = real.hidden.shape[1], real.hidden.device
        places = torch.arange(max(len(row.answer) for row in part), device=device)
        anchors = torch.tensor([len(row.prompt) - 2 for row in part], device=device)[:, None] + places
        logits = drafts(real, anchors.clamp_max(length - 1))
        ahead = anchors[..., None] + torch.arange(2, logits.shape[2] + 2, device=device)
        ids = torch.zeros(len(part), length, dtype=torch.long, device=device)
        for i, row in enumerate(part):
            ids[i, : len(row.token_ids)] = torch.tensor(row.token_ids, device=device)
        tokens = ids.gather(1, ahead.clamp_max(length - 1).flatten(1)).view_as(ahead)[..., None]
        ranks = (logits > logits.gather(-1, tokens)).sum(-1)
        ends = torch.tensor([len(row.token_ids) for row in part], device=device)
        ranks = ranks.masked_fill(ahead >= ends[:, None, None], BEYOND)
        found += [ranks[i, : len(row.answer)].tolist() for i, row in enumerate(part)]
    return found


def cycles(ranks: Sequence[Sequence[int]], shape: Collection[tuple[int, ...]]) -> int:
    """In how many cycles an answer with these ranks [T][K] is written, each with a tree of this shape."""
    place, count = 0, 0
    while place < len(ranks):
        place += 1 + reached(shape, ranks[place])
        count += 1
    return count
