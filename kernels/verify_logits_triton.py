# mypy: disable-error-code="untyped-decorator"
"""Chain verification of logits in Triton: temperature inside, no softmax in memory.

1. ``_normalisers`` (small batches only), one program per (request, draft, split): maximum and sum of exponentials of
   both rows of every draft, whether it will be needed or not, so that the device is full.
2. ``_accept``, one program per request: walks the chain and stops at the first rejection; the normalisers come from
   step 1, or, at large batches, from the rows themselves, of which none beyond the rejection is read.
3. ``_masses``, one program per (request, tile): the tile's mass of the residual, or of the bonus row, whose normaliser
   is not needed: a tile is summed under its own maximum, which ``_draw`` takes into account.
4. ``_draw``, one program per request: inverts the CDF over the tile masses, then inside the one tile that it hits.

Why a CDF and not a race of exponentials: both read the row once (the residual needs the normalisers first in either
case), but a race costs a counter-based random number per element, and the CDF decides by the same uniforms as the
variant that takes probabilities, so one reference serves both.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bebop.kernels.row_passes_triton import law, load, normalise
from bebop.kernels.verify_triton import block_of, check, pick_lane, pick_tile

LOG2E = 1.4426950408889634


@triton.jit
def _normalisers(
    q: tl.tensor, p: tl.tensor, scales: tl.tensor, lengths: tl.tensor, partial: tl.tensor, V: tl.tensor,
    splits: tl.tensor, tiles: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Into partial [B, K, 4, splits]: maximum and sum of q, maximum and sum of p, over ``tiles`` tiles."""
    row = (tl.program_id(0) // K).to(tl.int64)
    step = tl.program_id(0) % K
    split = tl.program_id(1)
    if step < tl.load(lengths + row):
        draft = q + (row * K + step) * V
        target = p + (row * (K + 1) + step) * V
        scale = tl.load(scales + row)
        q_top, q_sum, p_top, p_sum = normalise(draft, target, split * tiles, tiles, V, scale, BLOCK)
        out = partial + (row * K + step) * 4 * splits + split
        tl.store(out, q_top)
        tl.store(out + splits, q_sum)
        tl.store(out + 2 * splits, p_top)
        tl.store(out + 3 * splits, p_sum)


@triton.jit
def _merge(partial: tl.tensor, splits: tl.tensor, scale: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """One maximum and sum from those of all splits."""
    lanes = tl.arange(0, LANES)
    tops = tl.load(partial + lanes, mask=lanes < splits, other=-1.0e30)
    totals = tl.load(partial + splits + lanes, mask=lanes < splits, other=0.0)
    top = tl.max(tops, 0)
    return top, tl.sum(totals * tl.exp2((tops - top) * scale), 0)


@triton.jit
def _accept(
    tokens: tl.tensor, q: tl.tensor, p: tl.tensor, u: tl.tensor, scales: tl.tensor, lengths: tl.tensor,
    partial: tl.tensor, accepted: tl.tensor, norms: tl.tensor, V: tl.tensor, splits: tl.tensor, tiles: tl.tensor,
    K: tl.constexpr, SPLIT: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Drafts before the first that fails u * q < p, and the normalisers [4] of the rows where it failed."""
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scales + row)
    length = tl.load(lengths + row).to(tl.int32)
    n = tl.full((), 0, tl.int32)
    alive = n < length
    while alive:
        draft = q + (row * K + n) * V
        target = p + (row * (K + 1) + n) * V
        if SPLIT:
            part = partial + (row * K + n) * 4 * splits
            q_top, q_sum = _merge(part, splits, scale, LANES)
            p_top, p_sum = _merge(part + 2 * splits, splits, scale, LANES)
        else:
            q_top, q_sum, p_top, p_sum = normalise(draft, target, 0, tiles, V, scale, BLOCK)
        token = tl.load(tokens + row * K + n)
        q_at, _ = law(draft, token, V, q_top, q_sum, scale)
        p_at, _ = law(target, token, V, p_top, p_sum, scale)
        number = tl.load(u + row * (K + 2) + n).to(tl.float64)
        passed = number * q_at.to(tl.float64) < p_at.to(tl.float64)
        tl.store(norms + row * 4, q_top)
        tl.store(norms + row * 4 + 1, q_sum)
        tl.store(norms + row * 4 + 2, p_top)
        tl.store(norms + row * 4 + 3, p_sum)
        n += passed.to(tl.int32)
        alive = passed & (n < length)
    tl.store(accepted + row, n.to(tl.int64))


@triton.jit
def _tile_of_laws(
    q: tl.tensor, p: tl.tensor, norms: tl.tensor, offsets: tl.tensor, V: tl.tensor, scale: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """One tile of the residual and of p after a rejection."""
    draft, _ = law(q, offsets, V, tl.load(norms), tl.load(norms + 1), scale)
    target, _ = law(p, offsets, V, tl.load(norms + 2), tl.load(norms + 3), scale)
    return tl.maximum(target - draft, 0.0), target


@triton.jit
def _masses(
    q: tl.tensor, p: tl.tensor, scales: tl.tensor, lengths: tl.tensor, accepted: tl.tensor, norms: tl.tensor,
    masses: tl.tensor, tops: tl.tensor, V: tl.tensor, tiles: tl.tensor, K: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    n = tl.load(accepted + row)
    scale = tl.load(scales + row)
    offsets = tile * BLOCK + tl.arange(0, BLOCK)
    p += (row * (K + 1) + n) * V
    out = masses + row * 2 * tiles + tile
    if n < tl.load(lengths + row):
        residual, target = _tile_of_laws(q + (row * K + n) * V, p, norms + row * 4, offsets, V, scale)
        tl.store(out, tl.sum(residual, 0))
        tl.store(out + tiles, tl.sum(target, 0))
        tl.store(tops + row * tiles + tile, 0.0)
    else:
        x = load(p, offsets, V)
        top = tl.maximum(tl.max(x, 0), -1.0e30)
        total = tl.sum(tl.exp2((x - top) * scale), 0)
        tl.store(out, total)
        tl.store(out + tiles, total)
        tl.store(tops + row * tiles + tile, top)


@triton.jit
def _draw(
    q: tl.tensor, p: tl.tensor, u: tl.tensor, scales: tl.tensor, lengths: tl.tensor, accepted: tl.tensor,
    norms: tl.tensor, masses: tl.tensor, tops: tl.tensor, out: tl.tensor, V: tl.tensor, tiles: tl.tensor,
    K: tl.constexpr, TILE_LANES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(accepted + row)
    rejected = n < tl.load(lengths + row)
    scale = tl.load(scales + row)
    number = tl.load(u + row * (K + 2) + tl.where(rejected, K, K + 1)).to(tl.float32)
    lanes = tl.arange(0, TILE_LANES)
    own = tl.load(tops + row * tiles + lanes, mask=lanes < tiles, other=-1.0e30)
    top = tl.max(own, 0)
    factors = tl.exp2((own - top) * scale)  # all 1 after a rejection
    tile, before, threshold, use_target = pick_tile(masses + row * 2 * tiles, factors, number, tiles, TILE_LANES)
    inner = tl.arange(0, BLOCK)
    offsets = tile * BLOCK + inner
    p += (row * (K + 1) + n) * V
    if rejected:
        residual, target = _tile_of_laws(q + (row * K + n) * V, p, norms + row * 4, offsets, V, scale)
        mass = tl.where(use_target, target, residual)
    else:
        mass = tl.exp2((load(p, offsets, V) - top) * scale)
    token = tile * BLOCK + pick_lane(mass, before, threshold, inner, BLOCK)
    tl.store(out + row, token.to(tl.int64))


# ---- the public function


def default_splits(batch: int, drafts: int, tiles: int, device: torch.device) -> int:
    """Programs per row of step 1, or 1 (no step 1) where the requests alone fill the device twice."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return 1 if batch >= wanted else min(tiles, triton.cdiv(wanted, batch * drafts))


def launch(
    draft_tokens: Tensor,
    draft_logits: Tensor,
    target_logits: Tensor,
    uniforms: Tensor,
    temperature: float | Tensor = 1.0,
    lengths: Tensor | None = None,
    *,
    split: bool | None = None,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """``chain_verify_logits`` on a CUDA device (or in Triton's interpreter), with the same uniforms.

    Inputs that are not contiguous cost a copy. ``split`` and ``block`` choose the path and the tile, for tests and
    tuning; without ``split`` a request's rows are read one after another and not beyond its rejection.

    Raises:
        UserError: a shape that does not fit, a dtype other than fp32, bf16 and fp16.
    """
    lengths = check(draft_tokens, draft_logits, target_logits, uniforms, lengths)
    tokens, q, p, u = (x.contiguous() for x in (draft_tokens, draft_logits, target_logits, uniforms))
    (batch, drafts), V, device = tokens.shape, p.shape[-1], p.device
    block = block_of(V) if block is None else block
    tiles = triton.cdiv(V, block)
    splits = default_splits(max(batch, 1), drafts, tiles, device) if split is None else (min(tiles, 4) if split else 1)
    split = splits > 1 if split is None else split
    shares = triton.cdiv(tiles, splits)
    scales = LOG2E / torch.as_tensor(temperature, dtype=torch.float32, device=device).expand(batch).contiguous()
    accepted, token = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    sizes = [(batch, drafts, 4, splits), (batch, 4), (batch, 2, tiles), (batch, tiles)]
    partial, norms, masses, tops = (torch.empty(size, dtype=torch.float32, device=device) for size in sizes)
    tile = {"K": drafts, "BLOCK": block, "num_warps": min(8, max(1, block // 512))}
    if not batch:
        return accepted, token
    if split:
        _normalisers[(batch * drafts, splits)](q, p, scales, lengths, partial, V, splits, shares, **tile)
    _accept[(batch,)](
        tokens, q, p, u, scales, lengths, partial, accepted, norms, V, splits, tiles,
        SPLIT=split, LANES=triton.next_power_of_2(splits), **tile,
    )  # fmt: skip
    _masses[(batch, tiles)](q, p, scales, lengths, accepted, norms, masses, tops, V, tiles, **tile)
    _draw[(batch,)](
        q, p, u, scales, lengths, accepted, norms, masses, tops, token, V, tiles,
        TILE_LANES=triton.next_power_of_2(tiles), **tile,
    )  # fmt: skip
    return accepted, token
