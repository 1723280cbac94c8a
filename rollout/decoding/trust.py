"""How much matches in history are worth: what was accepted after such matches, from history, from the head, from both.

A draft is accepted with the overlap of its distribution with the target's, and overlap is what is learned here: that
of history's own distribution h, of the head's m, and of their mean. The overlap of w h + (1 - w) m is concave in w, but
mostly near its largest at an end: where the target is sure of one token, it is linear. What the share of tokens that
came from history would say, the w of the greatest likelihood, lies in between and is worse than either end.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.rollout.history import Automaton
from bebop.rollout.slots import Slots

# Buckets: matches of 1, 2, 3-4, 5-8, 9-16 and more tokens; what followed came once, twice, more often, or in several
# ways. The last bucket is of positions without a match.
LENGTHS, KINDS = 6, 4
BUCKETS, NONE = LENGTHS * KINDS + 1, LENGTHS * KINDS
SHARES = (1.0, 0.5, 0.0)  # w that a mixture may have; of equals the first
PRIOR = 4.0  # positions that the prior is worth
HEAD = 0.7  # its overlap, before anything is known
DOUBT = 2.0  # how long a match, times how often it was followed, is as likely to be wrong as to be right
SEVERAL = 0.5  # what is left of that where several tokens followed


@dataclass(frozen=True, slots=True, kw_only=True)
class Trusted:
    """What a row trusts in, by bucket."""

    share: Sequence[float]  # w
    alone: Sequence[float]  # overlap of what followed with the target, on average; 0 without a match
    gain: Sequence[float]  # tokens that the head adds to that, 0 or more


def prior() -> Tensor:
    """Sums [BUCKETS, 7] at PRIOR positions: overlaps with w of SHARES; positions of the first, and of the others.

    Then how many drafts stood where the head was asked, and how many more stood after them.
    """
    lengths = 2.0 ** torch.arange(LENGTHS, dtype=torch.float64)[:, None]
    strength = lengths * torch.tensor([1.0, 2.0, 3.0, 1.0], dtype=torch.float64)
    share = strength / (strength + DOUBT)
    share[:, -1] *= SEVERAL
    alone = torch.cat([share.flatten(), share.new_zeros(1)])
    head = torch.full_like(alone, HEAD)
    both = torch.where(alone > 0, (alone + head) / 2, 0)
    one = torch.ones_like(alone)
    return PRIOR * torch.stack([alone, both, head, one, one, HEAD * one, HEAD * one], 1)


def trusted(sums: Tensor) -> list[Trusted]:
    """Of rows, from their sums [B, BUCKETS, 7]. A draft that stands is worth a token, and those that follow."""
    overlaps = sums[..., :3] / sums[..., [3, 4, 4]]
    best, which = overlaps.max(-1)
    shares = torch.tensor(SHARES, dtype=sums.dtype, device=sums.device)[which]
    worth = 1 + sums[..., 6].sum(-1) / sums[..., 5].sum(-1)
    found = torch.stack([shares, overlaps[..., 0], (best - overlaps[..., 0]) * worth[:, None]], 1)
    return [Trusted(share=share, alone=alone, gain=gain) for share, alone, gain in found.tolist()]


class OverlapSums:
    """Sums of rows by bucket.

    ``siblings``: rows of one prompt learn together, and what they have learned stays with what is known of the prompt.
    Otherwise each request learns for itself.
    """

    def __init__(self, slots: Slots, siblings: bool) -> None:
        self.fresh = prior().to(slots.device)
        self.own = None if siblings else slots.add("history/trust", self.fresh)  # [S, BUCKETS, 7]

    def sums(self, texts: Sequence[Automaton]) -> Tensor:
        """Of the first rows [B, BUCKETS, 7], each with the texts that it matches."""
        if self.own is not None:
            return self.own[: len(texts)]
        return torch.stack([self.fresh if one.learned is None else one.learned for one in texts])

    def add(self, texts: Sequence[Automaton], new: Tensor) -> None:
        """Take in what the first rows have seen [B, BUCKETS, 7]."""
        if self.own is not None:
            self.own[: len(texts)] += new
            return
        rows: dict[int, list[int]] = {}
        for row, one in enumerate(texts):
            rows.setdefault(id(one), []).append(row)
        for members in rows.values():
            one = texts[members[0]]
            one.learned = (self.fresh if one.learned is None else one.learned) + new[members].sum(0)
