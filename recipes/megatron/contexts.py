"""Context parallelism: what ranks hold in parts of each row, whole again, and a share of the chains for each rank."""

import dataclasses
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from bebop.trainer.chains import ChainRows


@torch.no_grad()
def whole_rows(part: Tensor, starts: Tensor | None, group: dist.ProcessGroup) -> Tensor:
    """[T / size, ...] of each rank -> [T, ...], without a graph.

    Of the 2 size pieces of a row, rank r has pieces r and 2 size - 1 - r: so Megatron balances causal attention.

    ``starts`` [B + 1]: where rows that lie end to end begin in the whole; None: there is one.
    """
    size = dist.get_world_size(group)
    every = [torch.empty_like(part) for _ in range(size)]
    dist.all_gather(every, part.detach().contiguous(), group=group)
    bounds = [0, len(part)] if starts is None else (starts // size).tolist()
    pieces: list[Tensor] = []
    for begin, end in pairwise(bounds):
        halves = [rank[begin:end].chunk(2) for rank in every]
        pieces += [front for front, _ in halves] + [back for _, back in reversed(halves)]
    return torch.cat(pieces)


def share_of(rows: ChainRows, group: dist.ProcessGroup) -> ChainRows:
    """Every size-th chain of each row: later steps are split over the ranks, the first runs on all of them."""
    mine = slice(dist.get_rank(group), None, dist.get_world_size(group))
    return dataclasses.replace(rows, anchors=rows.anchors[:, mine], steps=rows.steps[:, mine])
