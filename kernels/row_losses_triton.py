# mypy: disable-error-code="untyped-decorator"
"""Draft losses of whole rows of logits in Triton: loss, overlap, entropies and the gradient in one launch.

Two launch paths share the three passes of ``row_passes_triton.py``; each pass runs over tiles of the vocabulary:

1. ``normalise``: running maximum, sum and entropy of both rows;
2. ``sums``: overlap, the mass S of tokens with q <= p, and the divergence of the kind;
3. ``write_gradient``: the gradient, times the row weights.

*Row path*: one program per row does all three; CE-like kinds, whose gradient needs nothing of pass 2, write it there.
*Split path*, where rows are too few to fill the device: three launches with V split over programs, and 10 numbers per
split in between.

Memory traffic in u = N * V * bytes of one logits tensor: 2u for the first pass and 1u for the gradient must reach
memory. Passes 2 and 3 read 2u each, from L2 as far as it holds the rows in flight. At V = 151,936 in bf16 both tensors
take 0.6 MB per row, so 80 MB for 132 programs, more than the 50 MB of an H100. Pass 2 therefore runs backwards over the
row and pass 3 forwards again: each starts on the tiles that the pass before it read last. The traffic is between 3u
(all hits) and 7u (none), 5u for CE-like kinds without hits; not measured yet. A sure 3u would take slices that stay in
registers and a barrier between the programs of a row; that is not built.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.draft_losses_triton import TWINS
from bebop.kernels.row_losses import NUMBERS, RowLosses
from bebop.kernels.row_passes_triton import merge, normalise, row_slope, store_row, sums, write_gradient

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BLOCK = 8192  # widest tile of the row path
SPLIT_BLOCK = 4096  # widest tile of the split path: V = 151,936 gives up to 38 programs per row
LOG2E = 1.4426950408889634


@triton.jit
def _scale_kernel(
    grad: tl.tensor, upstream: tl.tensor, stride: tl.tensor, V: tl.tensor, tiles: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Multiply ``tiles`` tiles of a row by the row's factor, in program (row, split); a factor of 1 returns at once."""
    row = tl.program_id(0).to(tl.int64)
    factor = tl.load(upstream + row * stride)
    if factor != 1.0:
        grad += row * V
        first = tl.program_id(1) * tiles
        for i in range(0, tiles):
            offsets = (first + i) * BLOCK + tl.arange(0, BLOCK)
            x = tl.load(grad + offsets, mask=offsets < V).to(tl.float32)
            tl.store(grad + offsets, (x * factor).to(grad.dtype.element_ty), mask=offsets < V)


# ---- row path


@triton.jit
def _row_kernel(
    draft: tl.tensor, target: tl.tensor, out: tl.tensor, labels: tl.tensor, stats: tl.tensor, draft_stride: tl.tensor,
    target_stride: tl.tensor, rows: tl.tensor, V: tl.tensor, scale: tl.tensor, slope: tl.tensor, eta: tl.tensor,
    weights: tl.tensor, WEIGHTED: tl.constexpr, TERMS: tl.constexpr, SECOND: tl.constexpr, GRADIENT: tl.constexpr,
    VALUE: tl.constexpr, TV: tl.constexpr,
    OWN: tl.constexpr, LABELS: tl.constexpr, EARLY: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Run all three passes over one row per program."""
    row = tl.program_id(0).to(tl.int64)
    draft += row * draft_stride
    target += row * target_stride
    out += row * V
    label = tl.load(labels + row) if LABELS else -1
    tiles = tl.cdiv(V, BLOCK)
    q_top, q_sum, q_moment, p_top, p_sum, p_moment = normalise(draft, target, 0, tiles, V, scale, BLOCK)
    slope = row_slope(slope, weights, row, q_sum, p_sum, WEIGHTED)
    overlap, below, divergence, second = sums(
        draft, target, out, label, 0, tiles, V, scale, slope, q_top, q_sum, p_top, p_sum,
        TERMS, SECOND, GRADIENT, GRAD and EARLY, BLOCK,
    )  # fmt: skip
    store_row(
        stats, row, rows, draft, target, label, V, scale, eta,
        q_top, q_sum, q_moment, p_top, p_sum, p_moment, overlap, divergence, VALUE, LABELS,
    )  # fmt: skip
    if GRAD and not EARLY:
        write_gradient(
            draft, target, out, label, 0, tiles, V, scale, slope, eta,
            q_top, q_sum, p_top, p_sum, overlap, below, divergence, second, GRADIENT, TV, OWN, BLOCK,
        )  # fmt: skip


# ---- split path: program (row, split) has ``tiles`` tiles; partial [10, rows, splits]


@triton.jit
def _merged_normalisers(
    partial: tl.tensor, row: tl.tensor, rows: tl.tensor, splits: tl.tensor, scale: tl.tensor, LANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return the results of ``normalise`` for a whole row, merged from those of its splits."""
    lane = tl.arange(0, LANES)
    at = partial + row * splits + lane
    step = rows * splits
    q_tops = tl.load(at, mask=lane < splits, other=-1.0e30)
    q_sums = tl.load(at + step, mask=lane < splits, other=0.0)
    q_moments = tl.load(at + 2 * step, mask=lane < splits, other=0.0)
    p_tops = tl.load(at + 3 * step, mask=lane < splits, other=-1.0e30)
    p_sums = tl.load(at + 4 * step, mask=lane < splits, other=0.0)
    p_moments = tl.load(at + 5 * step, mask=lane < splits, other=0.0)
    q_top, q_sum, q_moment = merge(q_tops, q_sums, q_moments, scale)
    p_top, p_sum, p_moment = merge(p_tops, p_sums, p_moments, scale)
    return q_top, q_sum, q_moment, p_top, p_sum, p_moment


@triton.jit
def _merged_sum(
    partial: tl.tensor, field: tl.constexpr, row: tl.tensor, rows: tl.tensor, splits: tl.tensor, LANES: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Return one of the sums of pass 2 for a whole row, added up over its splits."""
    lane = tl.arange(0, LANES)
    return tl.sum(tl.load(partial + (field * rows + row) * splits + lane, mask=lane < splits, other=0.0), 0)


@triton.jit
def _split_normalise(
    draft: tl.tensor, target: tl.tensor, partial: tl.tensor, draft_stride: tl.tensor, target_stride: tl.tensor,
    rows: tl.tensor, splits: tl.tensor, tiles: tl.tensor, V: tl.tensor, scale: tl.tensor, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """Run pass 1 over one split."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    draft += row * draft_stride
    target += row * target_stride
    q_top, q_sum, q_moment, p_top, p_sum, p_moment = normalise(draft, target, split * tiles, tiles, V, scale, BLOCK)
    at = partial + row * splits + split
    step = rows * splits
    tl.store(at, q_top)
    tl.store(at + step, q_sum)
    tl.store(at + 2 * step, q_moment)
    tl.store(at + 3 * step, p_top)
    tl.store(at + 4 * step, p_sum)
    tl.store(at + 5 * step, p_moment)


@triton.jit
def _split_sums(
    draft: tl.tensor, target: tl.tensor, partial: tl.tensor, draft_stride: tl.tensor, target_stride: tl.tensor,
    rows: tl.tensor, splits: tl.tensor, tiles: tl.tensor, V: tl.tensor, scale: tl.tensor, TERMS: tl.constexpr,
    SECOND: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Run pass 2 over one split."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    draft += row * draft_stride
    target += row * target_stride
    q_top, q_sum, _, p_top, p_sum, _ = _merged_normalisers(partial, row, rows, splits, scale, LANES)
    overlap, below, divergence, second = sums(
        draft, target, partial, 0, split * tiles, tiles, V, scale, 1.0, q_top, q_sum, p_top, p_sum,
        TERMS, SECOND, None, False, BLOCK,
    )  # fmt: skip
    at = partial + (6 * rows + row) * splits + split
    step = rows * splits
    tl.store(at, overlap)
    tl.store(at + step, below)
    tl.store(at + 2 * step, divergence)
    tl.store(at + 3 * step, second)


@triton.jit
def _split_finish(
    draft: tl.tensor, target: tl.tensor, partial: tl.tensor, out: tl.tensor, labels: tl.tensor, stats: tl.tensor,
    draft_stride: tl.tensor, target_stride: tl.tensor, rows: tl.tensor, splits: tl.tensor, tiles: tl.tensor,
    V: tl.tensor, scale: tl.tensor, slope: tl.tensor, eta: tl.tensor, weights: tl.tensor, WEIGHTED: tl.constexpr,
    GRADIENT: tl.constexpr, VALUE: tl.constexpr,
    TV: tl.constexpr, OWN: tl.constexpr, LABELS: tl.constexpr, GRAD: tl.constexpr, BLOCK: tl.constexpr,
    LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Run pass 3 over one split; the first split of a row stores the row's numbers."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    draft += row * draft_stride
    target += row * target_stride
    label = tl.load(labels + row) if LABELS else -1
    q_top, q_sum, q_moment, p_top, p_sum, p_moment = _merged_normalisers(partial, row, rows, splits, scale, LANES)
    overlap = _merged_sum(partial, 6, row, rows, splits, LANES)
    below = _merged_sum(partial, 7, row, rows, splits, LANES)
    divergence = _merged_sum(partial, 8, row, rows, splits, LANES)
    second = _merged_sum(partial, 9, row, rows, splits, LANES)
    if split == 0:
        store_row(
            stats, row, rows, draft, target, label, V, scale, eta,
            q_top, q_sum, q_moment, p_top, p_sum, p_moment, overlap, divergence, VALUE, LABELS,
        )  # fmt: skip
    if GRAD:
        slope = row_slope(slope, weights, row, q_sum, p_sum, WEIGHTED)
        write_gradient(
            draft, target, out + row * V, label, split * tiles, tiles, V, scale, slope, eta,
            q_top, q_sum, p_top, p_sum, overlap, below, divergence, second, GRADIENT, TV, OWN, BLOCK,
        )  # fmt: skip


# ---- the public function


def default_splits(rows: int, vocabulary: int, device: torch.device) -> int:
    """Return the programs per row: 1 where the rows alone fill the device, else enough for two per multiprocessor."""
    if device.type != "cuda" or rows == 0:
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    return 1 if 2 * rows >= wanted else min(wanted // rows, triton.cdiv(vocabulary, SPLIT_BLOCK))


def launch(
    draft_logits: Tensor,
    target_logits: Tensor,
    kind: str,
    temperature: float,
    labels: Tensor | None,
    eta: float,
    need_grad: bool,
    row_weights: Tensor | None = None,
    *,
    splits: int | None = None,
    block: int | None = None,
) -> RowLosses:
    """Launch ``row_losses`` on a CUDA device (or in Triton's interpreter): [N, V], [N, V] -> RowLosses.

    Any row stride; a last axis that is not contiguous costs a copy. Beyond its results it allocates 10 fp32 numbers per
    row and split. ``splits`` and ``block`` (a power of two) choose the launch path and its tile, for tests and tuning.

    Raises:
        UserError: a dtype other than fp32, bf16 and fp16.
    """
    twin = TWINS[kind]  # row_losses takes another way where there is none, and checks what users give
    assert twin.labels == (labels is not None), kind
    for logits in (draft_logits, target_logits):
        if logits.dtype not in DTYPES:
            raise UserError(f"draft losses in Triton take fp32, bf16 or fp16 logits, not {logits.dtype}")
    draft, target = (x if x.stride(-1) == 1 else x.contiguous() for x in (draft_logits, target_logits))
    rows, V = draft.shape
    stats = torch.empty(5 if twin.labels else 4, rows, dtype=torch.float32, device=draft.device)
    grad = torch.empty(rows, V, dtype=draft.dtype, device=draft.device) if need_grad else None
    out = draft if grad is None else grad  # never written where no gradient is asked for
    marks = stats if labels is None else labels.contiguous()
    weights = stats if row_weights is None else row_weights.contiguous()
    splits = default_splits(rows, V, draft.device) if splits is None else splits
    widest = BLOCK if splits == 1 else SPLIT_BLOCK
    block = min(widest, max(128, triton.next_power_of_2(V))) if block is None else block
    numbers = (draft.stride(0), target.stride(0), rows)
    scale, slope = LOG2E / temperature, 1.0 / temperature
    options: dict[str, Any] = {"BLOCK": block, "num_warps": min(16, max(4, block // 512))}
    results, constants = (out, marks, stats), twin.constants()
    last = {"GRAD": need_grad, "WEIGHTED": row_weights is not None, **options}
    factors = (scale, slope, eta, weights)
    with torch.cuda.device_of(draft):
        if rows and splits == 1:
            _row_kernel[(rows,)](draft, target, *results, *numbers, V, *factors, **constants, **last)
        elif rows:
            tiles = triton.cdiv(triton.cdiv(V, block), splits)
            splits = triton.cdiv(triton.cdiv(V, block), tiles)  # none without a tile
            lanes = triton.next_power_of_2(splits)
            partial = torch.empty(10, rows, splits, dtype=torch.float32, device=draft.device)
            common = (*numbers, splits, tiles, V)
            grid = (rows, splits)
            _split_normalise[grid](draft, target, partial, *common, scale, **options)
            terms = {name: constants.pop(name) for name in ("TERMS", "SECOND")}
            _split_sums[grid](draft, target, partial, *common, scale, LANES=lanes, **terms, **options)
            grid = grid if need_grad else (rows, 1)
            del constants["EARLY"]  # a split knows no sum of the whole row, and no gradient is written before pass 3
            _split_finish[grid](draft, target, partial, *results, *common, *factors, LANES=lanes, **constants, **last)
    return RowLosses(grad=grad, **dict(zip(NUMBERS, stats, strict=False)))


def scale_rows(grad: Tensor, upstream: Tensor, *, block: int = SPLIT_BLOCK) -> None:
    """Multiply the contiguous rows of ``grad`` [N, V] in place by ``upstream`` [N], fp32 of any stride, also 0.

    Rows whose factor is 1 stay as they are. The device checks for 1, so the host does not wait for it.
    """
    rows, V = grad.shape
    tiles = triton.cdiv(V, block)
    with torch.cuda.device_of(grad):
        if rows:
            splits = min(default_splits(rows, V, grad.device), tiles)
            grid = (rows, splits)
            _scale_kernel[grid](
                grad, upstream, upstream.stride(0), V, triton.cdiv(tiles, splits), BLOCK=block, num_warps=8
            )
