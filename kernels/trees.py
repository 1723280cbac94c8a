"""Trees of drafts: who follows whom, and what a node sees of a cache. Nodes are numbered, parents before children."""

import torch
from torch import Tensor


def ancestry(parents: Tensor) -> Tensor:
    """Which nodes [B, K, K] (bool) lie on the way to each, itself included, of ``parents`` [B, K], -1 at the top."""
    nodes = parents.shape[1]
    # The step to a parent, squared again and again: after m times it covers 2 ** m generations.
    step = (parents[..., None] == torch.arange(nodes, device=parents.device)).float()
    way = torch.eye(nodes, device=parents.device) + step
    for _ in range(max(nodes - 1, 1).bit_length() - 1):
        step = step @ step
        way = way + step @ way
    return way > 0


def visible(first: Tensor, ways: Tensor, used: int) -> Tensor:
    """Entries [B, n, used] (bool) of a cache that queries see: those before ``first`` [B], and of the tree their way.

    ``ways`` [B, n, K]: the nodes that each sees; node k has entry ``first`` + k.
    """
    batch, width, nodes = ways.shape
    text = torch.arange(used, device=first.device) < first[:, None, None]
    places = first[:, None, None] + torch.arange(nodes, device=first.device)
    return text.repeat(1, width, 1).scatter_(2, places.expand(batch, width, nodes), ways)
