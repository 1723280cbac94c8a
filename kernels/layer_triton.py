# mypy: disable-error-code="untyped-decorator"
"""The parts of a decoder layer between the matrix products and the attention, in three Triton kernels.

1. ``_norm``, one program a row: the residual sum, if there is one, and its root mean square norm.
2. ``_turn``, one program per token and a few heads: the norms of queries and keys, if there are any, and their rotary
   embeddings, written side by side as attention reads them. With a cache, keys and values go to their cache entries at
   once, and only queries are written side by side.
3. ``_gated``, one program per token and tile: silu(gate) * up.

The kernels round where transformers' modules round, and compute in fp32 between: a norm is rounded before it is
multiplied with its weight, and of rotary embeddings both products are. Only sums over a row have another order. The
references are ``Norm``, ``rotate`` and ``LeanLayer`` in ``bebop/model/lean.py``, which call these kernels.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

HEADS = 8  # of a program: at D = 128, 1,024 numbers
TILE = 1024  # numbers of a program of ``_gated``


@triton.jit
def _rounded(x: tl.tensor, like: tl.tensor) -> tl.tensor:
    """Return fp32 numbers rounded to the type that ``like`` points to, as fp32 again."""
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _norm(
    x: tl.tensor, more: tl.tensor, weight: tl.tensor, total: tl.tensor, out: tl.tensor, width: tl.tensor,
    eps: tl.tensor, ADD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    lanes = tl.arange(0, BLOCK)
    inside = lanes < width
    place = tl.program_id(0).to(tl.int64) * width + lanes
    states = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        states = _rounded(states + tl.load(more + place, mask=inside, other=0.0).to(tl.float32), out)
        tl.store(total + place, states.to(total.dtype.element_ty), mask=inside)
    normed = _rounded(states * tl.rsqrt(tl.sum(states * states, 0) / width + eps), out)
    scaled = normed * tl.load(weight + lanes, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, scaled.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _turn(
    x: tl.tensor, query_weight: tl.tensor, key_weight: tl.tensor, cos: tl.tensor, sin: tl.tensor, out: tl.tensor,
    queries: tl.tensor, heads: tl.tensor, width: tl.tensor, step: tl.tensor, angle: tl.tensor, eps: tl.tensor,
    keys: tl.tensor, values: tl.tensor, table: tl.tensor, entries: tl.tensor, pages: tl.tensor, page: tl.tensor,
    key_page: tl.tensor, key_head: tl.tensor, key_entry: tl.tensor,
    value_page: tl.tensor, value_head: tl.tensor, value_entry: tl.tensor,
    entries_row: tl.tensor, entries_token: tl.tensor,
    STORED: tl.constexpr, NORMED: tl.constexpr, SIZE: tl.constexpr, LANES: tl.constexpr, HEADS: tl.constexpr,
) -> None:  # fmt: skip
    """Apply norms and rotary embeddings to ``heads`` heads of a token; the first ``queries`` of them are queries.

    With ``STORED`` the value heads follow, one per key head.
    """
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    lane = tl.arange(0, LANES)[None, :]
    kv_heads = heads - queries
    inside = (head < heads + (kv_heads if STORED else 0)) & (lane < SIZE)
    # Rotary embeddings combine each number with the one half a head away.
    other = tl.where(lane < SIZE // 2, lane + SIZE // 2, lane - SIZE // 2)
    start = x + row * step + head * SIZE
    own = tl.load(start + lane, mask=inside, other=0.0).to(tl.float32)
    far = tl.load(start + other, mask=inside, other=0.0).to(tl.float32)
    value = own.to(out.dtype.element_ty)  # of a head that is neither normed nor turned
    if NORMED:
        scale = tl.rsqrt(tl.sum(own * own, 1) / SIZE + eps)[:, None]
        weight = tl.where(head < queries, query_weight, key_weight)
        of_own = tl.load(weight + lane, mask=inside, other=0.0).to(tl.float32)
        of_far = tl.load(weight + other, mask=inside, other=0.0).to(tl.float32)
        own = _rounded(_rounded(own * scale, out) * of_own, out)
        far = _rounded(_rounded(far * scale, out) * of_far, out)
    own *= tl.load(cos + row * angle + lane, mask=lane < SIZE, other=0.0).to(tl.float32)
    far *= tl.load(sin + row * angle + lane, mask=lane < SIZE, other=0.0).to(tl.float32)
    turned = (_rounded(own, out) + _rounded(far, out)).to(out.dtype.element_ty)
    if STORED:
        entry = tl.load(entries + row // width * entries_row + row % width * entries_token)
        number = tl.load(table + row // width * pages + entry // page).to(tl.int64)
        offset, key = (entry % page).to(tl.int64), head - queries
        to_key = keys + number * key_page + key * key_head + offset * key_entry + lane
        tl.store(to_key, turned, mask=inside & (head >= queries) & (head < heads))
        to_value = values + number * value_page + (key - kv_heads) * value_head + offset * value_entry + lane
        tl.store(to_value, value, mask=inside & (head >= heads))
        heads, inside = queries, inside & (head < queries)
    place = ((row // width * heads + head) * width + row % width) * SIZE + lane
    tl.store(out + place, turned, mask=inside)


@triton.jit
def _gated(x: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = lanes < width
    gate = tl.load(x + row * 2 * width + lanes, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + (row * 2 + 1) * width + lanes, mask=inside, other=0.0).to(tl.float32)
    active = _rounded(gate / (1 + tl.exp(-gate)), out)
    tl.store(out + row * width + lanes, (active * up).to(out.dtype.element_ty), mask=inside)


# ---- the public functions


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the root mean square norm of states [..., d] with weights [d]."""
    return _normed(x, None, weight, eps)[1]


def add_norm(x: Tensor, more: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return the sum x + more of states [..., d], and the root mean square norm of that sum."""
    return _normed(x, more, weight, eps)


def _normed(x: Tensor, more: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, width = x.contiguous(), x.shape[-1]
    out = torch.empty_like(x)
    total = x if more is None else torch.empty_like(x)
    more = x if more is None else more.contiguous()
    block = triton.next_power_of_2(width)
    if rows := x.numel() // width:
        warps = min(8, max(1, block // 512))
        _norm[(rows,)](x, more, weight, total, out, width, eps, ADD=total is not x, BLOCK=block, num_warps=warps)
    return total, out


def turn(x: Tensor, weights: Sequence[Tensor], eps: float, rotary: tuple[Tensor, Tensor], queries: int) -> Tensor:
    """Return queries and keys with their norms and rotary embeddings, contiguous.

    Args:
        x: [B, H + Hkv, n, D], or [N, H + Hkv, D] of rows end to end: the first heads of a product, which lies in memory
            token by token.
        weights: [D] for the norm of queries and [D] for that of keys; empty: no norms.
        eps: of both norms.
        rotary: cosines and signed sines [B, 1, n, D] or [N, 1, D], in the order of the tokens.
        queries: H.
    """
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch_turn(x, weights, eps, rotary, (queries, x.shape[1]), out, None)


def turn_and_store(
    x: Tensor,
    weights: Sequence[Tensor],
    eps: float,
    rotary: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    stores: tuple[Tensor, Tensor],
    table: Tensor,
    entries: Tensor,
) -> Tensor:
    """Return queries as ``turn`` gives them, contiguous, and write turned keys and plain values into a cache.

    Args:
        x: [B, H + 2 Hkv, n, D], or [N, H + 2 Hkv, D] of rows end to end: the product of queries, keys and values.
        weights: as in ``turn``.
        eps: as in ``turn``.
        rotary: as in ``turn``.
        heads: H and Hkv.
        stores: keys and values [P, Hkv, E, D] of a layer: pages of E entries, or slots.
        table: [B, T] or [N, T], the page of entries 0..E-1, E..2E-1, ... of each row.
        entries: [B, n] or [N], the cache entry of each token. Of tokens with the same entry any one is kept.
    """
    queries, kv_heads = heads
    assert x.shape[1] == queries + 2 * kv_heads, "queries, keys and values"
    assert entries.shape == (x.shape[0], *x.shape[2:-1]), "an entry of each token"
    shape = (x.shape[0], queries, *x.shape[2:])
    out = torch.empty(shape, dtype=x.dtype, device=x.device)
    return _launch_turn(x, weights, eps, rotary, (queries, queries + kv_heads), out, (*stores, table, entries))


def _launch_turn(
    x: Tensor,
    weights: Sequence[Tensor],
    eps: float,
    rotary: tuple[Tensor, Tensor],
    heads: tuple[int, int],
    out: Tensor,
    stored: tuple[Tensor, Tensor, Tensor, Tensor] | None,
) -> Tensor:
    """Apply norms and rotary embeddings to the first ``heads[1]`` heads, of which ``heads[0]`` are queries.

    ``stored`` holds the keys, values, table and entries of ``turn_and_store``.
    """
    width, size = x.shape[2] if x.dim() == 4 else 1, x.shape[-1]
    assert x.stride(1) == size and x.stride(-1) == 1, "heads lie side by side"
    step, angle = (one.stride(2) if one.dim() == 4 else one.stride(0) for one in (x, rotary[0]))
    assert rotary[0].stride() == rotary[1].stride() and rotary[0].stride(0) == width * angle, "token by token"
    query_weight, key_weight = weights or (x, x)  # not read
    pages, page, strides = 0, 1, [0] * 8
    if stored is not None:
        pages, page = stored[2].stride(0), stored[0].shape[2]
        entries = stored[3].view(-1, width) if stored[3].dim() == 1 else stored[3]
        strides = [*stored[0].stride()[:3], *stored[1].stride()[:3], *entries.stride()]
        assert stored[0].stride(3) == stored[1].stride(3) == 1, "the numbers of a head lie side by side"
    if tokens := len(x) * width:
        _turn[(tokens, triton.cdiv(x.shape[1], HEADS))](
            x, query_weight, key_weight, *rotary, out, *heads, width, step, angle, eps,
            *(stored or (out, out, out, out)), pages, page, *strides, STORED=stored is not None,
            NORMED=bool(weights), SIZE=size, LANES=triton.next_power_of_2(size), HEADS=HEADS, num_warps=4,
            enable_fp_fusion=False,  # both products are rounded before they are added, in fp32 as well
        )  # fmt: skip
    return out


def gated(x: Tensor) -> Tensor:
    """Return silu(gate) * up of both halves [N, 2 I] -> [N, I]."""
    rows, width = len(x), x.shape[-1] // 2
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    if rows:
        _gated[(rows, triton.cdiv(width, TILE))](x.contiguous(), out, width, BLOCK=TILE, num_warps=4)
    return out
