# mypy: disable-error-code="untyped-decorator"
"""Draw and verify from logits in Triton, V split over programs at every batch size.

1. ``_tiles``, one program per (row, tile): the largest logit of the tile and its token, the sum of exponentials over
   it, and their first moment. This is the one pass over all logits of draft and target.
2. ``_finish``, one program per row: joins the tiles to normaliser, entropy and likeliest token. Where a uniform is
   given it also draws: a tile by the masses of tiles, then a token inside the one tile that is hit.
3. ``_compare``, one program per (draft, tile): overlap and mass of max(0, p - q). It does not read drafts after the
   first that fails. Without ``measure`` it reads only the draft that fails.
4. ``_verify``, one program per request: the tests, the tile and the token after the accepted drafts. A bonus token
   comes from the tiles of step 1. So does the residual of a one-hot draft, but for the tile that holds the draft.

Exponentials and sums of a tile are in fp32, and so are tests, against uniforms in fp64. CDFs over tiles and inside a
tile are in fp64. The place inside a tile is a fraction of the tile's own mass. So rounding of the sum of a tile changes
the probability of the tile alone, and rare tokens keep their relative precision.

The logits of K drafts are in K tensors and stay where the language-model head wrote them: kernels take a tuple.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.draw import LogitRows
from bebop.kernels.verify_triton import DTYPES, block_of

BLOCK = 4096  # V = 151,936 gives 38 programs per row
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
WIDEST = 1 << 24  # tokens: their numbers are stored beside sums, in fp32


@triton.jit
def _scale(temperatures: tl.tensor, request: tl.tensor, TEMPERED: tl.constexpr) -> tl.tensor:
    """Return log2(e) / temperature of a request; 0 where it is greedy."""
    scale = tl.full((), LOG2E, tl.float32)
    if TEMPERED:
        temperature = tl.load(temperatures + request).to(tl.float32)
        greedy = temperature == 0
        scale = tl.where(greedy, 0.0, tl.div_rn(scale, tl.where(greedy, 1.0, temperature)))
    return scale


@triton.jit
def _exponents(logits: tl.tensor, scale: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Return logit * scale - top; -inf in a greedy row and where the logit is -inf."""
    usable = tl.where(scale == 0, -float("inf"), logits)
    absent = usable == -float("inf")
    return tl.where(absent, -float("inf"), tl.where(absent, 0.0, usable) * scale - top)


@triton.jit
def _tiles(
    logits: tl.tensor, temperatures: tl.tensor, sums: tl.tensor, V: tl.tensor, tiles: tl.tensor, PLACES: tl.constexpr,
    TEMPERED: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write sums [N, 4, tiles] of each row, with N = B * PLACES.

    The four are the largest logit, sum of 2^(a - top), sum of 2^(a - top) (a - top), and the token of the largest
    logit. Here a = logit * scale, and top is that of the largest logit.
    """
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    scale = _scale(temperatures, row // PLACES, TEMPERED)
    lanes = tile * BLOCK + tl.arange(0, BLOCK)
    numbers = tl.load(logits + row * V + lanes, mask=lanes < V, other=-float("inf")).to(tl.float32)
    largest = tl.max(numbers, 0)
    token = tl.min(tl.where(numbers == largest, lanes, V - 1), 0)
    # A tile of -inf alone has no mass, and -inf - -inf is no number.
    top = tl.where(largest == -float("inf"), 0.0, largest * scale)
    below = _exponents(numbers, scale, top)
    mass = tl.exp2(below)
    out = sums + row * 4 * tiles + tile
    tl.store(out, largest)
    tl.store(out + tiles, tl.sum(mass, 0))
    tl.store(out + 2 * tiles, tl.sum(mass * tl.where(mass > 0, below, 0.0), 0))
    tl.store(out + 3 * tiles, token.to(tl.float32))


@triton.jit
def _pick(mass: tl.tensor, number: tl.tensor, lanes: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Return a lane drawn by its mass, and the fraction of that lane's own mass that lies below the drawn place.

    The lane is the first whose running sum exceeds ``number`` (fp64, in [0, 1)) times the mass. Lanes without mass do
    not count. Where rounding leaves no lane, return the last one of positive mass; without any mass, lane 0.
    """
    running = tl.cumsum(mass.to(tl.float64), 0)
    place = number * tl.max(running, 0)
    first = tl.min(tl.where((running > place) & (mass > 0), lanes, LANES), 0)
    last = tl.max(tl.where(mass > 0, lanes, 0), 0)
    lane = tl.where(first < LANES, first, last)
    own = tl.sum(tl.where(lanes == lane, mass, 0.0), 0).to(tl.float64)
    before = tl.max(tl.where(lanes < lane, running, 0.0), 0)
    return lane, (place - before) / tl.where(own > 0, own, 1.0)


@triton.jit
def _masses(sums: tl.tensor, scale: tl.tensor, top: tl.tensor, tiles: tl.tensor, TILES: tl.constexpr) -> tl.tensor:
    """Return the masses [TILES] of a row's tiles, in units of 2^top; 0 in a greedy row, where they are not used."""
    at = tl.arange(0, TILES)
    largest = tl.load(sums + at, mask=at < tiles, other=-float("inf"))
    mass = tl.load(sums + tiles + at, mask=at < tiles, other=0.0)
    return mass * tl.exp2(_exponents(largest, scale, top))


@triton.jit
def _token_of(
    probs: tl.tensor, number: tl.tensor, tile: tl.tensor, lanes: tl.tensor, best: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the token drawn inside a tile, or ``best`` where rounding has left no mass in the tile."""
    lane, _ = _pick(probs, number, lanes, BLOCK)
    return tl.where(tl.max(probs, 0) > 0, tile * BLOCK + lane, best.to(tl.int32))


@triton.jit
def _drawn(
    logits: tl.tensor, sums: tl.tensor, scale: tl.tensor, top: tl.tensor, best: tl.tensor, number: tl.tensor,
    V: tl.tensor, tiles: tl.tensor, TILES: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return a token drawn from a row, given the sums of its tiles; only one tile of its logits is read."""
    mass = _masses(sums, scale, top, tiles, TILES)
    tile, inside = _pick(mass, number, tl.arange(0, TILES), TILES)
    lanes = tl.arange(0, BLOCK)
    offsets = tile * BLOCK + lanes
    numbers = tl.load(logits + offsets, mask=offsets < V, other=-float("inf")).to(tl.float32)
    drawn = _token_of(tl.exp2(_exponents(numbers, scale, top)), inside, tile, lanes, best, BLOCK)
    return tl.where(scale == 0, best, drawn.to(tl.int64))


@triton.jit
def _finish(
    logits: tl.tensor, temperatures: tl.tensor, sums: tl.tensor, u: tl.tensor, u_stride: tl.tensor, stats: tl.tensor,
    best: tl.tensor, tokens: tl.tensor, rows: tl.tensor, V: tl.tensor, tiles: tl.tensor, PLACES: tl.constexpr,
    TEMPERED: tl.constexpr, DRAW: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write stats [3, N] (scale, normaliser, entropy), the likeliest token [N] and, with DRAW, a drawn token [N]."""
    row = tl.program_id(0).to(tl.int64)
    sums += row * 4 * tiles
    scale = _scale(temperatures, row // PLACES, TEMPERED)
    at = tl.arange(0, TILES)
    largest = tl.load(sums + at, mask=at < tiles, other=-float("inf"))
    moment = tl.load(sums + 2 * tiles + at, mask=at < tiles, other=0.0)
    token = tl.load(sums + 3 * tiles + at, mask=at < tiles, other=V - 1.0)
    chosen = tl.max(largest, 0)
    likeliest = tl.min(tl.where(largest == chosen, token, V - 1.0), 0).to(tl.int64)
    top = tl.where(chosen == -float("inf"), 0.0, chosen * scale)  # 0 in a greedy row
    mass = _masses(sums, scale, top, tiles, TILES)
    total = tl.where(scale == 0, 1.0, tl.sum(mass, 0))
    below = tl.where(mass > 0, _exponents(largest, scale, top), 0.0)
    moments = tl.where(mass > 0, moment * tl.exp2(below) + mass * below, 0.0)
    entropy = (tl.log2(total) - tl.div_rn(tl.sum(moments, 0), total)) * LN2
    tl.store(stats + row, scale)
    tl.store(stats + rows + row, top + tl.log2(total))
    tl.store(stats + 2 * rows + row, entropy)
    tl.store(best + row, likeliest)
    if DRAW:
        number = tl.load(u + row * u_stride)
        drawn = _drawn(logits + row * V, sums, scale, top, likeliest, number, V, tiles, TILES, BLOCK)
        tl.store(tokens + row, drawn)


@triton.jit
def _draw(
    logits: tl.tensor, sums: tl.tensor, stats: tl.tensor, best: tl.tensor, u: tl.tensor, u_stride: tl.tensor,
    tokens: tl.tensor, rows: tl.tensor, V: tl.tensor, tiles: tl.tensor, TILES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write a drawn token [N] from the results of ``_finish``."""
    row = tl.program_id(0).to(tl.int64)
    scale, normaliser = tl.load(stats + row), tl.load(stats + rows + row)
    likeliest, number = tl.load(best + row), tl.load(u + row * u_stride)
    drawn = _drawn(
        logits + row * V, sums + row * 4 * tiles, scale, normaliser, likeliest, number, V, tiles, TILES, BLOCK
    )
    tl.store(tokens + row, drawn)


# ---- verification


@triton.jit
def _chosen(pointers: tl.tuple, place: tl.tensor, K: tl.constexpr) -> tl.tensor:
    """Return the pointer at index ``place`` of K pointers."""
    found = pointers[0]
    for i in tl.static_range(1, K):
        if place == i:
            found = pointers[i]
    return found


@triton.jit
def _exponent(
    logits: tl.tensor, stats: tl.tensor, best: tl.tensor, rows: tl.tensor, row: tl.tensor, token: tl.tensor,
    V: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return log2 of the probability of one token in a row."""
    scale = tl.load(stats + row)
    number = tl.load(logits + row * V + token).to(tl.float32)
    greedy = tl.where(tl.load(best + row) == token, 0.0, -float("inf"))
    return tl.where(scale == 0, greedy, _exponents(number, scale, tl.load(stats + rows + row)))


@triton.jit
def _tile_of(
    logits: tl.tensor, stats: tl.tensor, best: tl.tensor, rows: tl.tensor, row: tl.tensor, offsets: tl.tensor,
    V: tl.tensor, needed: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the probabilities of one tile of a row; all 0, without a read, unless the tile is ``needed``."""
    inside = (offsets < V) & needed
    scale = tl.load(stats + row)
    numbers = tl.load(logits + row * V + offsets, mask=inside, other=-float("inf")).to(tl.float32)
    greedy = tl.where(offsets == tl.load(best + row), 1.0, 0.0)
    sampled = tl.exp2(_exponents(numbers, scale, tl.load(stats + rows + row)))
    return tl.where(inside, tl.where(scale == 0, greedy, sampled), 0.0)


@triton.jit
def _accepted(
    tokens: tl.tensor, q: tl.tuple, q_stats: tl.tuple, q_best: tl.tuple, p: tl.tensor, p_stats: tl.tensor,
    p_best: tl.tensor,
    u: tl.tensor, length: tl.tensor, row: tl.tensor, batch: tl.tensor, V: tl.tensor, K: tl.constexpr,
    ONE_HOT: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the number of drafts of a request before the first that fails u < p / q; ``length`` if none fails.

    p = 0 is never below a uniform, and 0 / 0 compares as false.
    """
    n = length
    for i in tl.static_range(K - 1, -1, -1):  # backwards: the first that fails is the last to be written
        token = tl.load(tokens + row * K + i)
        ratio = _exponent(p, p_stats, p_best, batch * (K + 1), row * (K + 1) + i, token, V)
        if not ONE_HOT:
            ratio -= _exponent(q[i], q_stats[i], q_best[i], batch, row, token, V)
        passed = tl.load(u + row * (K + 2) + i) < tl.exp2(ratio).to(tl.float64)
        n = tl.where((i < length) & (passed == 0), i, n)
    return n


@triton.jit
def _compare(
    tokens: tl.tensor, q: tl.tuple, q_stats: tl.tuple, q_best: tl.tuple, p: tl.tensor, p_stats: tl.tensor,
    p_best: tl.tensor,
    u: tl.tensor, lengths: tl.tensor, masses: tl.tensor, batch: tl.tensor, V: tl.tensor, tiles: tl.tensor,
    K: tl.constexpr, MEASURE: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write masses [B, K, 2, tiles] of max(0, p - q) and of min(p, q) for each draft that is tested, else 0."""
    row = (tl.program_id(0) // K).to(tl.int64)
    place = tl.program_id(0) % K
    tile = tl.program_id(1)
    length = tl.load(lengths + row).to(tl.int32)
    n = _accepted(tokens, q, q_stats, q_best, p, p_stats, p_best, u, length, row, batch, V, K, False)
    needed = (place == n) & (place < length)
    if MEASURE:
        needed = (place <= n) & (place < length)
    residual, overlap = tl.full((), 0.0, tl.float32), tl.full((), 0.0, tl.float32)
    if needed:
        offsets = tile * BLOCK + tl.arange(0, BLOCK)
        target = _tile_of(p, p_stats, p_best, batch * (K + 1), row * (K + 1) + place, offsets, V, needed)
        draft = _tile_of(
            _chosen(q, place, K), _chosen(q_stats, place, K), _chosen(q_best, place, K), batch, row, offsets, V, needed
        )
        residual = tl.sum(tl.maximum(target - draft, 0.0), 0)
        overlap = tl.sum(tl.minimum(target, draft), 0)
    out = masses + (row * K + place) * 2 * tiles + tile
    tl.store(out, residual)
    tl.store(out + tiles, overlap)


@triton.jit
def _verify(
    tokens: tl.tensor, q: tl.tuple, q_stats: tl.tuple, q_best: tl.tuple, p: tl.tensor, p_stats: tl.tensor,
    p_best: tl.tensor,
    sums: tl.tensor, u: tl.tensor, lengths: tl.tensor, masses: tl.tensor, accepted: tl.tensor, out: tl.tensor,
    overlaps: tl.tensor, batch: tl.tensor, V: tl.tensor, tiles: tl.tensor, K: tl.constexpr, MEASURE: tl.constexpr,
    ONE_HOT: tl.constexpr, TILES: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + row).to(tl.int32)
    n = _accepted(tokens, q, q_stats, q_best, p, p_stats, p_best, u, length, row, batch, V, K, ONE_HOT)
    rejected = n < length
    draft_place = tl.minimum(n, K - 1)
    target_row = row * (K + 1) + n
    at, lanes = tl.arange(0, TILES), tl.arange(0, BLOCK)
    normaliser = tl.load(p_stats + batch * (K + 1) + target_row)
    target = _masses(sums + target_row * 4 * tiles, tl.load(p_stats + target_row), normaliser, tiles, TILES)
    if ONE_HOT:  # max(0, p - q) is p without the draft: the sums of the target, but for one tile
        token = tl.where(rejected, tl.load(tokens + row * K + draft_place), -1).to(tl.int32)
        home = tl.maximum(token, 0) // BLOCK
        offsets = home * BLOCK + lanes
        others = _tile_of(p, p_stats, p_best, batch * (K + 1), target_row, offsets, V, rejected)
        residual = tl.where(at == home, tl.sum(tl.where(offsets == token, 0.0, others), 0), target)
    else:
        residual = tl.load(masses + (row * K + draft_place) * 2 * tiles + at, mask=at < tiles, other=0.0)
    # A residual without mass means p = q up to rounding, where p itself is the distribution.
    use_residual = rejected & (tl.sum(residual, 0) > 0)
    number = tl.load(u + row * (K + 2) + tl.where(rejected, K, K + 1))
    tile, inside = _pick(tl.where(use_residual, residual, target), number, at, TILES)
    offsets = tile * BLOCK + lanes
    probs = _tile_of(p, p_stats, p_best, batch * (K + 1), target_row, offsets, V, True)
    if ONE_HOT:
        probs = tl.where(use_residual & (offsets == token), 0.0, probs)
    else:
        draft = _tile_of(
            _chosen(q, draft_place, K), _chosen(q_stats, draft_place, K), _chosen(q_best, draft_place, K), batch, row,
            offsets, V, use_residual,
        )  # fmt: skip
        probs = tl.maximum(probs - draft, 0.0)
    best = tl.load(p_best + target_row)
    drawn = _token_of(probs, inside, tile, lanes, best, BLOCK).to(tl.int64)
    # A greedy target has one token, whatever was drafted.
    tl.store(out + row, tl.where(tl.load(p_stats + target_row) == 0, best, drawn))
    tl.store(accepted + row, n.to(tl.int64))
    if MEASURE:
        for i in tl.static_range(K):
            common = tl.load(masses + ((row * K + i) * 2 + 1) * tiles + at, mask=at < tiles, other=0.0)
            tl.store(overlaps + row * K + i, tl.sum(common, 0))


# ---- the public functions


def normalise(
    logits: Tensor, temperature: Tensor | None, uniforms: Tensor | None = None, *, block: int | None = None
) -> tuple[LogitRows, Tensor | None]:
    """Launch ``draw.normalise`` of logits [B, n, V], and draw a token [B] each if uniforms [B] are given and n = 1.

    Logits that are not contiguous cost a copy. Beyond its results it allocates four fp32 numbers per row and tile.

    Raises:
        UserError: a dtype other than fp32, bf16 and fp16, or more than 2^24 tokens.
    """
    batch, places, V = logits.shape
    if logits.dtype not in DTYPES:
        raise UserError(f"drawing from logits in Triton takes fp32, bf16 or fp16, not {logits.dtype}")
    if V > WIDEST:
        raise UserError(f"drawing from logits in Triton takes a vocabulary of at most {WIDEST}, not {V}")
    logits = logits.contiguous()
    block = block_of(V, BLOCK) if block is None else block
    tiles, device = triton.cdiv(V, block), logits.device
    rows = LogitRows(
        logits=logits,
        stats=torch.empty(3, batch, places, device=device),
        best=torch.empty(batch, places, dtype=torch.int64, device=device),
        tiles=torch.empty(batch, places, 4, tiles, device=device),
        block=block,
    )
    draws = uniforms is not None
    tokens = torch.empty(batch if draws else 0, dtype=torch.int64, device=device)
    assert not draws or places == 1, "a token is drawn from one place"
    if batch:
        options = {"PLACES": places, "TEMPERED": temperature is not None, "BLOCK": block, "num_warps": _warps(block)}
        given = rows.stats if temperature is None else temperature.contiguous()
        _tiles[(batch * places, tiles)](logits, given, rows.tiles, V, tiles, **options)
        numbers = rows.stats if uniforms is None else uniforms
        _finish[(batch * places,)](
            logits, given, rows.tiles, numbers, numbers.stride(0), rows.stats, rows.best, tokens, batch * places, V,
            tiles, DRAW=draws, TILES=triton.next_power_of_2(tiles), **options,
        )  # fmt: skip
    return rows, tokens if draws else None


def draw_from(rows: LogitRows, uniforms: Tensor) -> Tensor:
    """Launch ``draw.draw_from`` on the tile sums of ``normalise``."""
    assert rows.tiles is not None
    batch, places, V = rows.logits.shape
    assert places == 1, "a token is drawn from one place"
    tiles = rows.tiles.shape[-1]
    tokens = torch.empty(batch, dtype=torch.int64, device=rows.logits.device)
    if batch:
        _draw[(batch,)](
            rows.logits, rows.tiles, rows.stats, rows.best, uniforms, uniforms.stride(0), tokens, batch, V, tiles,
            TILES=triton.next_power_of_2(tiles), BLOCK=rows.block, num_warps=_warps(rows.block),
        )  # fmt: skip
    return tokens


def verify(
    tokens: Tensor,
    drafts: Sequence[LogitRows] | None,
    target: LogitRows,
    uniforms: Tensor,
    lengths: Tensor | None = None,
    measure: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch ``draw.verify`` for K >= 1 drafts; it allocates two fp32 numbers per draft and tile.

    Raises:
        UserError: shapes that do not fit.
    """
    (batch, K), V = tokens.shape, target.logits.shape[-1]
    _check(tokens, drafts, target, uniforms)
    assert target.tiles is not None
    tiles, block, device = target.tiles.shape[-1], target.block, target.logits.device
    tokens, uniforms = tokens.contiguous(), uniforms.contiguous()
    lengths = torch.full_like(tokens[:, 0], K) if lengths is None else lengths.contiguous()
    accepted, token = (torch.empty(batch, dtype=torch.int64, device=device) for _ in range(2))
    one_hot = drafts is None
    measure = measure and not one_hot
    masses = torch.empty(0 if one_hot else batch, K, 2, tiles, device=device)
    overlaps = torch.empty(batch if measure else 0, K, device=device)
    q = [target] * K if drafts is None else drafts  # those of one-hot drafts are never read
    given = [tuple(part) for part in zip(*((row.logits, row.stats, row.best) for row in q), strict=True)]
    p = (target.logits, target.stats, target.best)
    options = {"K": K, "MEASURE": measure, "BLOCK": block, "num_warps": _warps(block)}
    if batch:
        if not one_hot:
            _compare[(batch * K, tiles)](tokens, *given, *p, uniforms, lengths, masses, batch, V, tiles, **options)
        _verify[(batch,)](
            tokens, *given, *p, target.tiles, uniforms, lengths, masses, accepted, token, overlaps, batch, V, tiles,
            ONE_HOT=one_hot, TILES=triton.next_power_of_2(tiles), **options,
        )  # fmt: skip
    return accepted, token, overlaps if measure else None


def _check(tokens: Tensor, drafts: Sequence[LogitRows] | None, target: LogitRows, uniforms: Tensor) -> None:
    """Raise ``UserError`` unless the shapes of drafts, target and uniforms fit."""
    (batch, K), V = tokens.shape, target.logits.shape[-1]
    shapes = [("target", target.logits, (batch, K + 1, V)), ("uniforms", uniforms, (batch, K + 2))]
    shapes += [("draft", draft.logits, (batch, 1, V)) for draft in drafts or ()]
    for name, tensor, shape in shapes:
        if tuple(tensor.shape) != shape:
            raise UserError(
                f"verification from logits got {name} of shape {list(tensor.shape)}; for {K} drafts it is {list(shape)}"
            )
    if drafts is not None and len(drafts) != K:
        raise UserError(f"verification from logits got the distributions of {len(drafts)} drafts for {K} tokens")


def _warps(block: int) -> int:
    return min(8, max(1, block // 512))
