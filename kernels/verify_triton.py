# mypy: disable-error-code="untyped-decorator"
"""Chain verification of probabilities in Triton: two launches, V split over programs at every batch size.

1. ``_masses``, one program per (request, tile): finds the rejection, then sums its tile of the one row that the next
   token comes from: max(0, p - q) after a rejection, p after a full chain. Each program of a request repeats the K
   gathers that find the rejection, because that is cheaper than another launch.
2. ``_draw``, one program per request: inverts the CDF over the tile masses, then inside the one tile that it hits.

Memory traffic: the row of p, that of q after a rejection only, and one more tile; nothing of the other rows but the
drafts' own entries. Tests are in fp64 (exact for fp32 inputs), masses in fp32. A drawn token always has mass: a token
qualifies only if its own mass is positive, and where rounding leaves none, the last positive one is used.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bebop.errors import UserError

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 4096  # V = 151,936 gives 38 programs per request, enough for a device at batch 4


@triton.jit
def accepted_drafts(
    tokens: tl.tensor, q: tl.tensor, p: tl.tensor, u: tl.tensor, length: tl.tensor, V: tl.tensor,
    LANES: tl.constexpr, ONE_HOT: tl.constexpr = False,
) -> tl.tensor:  # fmt: skip
    """Return the number of drafts of one request before the first that fails the strict test u * q < p.

    It is ``length`` if none fails.
    """
    steps = tl.arange(0, LANES)
    used = steps < length
    entry = steps.to(tl.int64) * V + tl.load(tokens + steps, mask=used, other=0)
    p_at = tl.load(p + entry, mask=used, other=0.0).to(tl.float64)
    if ONE_HOT:
        q_at = tl.full((LANES,), 1.0, tl.float64)
    else:
        q_at = tl.load(q + entry, mask=used, other=0.0).to(tl.float64)
    number = tl.load(u + steps, mask=used, other=0.0).to(tl.float64)
    passed = number * q_at < p_at
    return tl.min(tl.where(used & (passed == 0), steps, length), 0)


@triton.jit
def tile_of_distributions(
    q: tl.tensor, p: tl.tensor, offsets: tl.tensor, V: tl.tensor, rejected: tl.tensor
) -> tl.tensor:
    """Return one tile of the residual and of p; without a rejection the residual is p itself, and q is not read."""
    inside = offsets < V
    target = tl.load(p + offsets, mask=inside, other=0.0).to(tl.float32)
    draft = tl.load(q + offsets, mask=inside & rejected, other=0.0).to(tl.float32)
    return tl.maximum(target - draft, 0.0), target


@triton.jit
def tile_without(token: tl.tensor, p: tl.tensor, offsets: tl.tensor, V: tl.tensor) -> tl.tensor:
    """Return one tile of the residual of a one-hot draft, which is p without ``token``, and one of p.

    A ``token`` of -1 means that nothing was rejected.
    """
    target = tl.load(p + offsets, mask=offsets < V, other=0.0).to(tl.float32)
    return tl.where(offsets == token, 0.0, target), target


@triton.jit
def pick_lane(
    mass: tl.tensor, before: tl.tensor, threshold: tl.tensor, lanes: tl.tensor, LANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the first lane of positive mass whose running sum exceeds ``threshold``.

    If there is none, return the last lane of positive mass; without any mass, return 0.
    """
    hit = (before + tl.cumsum(mass, 0) > threshold) & (mass > 0)
    first = tl.min(tl.where(hit, lanes, LANES), 0)
    last = tl.max(tl.where(mass > 0, lanes, 0), 0)
    return tl.where(first < LANES, first, last)


@triton.jit
def pick_tile(
    masses: tl.tensor, factors: tl.tensor, number: tl.tensor, tiles: tl.tensor, LANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Pick a tile from masses [2, tiles] of residual and target.

    Return the tile, the mass before it, the threshold, and whether the target is used. Masses are in units of
    ``factors`` (a number, or one per tile). A residual without mass means p = q up to rounding, and then p is the
    distribution.
    """
    lanes = tl.arange(0, LANES)
    residual = tl.load(masses + lanes, mask=lanes < tiles, other=0.0) * factors
    target = tl.load(masses + tiles + lanes, mask=lanes < tiles, other=0.0) * factors
    use_target = tl.sum(residual, 0) <= 0
    mass = tl.where(use_target, target, residual)
    threshold = number * tl.sum(mass, 0)
    tile = pick_lane(mass, 0.0, threshold, lanes, LANES)
    return tile, tl.sum(tl.where(lanes < tile, mass, 0.0), 0), threshold, use_target


@triton.jit
def _masses(
    tokens: tl.tensor, q: tl.tensor, p: tl.tensor, u: tl.tensor, lengths: tl.tensor, accepted: tl.tensor,
    masses: tl.tensor, V: tl.tensor, tiles: tl.tensor, K: tl.constexpr, LANES: tl.constexpr, BLOCK: tl.constexpr,
    ONE_HOT: tl.constexpr = False,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    q += row * K * V
    p += row * (K + 1) * V
    n = accepted_drafts(tokens + row * K, q, p, u + row * (K + 2), length, V, LANES, ONE_HOT)
    start = n.to(tl.int64) * V
    offsets = tile * BLOCK + tl.arange(0, BLOCK)
    if ONE_HOT:
        token = tl.load(tokens + row * K + n, mask=n < length, other=-1)
        residual, target = tile_without(token, p + start, offsets, V)
    else:
        residual, target = tile_of_distributions(q + start, p + start, offsets, V, n < length)
    tl.store(masses + row * 2 * tiles + tile, tl.sum(residual, 0))
    tl.store(masses + (row * 2 + 1) * tiles + tile, tl.sum(target, 0))
    if tile == 0:
        tl.store(accepted + row, n.to(tl.int64))


@triton.jit
def _draw(
    tokens: tl.tensor, q: tl.tensor, p: tl.tensor, u: tl.tensor, lengths: tl.tensor, accepted: tl.tensor,
    masses: tl.tensor, out: tl.tensor, V: tl.tensor, tiles: tl.tensor, K: tl.constexpr, TILE_LANES: tl.constexpr,
    BLOCK: tl.constexpr, ONE_HOT: tl.constexpr = False,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    n = tl.load(accepted + row)
    rejected = n < tl.load(lengths + row)
    number = tl.load(u + row * (K + 2) + tl.where(rejected, K, K + 1)).to(tl.float32)
    tile, before, threshold, use_target = pick_tile(masses + row * 2 * tiles, 1.0, number, tiles, TILE_LANES)
    lanes = tl.arange(0, BLOCK)
    p += (row * (K + 1) + n) * V
    if ONE_HOT:
        drafted = tl.load(tokens + row * K + n, mask=rejected, other=-1)
        residual, target = tile_without(drafted, p, tile * BLOCK + lanes, V)
    else:
        residual, target = tile_of_distributions(q + (row * K + n) * V, p, tile * BLOCK + lanes, V, rejected)
    token = tile * BLOCK + pick_lane(tl.where(use_target, target, residual), before, threshold, lanes, BLOCK)
    tl.store(out + row, token.to(tl.int64))


# ---- the public function


def block_of(vocabulary: int, widest: int = BLOCK) -> int:
    """Return the width of a tile: a power of two, no wider than the vocabulary needs."""
    return min(widest, max(128, triton.next_power_of_2(vocabulary)))


def check(
    draft_tokens: Tensor, draft: Tensor | None, target: Tensor, uniforms: Tensor, lengths: Tensor | None
) -> Tensor:
    """Return ``lengths``, K for all if None; raise ``UserError`` unless shapes and dtypes of the chain fit."""
    batch, drafts = draft_tokens.shape
    vocabulary = target.shape[-1]
    for name, tensor, shape in (
        ("draft", draft, (batch, drafts, vocabulary)),
        ("target", target, (batch, drafts + 1, vocabulary)),
        ("uniforms", uniforms, (batch, drafts + 2)),
    ):
        if tensor is not None and (tuple(tensor.shape) != shape or drafts < 1):
            allowed = f"for {drafts} drafts (at least 1) it is {list(shape)}"
            raise UserError(f"chain verification got {name} of shape {list(tensor.shape)}; {allowed}")
    for tensor in (draft, target):
        if tensor is not None and tensor.dtype not in DTYPES:
            raise UserError(f"chain verification in Triton takes fp32, bf16 or fp16, not {tensor.dtype}")
    if lengths is None:
        return torch.full((batch,), drafts, dtype=torch.int64, device=draft_tokens.device)
    return lengths.contiguous()


def launch(
    draft_tokens: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    uniforms: Tensor,
    lengths: Tensor | None = None,
    *,
    block: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch ``chain_verify`` on a CUDA device (or in Triton's interpreter), with the same uniforms.

    Inputs that are not contiguous cost a copy; beyond its results it allocates two fp32 numbers per request and tile.
    The mass of a distribution is summed in fp32 tile by tile, so a uniform within rounding (1e-7 of the mass) of a
    boundary between two tokens may fall to the other side than in the reference.

    Raises:
        UserError: a shape that does not fit, or a dtype other than fp32, bf16 and fp16.
    """
    lengths = check(draft_tokens, draft_probs, target_probs, uniforms, lengths)
    one_hot = draft_probs is None
    given = (draft_tokens, target_probs if draft_probs is None else draft_probs, target_probs, uniforms)
    tokens, q, p, u = (x.contiguous() for x in given)  # a one-hot q is never read
    (batch, drafts), V = tokens.shape, p.shape[-1]
    block = block_of(V) if block is None else block
    tiles = triton.cdiv(V, block)
    accepted, token = (torch.empty(batch, dtype=torch.int64, device=p.device) for _ in range(2))
    masses = torch.empty(batch, 2, tiles, dtype=torch.float32, device=p.device)
    if batch:
        warps = min(8, max(1, block // 512))
        _masses[(batch, tiles)](
            tokens, q, p, u, lengths, accepted, masses, V, tiles,
            K=drafts, LANES=triton.next_power_of_2(drafts), BLOCK=block, ONE_HOT=one_hot, num_warps=warps,
        )  # fmt: skip
        _draw[(batch,)](
            tokens, q, p, u, lengths, accepted, masses, token, V, tiles,
            K=drafts, TILE_LANES=triton.next_power_of_2(tiles), BLOCK=block, ONE_HOT=one_hot, num_warps=warps,
        )  # fmt: skip
    return accepted, token
