"""Context parallelism: ranks hold parts of each row of text.

A row has 2 size pieces, and rank r holds pieces r and 2 size - 1 - r: Megatron balances causal attention this way. A
head needs whole rows: each rank runs the first step on all chains, and the later steps on a share of them.
"""

import dataclasses
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from bebop.trainer.chains import ChainRows


def own_pieces(whole: Tensor, dim: int, group: dist.ProcessGroup) -> Tensor:
    """Return the pieces of this rank; the length along ``dim`` is a multiple of 2 size."""
    pieces = whole.chunk(2 * group.size(), dim)
    return torch.cat([pieces[group.rank()], pieces[2 * group.size() - 1 - group.rank()]], dim)


@torch.no_grad()
def whole_rows(part: Tensor, starts: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """Join the parts [T / size, ...] of all context parallel ranks to [T, ...], without a graph.

    ``starts`` [B + 1]: the first positions of rows that lie end to end in the whole; None: there is one row.
    """
    size = dist.get_world_size(group)
    every = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(every, part.detach().contiguous(), group=group)
    bounds = [0, len(part)] if starts is None else (starts // size).tolist()
    pieces: list[Tensor] = []
    for begin, end in pairwise(bounds):
        halves = [rank[begin:end].chunk(2) for rank in every]
        pieces += [front for front, _ in halves] + [back for _, back in reversed(halves)]
    return torch.cat(pieces)


def share_of(rows: ChainRows, group: dist.ProcessGroup) -> ChainRows:
    """Return every size-th chain of each row: later steps are split over the ranks, the first runs on all of them.

    Every rank gets the same number, padded with chains without a step.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    missing = -rows.anchors.shape[1] % size
    anchors, steps = (pad(x, (0, missing))[:, rank::size] for x in (rows.anchors, rows.steps))
    return dataclasses.replace(rows, anchors=anchors, steps=steps)


class SplitContext:
    """Attention of a frozen backbone over parts of rows: keys and values of all ranks are gathered, without a graph.

    megatron-core's own attention needs Transformer Engine for this.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        """Set ``group``, the context parallel ranks in the order of their pieces."""
        self.group = group

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend causally over whole rows: query [B, H, n, D], key and value [B, Hkv, n, D] -> [B, n, H, D]."""
        keys, values = (
            whole_rows(x.permute(2, 0, 1, 3), None, self.group).permute(1, 2, 0, 3) for x in (key, value)
        )  # fmt: skip
        positions = torch.arange(keys.shape[2], device=query.device)
        seen = positions <= own_pieces(positions, 0, self.group)[:, None]  # [n, L]
        grouped = query.shape[1] != keys.shape[1]
        out = scaled_dot_product_attention(query, keys, values, seen, scale=scaling, enable_gqa=grouped)
        return out.transpose(1, 2)
