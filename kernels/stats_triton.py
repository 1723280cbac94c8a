# mypy: disable-error-code="untyped-decorator"
"""``pair_stats`` in Triton, one program per row: the normalisers of both rows, then all sums in one more pass.

From probabilities the first pass falls away. The second pass runs backwards, so that it starts on what the first one
read last and left in the cache. Everything in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.row_passes_triton import distribution, load, normalise
from bebop.kernels.stats import FIELDS, PairStats
from bebop.kernels.verify_triton import DTYPES, block_of

BLOCK = 8192
LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _distributions(
    draft: tl.tensor, target: tl.tensor, offsets: tl.tensor, V: tl.tensor, scale: tl.tensor, q_top: tl.tensor,
    q_sum: tl.tensor, p_top: tl.tensor, p_sum: tl.tensor, LOGITS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """One tile of both distributions and of their binary logarithms."""
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
    """Into out [8, rows], in the order of the fields of ``PairStats``."""
    row = tl.program_id(0).to(tl.int64)
    draft += row * q_stride
    target += row * p_stride
    zero = tl.full((), 0.0, tl.float32)
    q_top, q_sum, p_top, p_sum = zero, zero, zero, zero
    if LOGITS:
        q_top, q_sum, p_top, p_sum = normalise(draft, target, 0, tiles, V, scale, BLOCK)
    p_gt_q, q_ge_p, q_entropy, p_entropy, kl_pq, kl_qp = zero, zero, zero, zero, zero, zero
    best, greedy = tl.full((), -float("inf"), tl.float32), tl.full((), 0, tl.int32)
    for i in range(0, tiles):
        first = (tiles - 1 - i) * BLOCK
        offsets = first + tl.arange(0, BLOCK)
        q, q_log, p, p_log = _distributions(draft, target, offsets, V, scale, q_top, q_sum, p_top, p_sum, LOGITS)
        above = p > q
        p_gt_q += tl.sum(tl.where(above, q, 0.0), 0)
        q_ge_p += tl.sum(tl.where(above, 0.0, p), 0)
        q_entropy -= tl.sum(tl.where(q > 0, q * q_log, 0.0), 0)
        p_entropy -= tl.sum(tl.where(p > 0, p * p_log, 0.0), 0)
        kl_pq += tl.sum(tl.where(p > 0, p * (p_log - q_log), 0.0), 0)
        kl_qp += tl.sum(tl.where(q > 0, q * (q_log - p_log), 0.0), 0)
        # Raw numbers, not q: two logits may round to the same probability. Backwards, so ">=" keeps the first index.
        raw = load(draft, offsets, V)
        top = tl.max(raw, 0)
        where = first + tl.min(tl.where(raw == top, tl.arange(0, BLOCK), BLOCK), 0)
        greedy = tl.where(top >= best, where, greedy)
        best = tl.maximum(top, best)
    _, _, p_chosen, _ = _distributions(draft, target, greedy, V, scale, q_top, q_sum, p_top, p_sum, LOGITS)
    tl.store(out + row, p_gt_q + q_ge_p)
    tl.store(out + rows + row, p_chosen)
    tl.store(out + 2 * rows + row, q_entropy * LN2)
    tl.store(out + 3 * rows + row, p_entropy * LN2)
    tl.store(out + 4 * rows + row, kl_pq * LN2)
    tl.store(out + 5 * rows + row, kl_qp * LN2)
    tl.store(out + 6 * rows + row, p_gt_q)
    tl.store(out + 7 * rows + row, q_ge_p)


# ---- the public function


def launch(
    draft: Tensor, target: Tensor, temperature: float, from_logits: bool, *, block: int | None = None
) -> PairStats:
    """``pair_stats`` on a CUDA device (or in Triton's interpreter); any row stride, 8 fp32 numbers per row allocated.

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
            LOGITS=from_logits, BLOCK=block, num_warps=min(16, max(1, block // 512)),
        )  # fmt: skip
    return PairStats(**dict(zip(FIELDS, out.unbind(0), strict=True)))
