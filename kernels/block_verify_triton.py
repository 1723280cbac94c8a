# mypy: disable-error-code="untyped-decorator"
"""Block verification of probabilities in Triton: two launches, V split over programs at every batch size.

1. ``_masses``, one program per (request, prefix, tile): computes the prefix weights from K gathers side by side, then
   its tile's mass of the prefix's residual. Each program repeats the gathers, which is cheaper than another launch. A
   prefix that cannot be the accepted one is not read: h_i is at most w_i, so u_i >= w_i rules it out. w_i = 1 accepts a
   prefix, and so rules out those before it. Where the last prefix is accepted (h_K = w_K needs no row), only the bonus
   row is read.
2. ``_draw``, one program per request: computes the thresholds from these masses and finds the largest prefix that
   qualifies. It then inverts the CDF over the tile masses, and inside the one tile that it hits.

Weights and masses are fp32, as in the reference; tests compare in fp64. A drawn token always has mass.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bebop.kernels.verify_triton import block_of, check, pick_lane, pick_tile

SLACK = tl.constexpr(1.0 + 1e-5)  # rounding of h_i over w_i


@triton.jit
def _prefix_weights(
    tokens: tl.tensor, q: tl.tensor, p: tl.tensor, length: tl.tensor, V: tl.tensor, K: tl.constexpr,
    LANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the prefix weights w_0..w_length in lanes 0..length."""
    lanes = tl.arange(0, LANES)
    used = lanes < length
    entry = lanes.to(tl.int64) * V + tl.load(tokens + lanes, mask=used, other=0)
    p_at = tl.load(p + entry, mask=used, other=0.0).to(tl.float32)
    q_at = tl.load(q + entry, mask=used, other=0.0).to(tl.float32)
    weight = tl.full((), 1.0, tl.float32)
    weights = tl.where(lanes == 0, 1.0, 0.0)
    for i in tl.static_range(K):
        target, draft = _at(p_at, i, LANES), _at(q_at, i, LANES)
        scaled = weight * target
        # w p / q only where it is below 1: no division by a q of 0; p = 0 is never accepted, whatever was before it.
        weight = tl.where(scaled < draft, tl.div_rn(scaled, tl.where(scaled < draft, draft, 1.0)), 1.0)
        weight = tl.where(target > 0, weight, 0.0)
        weights = tl.where(lanes == i + 1, weight, weights)
    return weights


@triton.jit
def _at(numbers: tl.tensor, lane: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Return the number in one lane of [LANES] numbers."""
    return tl.sum(tl.where(tl.arange(0, LANES) == lane, numbers, 0.0), 0)


@triton.jit
def _tile_of_distributions(
    q: tl.tensor, p: tl.tensor, offsets: tl.tensor, V: tl.tensor, weight: tl.tensor, rejected: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return one tile of max(0, w p - q) and of p; without a rejection the first is p itself, and q is not read."""
    inside = offsets < V
    target = tl.load(p + offsets, mask=inside, other=0.0).to(tl.float32)
    draft = tl.load(q + offsets, mask=inside & rejected, other=0.0).to(tl.float32)
    return tl.where(rejected, tl.maximum(weight * target - draft, 0.0), target), target


@triton.jit
def _masses(
    tokens: tl.tensor, q: tl.tensor, p: tl.tensor, u: tl.tensor, lengths: tl.tensor, masses: tl.tensor, V: tl.tensor,
    tiles: tl.tensor, K: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write masses [B, K + 1, 2, tiles]: residual and target after every prefix that may be accepted, else 0."""
    row = (tl.program_id(0) // (K + 1)).to(tl.int64)
    n = tl.program_id(0) % (K + 1)
    tile = tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    q += row * K * V
    p += row * (K + 1) * V
    u += row * (K + 2)
    weights = _prefix_weights(tokens + row * K, q, p, length, V, K, LANES)
    weight = _at(weights, n, LANES)
    full = (length == 0) | (tl.load(u + tl.maximum(length - 1, 0)) < _at(weights, length, LANES))
    lanes = tl.arange(0, LANES)
    sure = tl.max(tl.where((weights >= 1.0) & (lanes < length), lanes, 0), 0)  # h = 1 there
    possible = (n == sure) | ((n > sure) & (tl.load(u + tl.maximum(n - 1, 0)) < weight * SLACK))
    residual_mass, target_mass = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if (full & (n == length)) | ((full == 0) & possible & (n < length)):
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        start = n.to(tl.int64) * V
        residual, target = _tile_of_distributions(q + start, p + start, offsets, V, weight, n < length)
        residual_mass, target_mass = tl.sum(residual, 0), tl.sum(target, 0)
    out = masses + (row * (K + 1) + n) * 2 * tiles + tile
    tl.store(out, residual_mass)
    tl.store(out + tiles, target_mass)


@triton.jit
def _draw(
    tokens: tl.tensor, q: tl.tensor, p: tl.tensor, u: tl.tensor, lengths: tl.tensor, masses: tl.tensor,
    accepted: tl.tensor, out: tl.tensor, V: tl.tensor, tiles: tl.tensor, K: tl.constexpr, LANES: tl.constexpr,
    TILE_LANES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    q += row * K * V
    p += row * (K + 1) * V
    u += row * (K + 2)
    masses += row * (K + 1) * 2 * tiles
    weights = _prefix_weights(tokens + row * K, q, p, length, V, K, LANES)
    at = tl.arange(0, TILE_LANES)
    n = tl.full((), 0, tl.int32)
    for i in tl.static_range(1, K + 1):
        weight = _at(weights, i, LANES)
        mass = tl.sum(tl.load(masses + 2 * i * tiles + at, mask=at < tiles, other=0.0), 0)
        # Neither mass nor a deficit: w = 1 and the next distributions agree. Any value would do; 1 keeps 0 / 0 out.
        early = tl.where(weight < 1, tl.div_rn(mass, tl.where(weight < 1, mass + 1 - weight, 1.0)), 1.0)
        threshold = tl.where(i == length, weight, early)
        n = tl.where((i <= length) & (tl.load(u + i - 1) < threshold), i, n)
    rejected = n < length
    number = tl.load(u + tl.where(rejected, K, K + 1)).to(tl.float32)
    tile, before, threshold, use_target = pick_tile(masses + 2 * n * tiles, 1.0, number, tiles, TILE_LANES)
    lanes = tl.arange(0, BLOCK)
    start = n.to(tl.int64) * V
    distributions = _tile_of_distributions(
        q + start, p + start, tile * BLOCK + lanes, V, _at(weights, n, LANES), rejected
    )
    token = tile * BLOCK + pick_lane(
        tl.where(use_target, distributions[1], distributions[0]), before, threshold, lanes, BLOCK
    )
    tl.store(accepted + row, n.to(tl.int64))
    tl.store(out + row, token.to(tl.int64))


# ---- the public function


def launch(
    draft_tokens: Tensor,
    draft_probs: Tensor,
    target_probs: Tensor,
    uniforms: Tensor,
    lengths: Tensor | None = None,
    *,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch ``block_verify`` on a CUDA device (or in Triton's interpreter), with the same uniforms.

    Inputs that are not contiguous cost a copy; beyond its results it allocates 2 (K + 1) fp32 numbers per request and
    tile. Masses are summed tile by tile, so a uniform within rounding (1e-7) of a threshold or of a boundary between
    two tokens may fall to the other side than in the reference.

    Raises:
        UserError: a shape that does not fit, or a dtype other than fp32, bf16 and fp16.
    """
    lengths = check(draft_tokens, draft_probs, target_probs, uniforms, lengths)
    tokens, q, p, u = (x.contiguous() for x in (draft_tokens, draft_probs, target_probs, uniforms))
    (batch, drafts), V = tokens.shape, p.shape[-1]
    block = block_of(V) if block is None else block
    tiles = triton.cdiv(V, block)
    accepted, token = (torch.empty(batch, dtype=torch.int64, device=p.device) for _ in range(2))
    masses = torch.empty(batch, drafts + 1, 2, tiles, dtype=torch.float32, device=p.device)
    options = {"K": drafts, "LANES": triton.next_power_of_2(drafts + 1), "BLOCK": block}
    warps = min(8, max(1, block // 512))
    if batch:
        grid = (batch * (drafts + 1), tiles)
        _masses[grid](tokens, q, p, u, lengths, masses, V, tiles, num_warps=warps, **options)
        _draw[(batch,)](
            tokens, q, p, u, lengths, masses, accepted, token, V, tiles,
            TILE_LANES=triton.next_power_of_2(tiles), num_warps=warps, **options,
        )  # fmt: skip
    return accepted, token
