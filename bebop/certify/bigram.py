"""Which token followed which, in earlier cohorts: a stand-in for any context that is shorter than the true one."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.answers import Block

MOST = 1 << 17  # pairs that are remembered, 1.5 MB; the rarest are forgotten first
PRIOR = 4.0  # tokens that the claim itself counts as


class Bigram:
    """Counts of pairs of tokens; ``learn`` after a cohort, ``table`` before the next."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary
        self.keys: NDArray[np.int64] = np.zeros(0, np.int64)  # token before * vocabulary + token, sorted
        self.counts: NDArray[np.float32] = np.zeros(0, np.float32)

    def learn(self, before: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Take in pairs [N]."""
        new, counts = np.unique(before * self.vocabulary + tokens, return_counts=True)
        keys, place = np.unique(np.concatenate([self.keys, new]), return_inverse=True)
        total = np.bincount(place, weights=np.concatenate([self.counts, counts]), minlength=len(keys))
        if len(keys) > MOST:
            kept = np.sort(np.argsort(-total, kind="stable")[:MOST])
            keys, total = keys[kept], total[kept]
        self.keys, self.counts = keys, total.astype(np.float32)

    def table(self, part: Block) -> Tensor | None:
        """[n, M]: claim and counts, (PRIOR p + counts after the last token) / their sum; None: nothing learned yet."""
        if not len(self.keys):
            return None
        last = part.last.cpu().numpy()
        first = np.searchsorted(self.keys, last * self.vocabulary)
        count = np.searchsorted(self.keys, (last + 1) * self.vocabulary) - first
        rows = np.repeat(np.arange(len(last)), count)
        entry = np.arange(len(rows)) + np.repeat(first - (np.cumsum(count) - count), count)
        r = PRIOR * part.probs
        token = self.keys[entry] - last[rows] * self.vocabulary
        values = torch.from_numpy(self.counts[entry].astype(np.float64)).to(r.device)
        at = torch.from_numpy(rows).to(r.device)
        column = torch.from_numpy(token).to(r.device)
        if part.ids is not None:
            column = _columns(part.ids, at, column)
            at, values, column = at[column >= 0], values[column >= 0], column[column >= 0]
        r.index_put_((at, column), values, accumulate=True)
        return r / r.sum(-1, keepdim=True)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"keys": self.keys.copy(), "counts": self.counts.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a checkpoint was written."""
        self.keys, self.counts = np.array(state["keys"], np.int64), np.array(state["counts"], np.float32)


def _columns(ids: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
    """Column of each token in its row: its own, else the one for all others, else -1. [entries]"""
    ranked, order = ids.sort(-1)
    found = []
    for at, token in zip(rows.split(4096), tokens.split(4096), strict=True):
        own = ranked[at]
        place = torch.searchsorted(own, token[:, None]).clamp_max(own.shape[1] - 1)
        there = own.gather(1, place) == token[:, None]
        rest = torch.where(own[:, :1] < 0, 0, -1)
        place = torch.where(there, place, rest)[:, 0]
        found.append(torch.where(place >= 0, order[at, place.clamp_min(0)], -1))
    return torch.cat(found) if found else rows.new_zeros(0)
