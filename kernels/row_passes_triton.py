# mypy: disable-error-code="untyped-decorator"
"""The three passes over a row of draft and target logits that all draft losses in Triton share.

Numbers are fp32 throughout. Exponents are ``(x - max) * scale`` with scale = log2(e) / temperature. The difference is
rounded relative to itself, and no compiler can contract it in one pass and not in another. So ``q <= p`` decides alike
in passes 2 and 3, and a row of the gradient sums to 0. Maxima start at -1e30, which makes masked tiles harmless.

The entropies come out of pass 1, which carries the sum of e^a a beside that of e^a for exponents a. TV alone compares
logarithms and not probabilities (``log_pair``): passes 2 and 3 then need one exponential per token, not two. For sm_90
that is 52 instructions and 4.25 exponentials per token in all three passes; with entropies in pass 2 and two
exponentials in each it was 63 and 6.25.
"""

import triton
import triton.language as tl

from bebop.kernels.draft_losses_triton import LN2


@triton.jit
def load(row: tl.tensor, offsets: tl.tensor, V: tl.tensor) -> tl.tensor:
    """Return a tile of logits in fp32; lanes beyond the row are -inf and so have no mass."""
    return tl.load(row + offsets, mask=offsets < V, other=-float("inf")).to(tl.float32)


@triton.jit
def tile_offsets(tile: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the columns of a tile as [BLOCK / 8, 8]: 8 neighbours per thread, one vector load in 16 bits.

    Sums over the second axis stay inside of a thread, so a pass waits for other threads once, not at every tile.
    """
    lanes = tl.arange(0, BLOCK // 8)[:, None] * 8
    return tile * BLOCK + lanes + tl.arange(0, 8)[None, :]


@triton.jit
def exponent_of(x: tl.tensor, top: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return the binary exponent of ``x`` below the maximum ``top``, at least -1000.

    2 to the power of -1000 is 0, and 0 times -1000 is 0, while 0 times -inf is not. A NaN stays NaN.
    """
    return tl.maximum((x - top) * scale, -1000.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def absorb(x: tl.tensor, top: tl.tensor, total: tl.tensor, moment: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Update each lane's maximum, sum of exponentials and sum of those times exponents by one more tile [lanes, 8].

    With a shift c of all exponents the second sum becomes 2^c (moment + c total).
    """
    raised = tl.maximum(top, tl.max(x, 1))
    shift = exponent_of(top, raised, scale)
    factor = tl.exp2(shift)
    a = exponent_of(x, raised[:, None], scale)
    e = tl.exp2(a)
    return raised, factor * total + tl.sum(e, 1), factor * (moment + shift * total) + tl.sum(e * a, 1)


@triton.jit
def merge(tops: tl.tensor, totals: tl.tensor, moments: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Return one maximum and both sums for a whole row, merged from those of its parts [parts]."""
    top = tl.max(tops, 0)
    shift = exponent_of(tops, top, scale)
    factor = tl.exp2(shift)
    return top, tl.sum(factor * totals, 0), tl.sum(factor * (moments + shift * totals), 0)


@triton.jit
def entropy(total: tl.tensor, moment: tl.tensor) -> tl.tensor:
    """Return the entropy in nats, from the sum of exponentials 2^a and the sum of 2^a a."""
    return (tl.log2(total) - moment / total) * LN2


@triton.jit
def normalise(
    draft: tl.tensor, target: tl.tensor, first: tl.tensor, tiles: tl.tensor, V: tl.tensor, scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Run pass 1 over ``tiles`` tiles from tile ``first``.

    Return the maximum, the sum of exponentials and their moment for the draft's row, then for the target's.
    """
    q_tops = tl.full((BLOCK // 8,), -1.0e30, tl.float32)
    p_tops = tl.full((BLOCK // 8,), -1.0e30, tl.float32)
    q_sums = tl.zeros((BLOCK // 8,), tl.float32)
    p_sums = tl.zeros((BLOCK // 8,), tl.float32)
    q_moments = tl.zeros((BLOCK // 8,), tl.float32)
    p_moments = tl.zeros((BLOCK // 8,), tl.float32)
    for i in range(0, tiles):
        offsets = tile_offsets(first + i, BLOCK)
        q_tops, q_sums, q_moments = absorb(load(draft, offsets, V), q_tops, q_sums, q_moments, scale)
        p_tops, p_sums, p_moments = absorb(load(target, offsets, V), p_tops, p_sums, p_moments, scale)
    q_top, q_sum, q_moment = merge(q_tops, q_sums, q_moments, scale)
    p_top, p_sum, p_moment = merge(p_tops, p_sums, p_moments, scale)
    return q_top, q_sum, q_moment, p_top, p_sum, p_moment


@triton.jit
def distribution(
    row: tl.tensor, offsets: tl.tensor, V: tl.tensor, top: tl.tensor, total: tl.tensor, scale: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return a tile of probabilities and one of their binary logarithms, rounded alike in every pass."""
    exponent = (load(row, offsets, V) - top) * scale
    return tl.exp2(exponent) * (1.0 / total), exponent - tl.log2(total)  # one division per row, not per token


@triton.jit
def log_pair(
    draft: tl.tensor, target: tl.tensor, offsets: tl.tensor, V: tl.tensor, scale: tl.tensor, q_top: tl.tensor,
    p_top: tl.tensor, ratio: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return binary logarithms of a tile of q and p, both times the draft's sum of exponentials.

    ``ratio`` is the result of ``log_ratio``. Sums are divided by that sum of exponentials once a row. The
    multiplication and the addition are fused explicitly, so that a compiler cannot round them differently in another
    pass. Equal rows are equal here, to the bit.
    """
    a_q = (load(draft, offsets, V) - q_top) * scale
    return a_q, tl.fma(load(target, offsets, V) - p_top, scale, ratio)


@triton.jit
def log_ratio(q_sum: tl.tensor, p_sum: tl.tensor) -> tl.tensor:
    """Return the binary logarithm of the draft's sum of exponentials over the target's; 0 where they are equal."""
    return tl.log2(q_sum) - tl.log2(p_sum)


@triton.jit
def overlaps(
    draft: tl.tensor, target: tl.tensor, first: tl.tensor, tiles: tl.tensor, V: tl.tensor, scale: tl.tensor,
    q_top: tl.tensor, q_sum: tl.tensor, p_top: tl.tensor, p_sum: tl.tensor, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Run pass 2 of losses without a divergence, backwards; return overlap and S, by one exponential per token."""
    ratio = log_ratio(q_sum, p_sum)
    overlap = tl.zeros((BLOCK // 8,), tl.float32)
    below = tl.zeros((BLOCK // 8,), tl.float32)
    for i in range(0, tiles):
        offsets = tile_offsets(first + tiles - 1 - i, BLOCK)
        a_q, a_p = log_pair(draft, target, offsets, V, scale, q_top, p_top, ratio)
        shared = tl.exp2(tl.minimum(a_q, a_p))
        overlap += tl.sum(shared, 1)
        below += tl.sum(tl.where(a_q <= a_p, shared, 0.0), 1)
    return tl.sum(overlap, 0) / q_sum, tl.sum(below, 0) / q_sum


@triton.jit
def sums(
    draft: tl.tensor, target: tl.tensor, out: tl.tensor, label: tl.tensor, first: tl.tensor, tiles: tl.tensor,
    V: tl.tensor, scale: tl.tensor, slope: tl.tensor, q_top: tl.tensor, q_sum: tl.tensor, p_top: tl.tensor,
    p_sum: tl.tensor, TERMS: tl.constexpr, SECOND: tl.constexpr, GRADIENT: tl.constexpr, WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Run pass 2, backwards; return overlap, S and the two sums of the divergence in nats.

    With WRITE it also writes the gradient, for kinds whose gradient needs no sums.
    """
    if TERMS is None and SECOND is None and not WRITE:
        overlap, below = overlaps(draft, target, first, tiles, V, scale, q_top, q_sum, p_top, p_sum, BLOCK)
        return overlap, below, 0.0, 0.0
    else:
        overlap = tl.zeros((BLOCK // 8,), tl.float32)
        below = tl.zeros((BLOCK // 8,), tl.float32)
        divergence = tl.zeros((BLOCK // 8,), tl.float32)
        second = tl.zeros((BLOCK // 8,), tl.float32)
        for i in range(0, tiles):
            offsets = tile_offsets(first + tiles - 1 - i, BLOCK)
            q, q_log = distribution(draft, offsets, V, q_top, q_sum, scale)
            p, p_log = distribution(target, offsets, V, p_top, p_sum, scale)
            overlap += tl.sum(tl.minimum(q, p, propagate_nan=tl.PropagateNan.ALL), 1)
            below += tl.sum(tl.where(q <= p, q, 0.0), 1)
            if TERMS is not None:
                divergence += tl.sum(TERMS(q, q_log, p, p_log), 1)
            if SECOND is not None:
                second += tl.sum(SECOND(q, q_log, p, p_log), 1)
            if WRITE:
                grad = GRADIENT(q, q_log, p, p_log, offsets == label, 0.0, 0.0)
                tl.store(out + offsets, (grad * slope).to(out.dtype.element_ty), mask=offsets < V)
        return tl.sum(overlap, 0), tl.sum(below, 0), tl.sum(divergence, 0) * LN2, tl.sum(second, 0) * LN2


@triton.jit
def write_tv_gradient(
    draft: tl.tensor, target: tl.tensor, out: tl.tensor, first: tl.tensor, tiles: tl.tensor, V: tl.tensor,
    scale: tl.tensor, slope: tl.tensor, q_top: tl.tensor, q_sum: tl.tensor, p_top: tl.tensor, p_sum: tl.tensor,
    below: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Run pass 3 of losses without a divergence: write ``slope`` q (S - 1[q <= p]), by one exponential per token."""
    ratio = log_ratio(q_sum, p_sum)
    elsewhere = below * (slope / q_sum)
    common = (below - 1.0) * (slope / q_sum)
    for i in range(0, tiles):
        offsets = tile_offsets(first + i, BLOCK)
        a_q, a_p = log_pair(draft, target, offsets, V, scale, q_top, p_top, ratio)
        grad = tl.exp2(a_q) * tl.where(a_q <= a_p, common, elsewhere)
        tl.store(out + offsets, grad.to(out.dtype.element_ty), mask=offsets < V)


@triton.jit
def write_gradient(
    draft: tl.tensor, target: tl.tensor, out: tl.tensor, label: tl.tensor, first: tl.tensor, tiles: tl.tensor,
    V: tl.tensor, scale: tl.tensor, slope: tl.tensor, eta: tl.tensor, q_top: tl.tensor, q_sum: tl.tensor,
    p_top: tl.tensor, p_sum: tl.tensor, overlap: tl.tensor, below: tl.tensor, divergence: tl.tensor, second: tl.tensor,
    GRADIENT: tl.constexpr, TV: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Run pass 3: write d loss / d draft logits, times ``slope`` = 1 / temperature and the row's weight."""
    if OWN is None:
        slope *= TV(overlap, eta)
        write_tv_gradient(draft, target, out, first, tiles, V, scale, slope, q_top, q_sum, p_top, p_sum, below, BLOCK)
    else:
        for i in range(0, tiles):
            offsets = tile_offsets(first + i, BLOCK)
            q, q_log = distribution(draft, offsets, V, q_top, q_sum, scale)
            p, p_log = distribution(target, offsets, V, p_top, p_sum, scale)
            grad = OWN(overlap, eta) * GRADIENT(q, q_log, p, p_log, offsets == label, divergence, second)
            if TV is not None:
                grad += TV(overlap, eta) * (q * (below - tl.where(q <= p, 1.0, 0.0)))
            tl.store(out + offsets, (grad * slope).to(out.dtype.element_ty), mask=offsets < V)


@triton.jit
def lost(q_sum: tl.tensor, p_sum: tl.tensor) -> tl.tensor:
    """Return NaN where a side has no finite logit and so no distribution, else 0.

    It is added to a row's numbers and to ``slope``.
    """
    return tl.where((q_sum > 0) & (p_sum > 0), 0.0, float("nan"))


@triton.jit
def row_slope(
    slope: tl.tensor, weights: tl.tensor, row: tl.tensor, q_sum: tl.tensor, p_sum: tl.tensor, WEIGHTED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the factor of a row's gradient: ``slope``, times the row's weight if WEIGHTED; NaN for lost rows."""
    slope += lost(q_sum, p_sum)
    return slope * tl.load(weights + row) if WEIGHTED else slope


@triton.jit
def label_log(
    row: tl.tensor, label: tl.tensor, V: tl.tensor, top: tl.tensor, total: tl.tensor, scale: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Return the logarithm of the label's probability in nats.

    For a label outside of the vocabulary it reads nothing and returns NaN.
    """
    known = (label >= 0) & (label < V)
    logit = tl.load(row + label, mask=known, other=float("nan")).to(tl.float32)
    return ((logit - top) * scale - tl.log2(total)) * LN2


@triton.jit
def store_row(
    stats: tl.tensor, row: tl.tensor, rows: tl.tensor, draft: tl.tensor, target: tl.tensor, label: tl.tensor,
    V: tl.tensor, scale: tl.tensor, eta: tl.tensor, q_top: tl.tensor, q_sum: tl.tensor, q_moment: tl.tensor,
    p_top: tl.tensor, p_sum: tl.tensor, p_moment: tl.tensor, overlap: tl.tensor, divergence: tl.tensor,
    VALUE: tl.constexpr, LABELS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Store loss, alpha and the entropies of one row into stats [4, rows]; with LABELS log p[label] as the fifth."""
    void = lost(q_sum, p_sum)
    p_entropy = entropy(p_sum, p_moment)
    if LABELS:
        divergence = -label_log(draft, label, V, q_top, q_sum, scale)
        tl.store(stats + 4 * rows + row, label_log(target, label, V, p_top, p_sum, scale) + void)
    tl.store(stats + row, VALUE(overlap, divergence, p_entropy, eta) + void)
    tl.store(stats + rows + row, overlap + void)
    tl.store(stats + 2 * rows + row, entropy(q_sum, q_moment) + void)
    tl.store(stats + 3 * rows + row, p_entropy + void)
