"""Draft losses of logits that are split over the vocabulary between the processes of a group.

Two collectives in the forward pass, whatever the kind, and none for the gradient:

1. an all-gather of 4 numbers per row: maximum and sum of exponentials of either side. (Reduced one after the
   other they would be two collectives; merging gathered pairs is exact and costs ``size`` times 4 numbers per row.)
2. a sum of 6 numbers per row: overlap, S, both entropies, and the divergence of the kind with its second sum.
   It cannot join the first: min(p, q) needs both normalisers, and so does alpha, which every kind reports.

With alpha left out, ce, kl, rkl and hard_ce could do with one gather of more numbers; tv, nla and hybrid need both.
All processes merge the same numbers in the same order, so that normalisers agree to the last bit. Rows go in chunks,
in three passes over the logits, each of which computes the probabilities again.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from bebop.kernels.draft_losses import LOSSES, gradient, needs_labels
from bebop.kernels.row_losses import NUMBERS, RowLosses, accumulator

CHUNK_ELEMENTS = {"cuda": 2**24, "cpu": 2**16}
FLOOR = -1e30  # a maximum of -inf, in a shard without mass, would give -inf - -inf

Distribution = tuple[Tensor, Tensor]  # logarithms and probabilities [R, V / size]


def parallel_row_losses(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    group: dist.ProcessGroup,
    kind: str,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    eta: float = 3.0,
    need_grad: bool = True,
    row_weights: Tensor | None = None,
) -> RowLosses:
    """Compute ``row_losses`` of [N, V / size] shards, which lie in the order of ranks and may differ in width.

    ``labels`` are tokens of the whole vocabulary. ``grad`` is that of this process's shard; the rest is the same
    everywhere. The caller checks the arguments.
    """
    dtype = accumulator(draft_logits, target_logits)
    pair = (draft_logits, target_logits)
    tops, totals, offset = _normalisers(pair, temperature, dtype, group)
    rows, width = draft_logits.shape

    def distributions(some: slice) -> tuple[Distribution, Distribution]:
        q, p = (
            _distribution(x[some].to(dtype) / temperature, top[some], total[some])
            for x, top, total in zip(pair, tops, totals, strict=True)
        )
        return q, p

    def hits(some: slice) -> Tensor | None:
        if labels is None:
            return None
        return torch.arange(width, device=labels.device) + offset == labels[some, None]

    sums = torch.zeros(6, rows, dtype=dtype, device=draft_logits.device)
    for some in _chunks(rows, width, sums.device):
        sums[:, some] = _sums(*distributions(some), hits(some), kind)
    dist.all_reduce(sums, group=group)
    alpha, _, q_entropy, p_entropy, divergence, target_log = sums
    lost = torch.where((totals > 0).all(0), 0.0, torch.nan).to(dtype)  # rows that are no distributions
    grad = torch.empty_like(draft_logits, memory_format=torch.contiguous_format) if need_grad else None
    for some in _chunks(rows, width, sums.device) if grad is not None else ():
        assert grad is not None
        slope = 1 / temperature + lost[some, None]
        if row_weights is not None:
            slope = slope * row_weights[some, None]
        grad[some] = _gradient(*distributions(some), hits(some), sums[:, some], kind, eta) * slope
    loss = LOSSES[kind].value(alpha, divergence, p_entropy, eta)
    numbers = (loss, alpha, q_entropy, p_entropy, *([target_log] if needs_labels(kind) else []))
    return RowLosses(grad=grad, **{name: x + lost for name, x in zip(NUMBERS, numbers, strict=False)})


def _chunks(rows: int, width: int, device: torch.device) -> list[slice]:
    step = max(1, CHUNK_ELEMENTS.get(device.type, 2**20) // width)
    return [slice(start, start + step) for start in range(0, rows, step)]


def _normalisers(
    pair: tuple[Tensor, Tensor], temperature: float, dtype: torch.dtype, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, int]:
    """Return maxima [2, N] and sums [2, N] of whole rows, and this shard's first token; the first collective."""
    rows, width = pair[0].shape
    mine = torch.empty(4 * rows + 1, dtype=dtype, device=pair[0].device)
    local = mine[:-1].view(2, 2, rows)  # side, (maximum, sum), row
    for side, logits in enumerate(pair):
        for some in _chunks(rows, width, mine.device):
            scaled = logits[some].to(dtype) / temperature
            top = scaled.amax(-1).clamp_min(FLOOR)
            local[side, 0, some], local[side, 1, some] = top, (scaled - top[:, None]).exp().sum(-1)
    mine[-1] = width
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, mine, group=group)
    shards = torch.stack([x[:-1].view(2, 2, rows) for x in every])
    tops = shards[:, :, 0].amax(0)
    totals = (shards[:, :, 1] * (shards[:, :, 0] - tops).exp()).sum(0)
    return tops, totals, sum(int(x[-1]) for x in every[: dist.get_rank(group)])


def _distribution(scaled: Tensor, top: Tensor, total: Tensor) -> Distribution:
    shifted = scaled - top[:, None]
    return shifted - total.log()[:, None], shifted.exp() * (1 / total)[:, None]


def _sums(draft: Distribution, target: Distribution, hit: Tensor | None, kind: str) -> Tensor:
    """Return this shard's part [6, R] of overlap, S, both entropies, the kind's divergence and its second sum."""
    (q_log, q), (p_log, p) = draft, target
    divergence, tile = LOSSES[kind].divergence, (q, q_log, p, p_log, hit)
    nothing = torch.zeros_like(q[:, :1])
    first = nothing if divergence is None else divergence.terms(*tile)
    second = nothing if divergence is None or divergence.second is None else divergence.second(*tile)
    entropies = (-torch.where(x > 0, x * x_log, 0) for x_log, x in (draft, target))
    terms = (torch.minimum(q, p), torch.where(q <= p, q, 0), *entropies, first, second)
    return torch.stack([x.sum(-1) for x in terms])


def _gradient(
    draft: Distribution, target: Distribution, hit: Tensor | None, sums: Tensor, kind: str, eta: float
) -> Tensor:
    """Return T * d loss / d logits [R, V / size], see the table of ``draft_losses.py``.

    ``sums`` [6, R] are those of whole rows.
    """
    (q_log, q), (p_log, p) = draft, target
    alpha, below, _, _, total, second = sums
    loss, tv, own = LOSSES[kind], None, None
    if loss.tv is not None:
        tv = q * (below[:, None] - (q <= p).to(q.dtype))
    if loss.divergence is not None and loss.own is not None:
        last = total if loss.divergence.second is None else second
        own = loss.divergence.gradient(q, q_log, p, p_log, hit, total[:, None], last[:, None])
    return gradient(loss, tv, own, alpha, eta)
