"""Attention of new queries over keys and values in pages: the plain PyTorch reference, and Triton on a CUDA device.

A page holds E entries of one layer. A row's entries are wherever its page table says, so that rows of all lengths share
one pool, and rows with a common beginning share its pages. A cache with a slot a row is a special case: a slot is a
page of C entries, and the table of a row names its slot.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from bebop.kernels.tree_verify import visible
from bebop.kernels.verify import compiled

MAX_NODES = 64  # of a tree in the Triton kernel, which holds a bit for each in one number


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    entries: Tensor,
    used: int,
    scaling: float,
    ways: Tensor | None = None,
) -> Tensor:
    """Return the attention of new queries over the cache entries that each may see, including those of the queries.

    Args:
        query: [B, H, n, D], rotary embeddings applied.
        keys: [P, Hkv, E, D], pages of a layer, E entries each; the entries of these queries are written already.
        values: [P, Hkv, E, D], of the same pages.
        table: [B, T], the page of entries 0..E-1, E..2E-1, ... of each row. Beyond a row's own pages the table may name
            any page, since no query sees it.
        entries: [B, n], the last entry that each query sees. In a chain that is its own, and it sees all before it.
        used: no query sees an entry from here on; known to the host.
        scaling: of the scores.
        ways: [B, n, M] (bool), of a tree: which of M nodes each query sees, itself among them, beside all entries
            before node 0. Node k has entry ``entries[:, 0]`` + k; nothing else of ``entries`` is read.

    Returns:
        [B, n, H, D].
    """
    if compiled(None, query) and (ways is None or ways.shape[2] <= MAX_NODES):
        from bebop.kernels import paged_attention_triton

        return paged_attention_triton.launch(query, keys, values, table, entries, used, scaling, ways)
    return reference(query, keys, values, table, entries, used, scaling, ways)


def reference(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    entries: Tensor,
    used: int,
    scaling: float,
    ways: Tensor | None = None,
) -> Tensor:
    """Compute ``paged_attention`` in plain PyTorch, in any dtype: gather the pages, then attend with a mask."""
    batch, heads, width, size = query.shape
    kv_heads, page = keys.shape[1:3]
    pages = table[:, : -(-used // page)]
    k, v = (store[pages].transpose(1, 2).flatten(2, 3)[:, :, :used] for store in (keys, values))  # [B, Hkv, P, D]
    if ways is None:
        seen = torch.arange(used, device=entries.device) <= entries[..., None]  # [B, n, P]
    else:
        seen = visible(entries[:, 0], ways, used)
    group = heads // kv_heads
    seen = seen[:, None, None].expand(-1, 1, group, -1, -1).flatten(2, 3)
    q = query.reshape(batch, kv_heads, group * width, size)
    out = scaled_dot_product_attention(q, k, v, seen, scale=scaling)
    return out.unflatten(2, (group, width)).permute(0, 3, 1, 2, 4).reshape(batch, width, heads, size)
