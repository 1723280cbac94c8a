# mypy: disable-error-code="untyped-decorator"
"""``pair_stats`` in Triton, one program per row: the normalisers of both rows, then all sums in one more pass.

Probabilities need no first pass. The second pass runs backwards, so that it starts on the tiles that the first one read
last and left in the cache. Everything is in fp32.

Sums, the largest number and its place are kept per lane, 8 columns wide, and threads meet once, after the last tile:
with sums of whole tiles they met eight times in each. The entropies of logits come out of the first pass. Compiled for
sm_90 a thread holds 80 registers and three programs fit a multiprocessor (128 and one before); not timed on a GPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.draft_losses_triton import LN2
from bebop.kernels.row_passes_triton import distribution, entropy, load, normalise, tile_offsets
from bebop.kernels.stats import FIELDS, PairStats
from bebop.kernels.verify_triton import DTYPES, block_of

BLOCK = 2048  # with 8 columns per thread: 80 registers for each of 256 threads
LOG2E = 1.4426950408889634


@triton.jit
def _distributions(
    draft: tl.tensor, target: tl.tensor, offsets: tl.tensor, V: tl.tensor, scale: tl.tensor, q_top: tl.tensor,
    q_sum: tl.tensor, p_top: tl.tensor, p_sum: tl.tensor, LOGITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return one tile of both distributions, each with its binary logarithms."""
    if LOGITS:
        q, q_log = distribution(draft, offsets, V, q_top, q_sum, scale)
        p, p_log = distribution(target, offsets, V, p_top, p_sum, scale)
    else:
        q = tl.maximum(load(draft, offsets, V), 0.0)
        p = tl.maximum(load(target, offsets, V), 0.0)
        q_log = tl.log2(q)
        p_log = tl.log2(p)
    return q, q_log, p, p_log


@triton.jit
def _stats(
    draft: tl.tensor, target: tl.tensor, out: tl.tensor, q_stride: tl.tensor, p_stride: tl.tensor, rows: tl.tensor,
    V: tl.tensor, tiles: tl.tensor, scale: tl.tensor, LOGITS: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Write the statistics of a row into out [8, rows], in the order of the fields of ``PairStats``."""
    row = tl.program_id(0).to(tl.int64)
    draft += row * q_stride
    target += row * p_stride
    zero = tl.full((), 0.0, tl.float32)
    q_top, q_sum, q_moment, p_top, p_sum, p_moment = zero, zero, zero, zero, zero, zero
    if LOGITS:
        q_top, q_sum, q_moment, p_top, p_sum, p_moment = normalise(draft, target, 0, tiles, V, scale, BLOCK)
    lanes = tl.zeros((BLOCK // 8,), tl.float32)
    p_gt_q, q_ge_p, q_entropy, p_entropy, kl_pq, kl_qp = lanes, lanes, lanes, lanes, lanes, lanes
    best, greedy = lanes - float("inf"), tl.zeros((BLOCK // 8,), tl.int32)
    for i in range(0, tiles):
        offsets = tile_offsets(tiles - 1 - i, BLOCK)
        q, q_log, p, p_log = _distributions(draft, target, offsets, V, scale, q_top, q_sum, p_top, p_sum, LOGITS)
        above = p > q
        p_gt_q += tl.sum(tl.where(above, q, 0.0), 1)
        q_ge_p += tl.sum(tl.where(above, 0.0, p), 1)
        kl_pq += tl.sum(tl.where(p > 0, p * (p_log - q_log), 0.0), 1)
        kl_qp += tl.sum(tl.where(q > 0, q * (q_log - p_log), 0.0), 1)
        if not LOGITS:
            q_entropy -= tl.sum(tl.where(q > 0, q * q_log, 0.0), 1)
            p_entropy -= tl.sum(tl.where(p > 0, p * p_log, 0.0), 1)
        # Raw numbers, not q: two logits may round to the same probability. Backwards, so ">=" keeps the first index.
        raw = load(draft, offsets, V)
        top = tl.max(raw, 1)
        where = tl.min(tl.where(raw == top[:, None], offsets, V), 1)
        greedy = tl.where(top >= best, where, greedy)
        best = tl.maximum(top, best)
    chosen = tl.min(tl.where(best == tl.max(best, 0), greedy, V), 0)
    _, _, p_chosen, _ = _distributions(draft, target, chosen, V, scale, q_top, q_sum, p_top, p_sum, LOGITS)
    alpha_p_gt_q, alpha_q_ge_p = tl.sum(p_gt_q, 0), tl.sum(q_ge_p, 0)
    tl.store(out + row, alpha_p_gt_q + alpha_q_ge_p)
    tl.store(out + rows + row, p_chosen)
    if LOGITS:
        tl.store(out + 2 * rows + row, entropy(q_sum, q_moment))
        tl.store(out + 3 * rows + row, entropy(p_sum, p_moment))
    else:
        tl.store(out + 2 * rows + row, tl.sum(q_entropy, 0) * LN2)
        tl.store(out + 3 * rows + row, tl.sum(p_entropy, 0) * LN2)
    tl.store(out + 4 * rows + row, tl.sum(kl_pq, 0) * LN2)
    tl.store(out + 5 * rows + row, tl.sum(kl_qp, 0) * LN2)
    tl.store(out + 6 * rows + row, alpha_p_gt_q)
    tl.store(out + 7 * rows + row, alpha_q_ge_p)


# ---- the public function


def launch(
    draft: Tensor, target: Tensor, temperature: float, from_logits: bool, *, block: int | None = None
) -> PairStats:
    """Launch ``pair_stats`` on a CUDA device (or in Triton's interpreter).

    Rows may have any stride; 8 fp32 numbers per row are allocated.

    Raises:
        UserError: a dtype other than fp32, bf16 and fp16.
    """
    for tensor in (draft, target):
        if tensor.dtype not in DTYPES:
            raise UserError(f"pair_stats in Triton takes fp32, bf16 or fp16, not {tensor.dtype}")
    draft, target = (x if x.stride(-1) == 1 else x.contiguous() for x in (draft, target))
    rows, V = draft.shape
    out = torch.empty(len(FIELDS), rows, dtype=torch.float32, device=draft.device)
    block = block_of(V, BLOCK) if block is None else block
    if rows:
        _stats[(rows,)](
            draft, target, out, draft.stride(0), target.stride(0), rows, V, triton.cdiv(V, block), LOG2E / temperature,
            LOGITS=from_logits, BLOCK=block, num_warps=max(1, block // 256),
        )  # fmt: skip
    return PairStats(**dict(zip(FIELDS, out.unbind(0), strict=True)))
