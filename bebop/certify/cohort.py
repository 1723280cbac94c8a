"""A cohort as bets need it: which position is whose neighbour, and what is known of the uniforms behind its tokens."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.certify.answers import Block
from bebop.certify.bigram import Bigram
from bebop.certify.directions import PLACES, Rows
from bebop.certify.evidence import Array
from bebop.certify.marginals import likelier

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cohort:
    """N positions, R parallel runs; ``upper``, ``own`` and ``ranked`` are filled chunk by chunk."""

    block: Block
    cells: Tensor  # [N, R] sampled columns
    places: Index  # [N, 2] request, position
    masks: Array  # [1 + PLACES, N] all positions, and those of each place in the decoding cycle
    serial: Index  # [N] the position before in the same answer, -1: there is none
    rows: Index  # [N] the same position of the request before, -1: there is none
    upper: Array  # [R, N] F(x) in the order of ids
    own: Array  # [R, N] p(x)
    ranked: Array  # [R, N] F(x-) in the order of likelihood

    def at(self, index: slice | Tensor, vocabulary: int, bigram: Bigram) -> Rows:
        """Some positions, with what is known before their tokens."""
        own = {name: getattr(self.block, name) for name in self.block.__slots__}
        cut: dict[str, Any] = {name: value[index] for name, value in own.items() if isinstance(value, Tensor)}
        part = replace(self.block, **cut)
        neighbour = None
        if part.ids is None:
            partner = torch.from_numpy(self.rows).to(part.probs.device)[index]
            there = self.block.probs[partner.clamp_min(0)]
            neighbour = torch.where((partner >= 0)[:, None], there, part.probs)
        return Rows(part=part, vocabulary=vocabulary, neighbour=neighbour, bigram=bigram.table(part))

    def fill(self, rows: Rows, start: int) -> Tensor:
        """Note p(x), F(x) and F(x-) of positions from ``start`` on; F of all of their columns [n, M]."""
        stop = start + len(rows.p)
        cells = self.cells[start:stop]
        own, upper = rows.p.gather(1, cells), (rows.middle() + rows.p) / 2
        self.own[:, start:stop] = own.T.cpu().numpy()
        self.upper[:, start:stop] = upper.gather(1, cells).T.cpu().numpy()
        self.ranked[:, start:stop] = likelier(rows.p, cells, own).cpu().numpy()
        return upper


def make_cohort(block: Block, tokens: Tensor) -> Cohort:
    """Of a block whose requests are in order, and columns ``tokens`` [R, N]."""
    request, position = block.request.cpu().numpy(), block.position.cpu().numpy()
    span = int(position.max()) + 2
    key = np.cumsum(np.diff(request, prepend=request[0]) != 0) * span + position  # sorted, for requests are in order
    cycle = np.full(len(block), -1) if block.cycle is None else block.cycle.cpu().numpy()
    place = np.minimum(cycle, PLACES - 1)
    empty = np.zeros((len(tokens), len(block)))
    return Cohort(
        block=block,
        cells=tokens.T.to(block.probs.device).contiguous(),
        places=np.stack([request, position], -1),
        masks=np.stack([np.ones(len(block)), *(place == at for at in range(PLACES))]).astype(np.float64),
        serial=_find(key, np.where(position > 0, key - 1, -1)),
        rows=_find(key, key - span),
        upper=empty.copy(),
        own=empty.copy(),
        ranked=empty.copy(),
    )


def _find(key: Index, wanted: Index) -> Index:
    """Where each wanted key is, -1: nowhere."""
    at = np.searchsorted(key, wanted).clip(max=len(key) - 1)
    found: Index = np.where(key[at] == wanted, at, -1)
    return found
