# mypy: disable-error-code="untyped-decorator"
"""The three passes over a row of draft and target logits that every draft loss in Triton is made of.

Numbers: fp32 throughout. Exponents are ``(x - max) * scale`` with scale = log2(e) / temperature: the difference is
rounded relative to itself, and no compiler can contract it in one pass and not in another, so ``q <= p`` decides alike
in passes 2 and 3 and a row of the gradient sums to 0. Maxima start at -1e30, which makes masked tiles harmless.
"""

import triton
import triton.language as tl

from bebop.kernels.draft_losses_triton import LN2


@triton.jit
def load(row: tl.tensor, offsets: tl.tensor, V: tl.tensor) -> tl.tensor:
    """A tile of logits in fp32; what lies beyond the row has no mass."""
    return tl.load(row + offsets, mask=offsets < V, other=-float("inf")).to(tl.float32)


@triton.jit
def tile_offsets(tile: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Columns of a tile as [BLOCK / 8, 8]: 8 neighbours per thread, one vector load in 16 bits.

    Sums over the second axis stay inside of a thread, so a pass waits for other threads once, not at every tile.
    """
    lanes = tl.arange(0, BLOCK // 8)[:, None] * 8
    return tile * BLOCK + lanes + tl.arange(0, 8)[None, :]


@triton.jit
def absorb(x: tl.tensor, top: tl.tensor, total: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Running maxima and sums of exponentials per lane after one more tile [lanes, 8]."""
    raised = tl.maximum(top, tl.max(x, 1))
    kept = total * tl.exp2((top - raised) * scale)
    return raised, kept + tl.sum(tl.exp2((x - raised[:, None]) * scale), 1)


@triton.jit
def merge(tops: tl.tensor, totals: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """One maximum and sum of exponentials from those of parts [parts]."""
    top = tl.max(tops, 0)
    return top, tl.sum(totals * tl.exp2((tops - top) * scale), 0)


@triton.jit
def normalise(
    draft: tl.tensor, target: tl.tensor, first: tl.tensor, tiles: tl.tensor, V: tl.tensor, scale: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Pass 1: maximum and sum of exponentials of both rows over ``tiles`` tiles from tile ``first``."""
    q_tops = tl.full((BLOCK // 8,), -1.0e30, tl.float32)
    p_tops = tl.full((BLOCK // 8,), -1.0e30, tl.float32)
    q_sums = tl.zeros((BLOCK // 8,), tl.float32)
    p_sums = tl.zeros((BLOCK // 8,), tl.float32)
    for i in range(0, tiles):
        offsets = tile_offsets(first + i, BLOCK)
        q_tops, q_sums = absorb(load(draft, offsets, V), q_tops, q_sums, scale)
        p_tops, p_sums = absorb(load(target, offsets, V), p_tops, p_sums, scale)
    q_top, q_sum = merge(q_tops, q_sums, scale)
    p_top, p_sum = merge(p_tops, p_sums, scale)
    return q_top, q_sum, p_top, p_sum


@triton.jit
def distribution(
    row: tl.tensor, offsets: tl.tensor, V: tl.tensor, top: tl.tensor, total: tl.tensor, scale: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """A tile of probabilities and of their binary logarithms: the same rounded numbers in every pass."""
    exponent = (load(row, offsets, V) - top) * scale
    return tl.exp2(exponent) * (1.0 / total), exponent - tl.log2(total)  # one division per row, not per token


@triton.jit
def sums(
    draft: tl.tensor, target: tl.tensor, out: tl.tensor, label: tl.tensor, first: tl.tensor, tiles: tl.tensor,
    V: tl.tensor, scale: tl.tensor, slope: tl.tensor, q_top: tl.tensor, q_sum: tl.tensor, p_top: tl.tensor,
    p_sum: tl.tensor, TERMS: tl.constexpr, SECOND: tl.constexpr, GRADIENT: tl.constexpr, WRITE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Pass 2, backwards: overlap, S, entropies and the divergence's sums in nats; WRITE: a gradient without sums."""
    overlap = tl.zeros((BLOCK // 8,), tl.float32)
    below = tl.zeros((BLOCK // 8,), tl.float32)
    q_entropy = tl.zeros((BLOCK // 8,), tl.float32)
    p_entropy = tl.zeros((BLOCK // 8,), tl.float32)
    divergence = tl.zeros((BLOCK // 8,), tl.float32)
    second = tl.zeros((BLOCK // 8,), tl.float32)
    for i in range(0, tiles):
        offsets = tile_offsets(first + tiles - 1 - i, BLOCK)
        q, q_log = distribution(draft, offsets, V, q_top, q_sum, scale)
        p, p_log = distribution(target, offsets, V, p_top, p_sum, scale)
        overlap += tl.sum(tl.minimum(q, p, propagate_nan=tl.PropagateNan.ALL), 1)
        below += tl.sum(tl.where(q <= p, q, 0.0), 1)
        # 0 log 0 = 0, and a logit of -inf has a logarithm of -inf: only tokens with mass take part.
        q_entropy -= tl.sum(tl.where(q > 0, q * q_log, 0.0), 1)
        p_entropy -= tl.sum(tl.where(p > 0, p * p_log, 0.0), 1)
        if TERMS is not None:
            divergence += tl.sum(TERMS(q, q_log, p, p_log), 1)
        if SECOND is not None:
            second += tl.sum(SECOND(q, q_log, p, p_log), 1)
        if WRITE:
            grad = GRADIENT(q, q_log, p, p_log, offsets == label, 0.0, 0.0)
            tl.store(out + offsets, (grad * slope).to(out.dtype.element_ty), mask=offsets < V)
    overlap, below = tl.sum(overlap, 0), tl.sum(below, 0)
    q_entropy, p_entropy = tl.sum(q_entropy, 0) * LN2, tl.sum(p_entropy, 0) * LN2
    return overlap, below, q_entropy, p_entropy, tl.sum(divergence, 0) * LN2, tl.sum(second, 0) * LN2


@triton.jit
def write_gradient(
    draft: tl.tensor, target: tl.tensor, out: tl.tensor, label: tl.tensor, first: tl.tensor, tiles: tl.tensor,
    V: tl.tensor, scale: tl.tensor, slope: tl.tensor, eta: tl.tensor, q_top: tl.tensor, q_sum: tl.tensor,
    p_top: tl.tensor, p_sum: tl.tensor, overlap: tl.tensor, below: tl.tensor, divergence: tl.tensor, second: tl.tensor,
    GRADIENT: tl.constexpr, TV: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Pass 3: d loss / d draft logits, times ``slope`` = 1 / temperature."""
    for i in range(0, tiles):
        offsets = tile_offsets(first + i, BLOCK)
        q, q_log = distribution(draft, offsets, V, q_top, q_sum, scale)
        p, p_log = distribution(target, offsets, V, p_top, p_sum, scale)
        grad = tl.zeros_like(q)
        if OWN is not None:
            grad += OWN(overlap, eta) * GRADIENT(q, q_log, p, p_log, offsets == label, divergence, second)
        if TV is not None:
            grad += TV(overlap, eta) * (q * (below - tl.where(q <= p, 1.0, 0.0)))
        tl.store(out + offsets, (grad * slope).to(out.dtype.element_ty), mask=offsets < V)


@triton.jit
def lost(q_sum: tl.tensor, p_sum: tl.tensor) -> tl.tensor:
    """What a row's numbers and ``slope`` get added: NaN where a side has no finite logit, and so no distribution; else
    0."""
    return tl.where((q_sum > 0) & (p_sum > 0), 0.0, float("nan"))


@triton.jit
def label_log(
    row: tl.tensor, label: tl.tensor, V: tl.tensor, top: tl.tensor, total: tl.tensor, scale: tl.tensor,
) -> tl.tensor:  # fmt: skip
    """Logarithm of the label's probability; a label outside of the vocabulary reads nothing and gives NaN."""
    known = (label >= 0) & (label < V)
    logit = tl.load(row + label, mask=known, other=float("nan")).to(tl.float32)
    return ((logit - top) * scale - tl.log2(total)) * LN2


@triton.jit
def store_row(
    stats: tl.tensor, row: tl.tensor, rows: tl.tensor, draft: tl.tensor, target: tl.tensor, label: tl.tensor,
    V: tl.tensor, scale: tl.tensor, eta: tl.tensor, q_top: tl.tensor, q_sum: tl.tensor, p_top: tl.tensor,
    p_sum: tl.tensor, overlap: tl.tensor, q_entropy: tl.tensor, p_entropy: tl.tensor, divergence: tl.tensor,
    VALUE: tl.constexpr, LABELS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Loss, alpha and the entropies of one row into stats [4, rows]; with LABELS log p[label] into a fifth."""
    void = lost(q_sum, p_sum)
    if LABELS:
        divergence = -label_log(draft, label, V, q_top, q_sum, scale)
        tl.store(stats + 4 * rows + row, label_log(target, label, V, p_top, p_sum, scale) + void)
    tl.store(stats + row, VALUE(overlap, divergence, p_entropy, eta) + void)
    tl.store(stats + rows + row, overlap + void)
    tl.store(stats + 2 * rows + row, q_entropy + void)
    tl.store(stats + 3 * rows + row, p_entropy + void)
