"""Statistics of pairs of distributions: overlap and its two parts, target-only acceptance, entropies, divergences.

This is the plain PyTorch reference; a CUDA device uses Triton (two passes over logits, one over probabilities).
"""

from dataclasses import dataclass, fields
from importlib.util import find_spec

import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.row_threads import share

CHUNK = {"cpu": 1 << 17}  # elements of a chunk of rows: 512 kB in fp32 per intermediate; 4 M elsewhere


@dataclass(frozen=True, slots=True, kw_only=True)
class PairStats:
    """Statistics per row of a draft distribution q and a target distribution p, each [N] fp32.

    Entropies and KL are in nats. q = (0.5, 0.5), p = (0.8, 0.2): overlap 0.7 = 0.5 (where p > q) + 0.2 (elsewhere),
    target_only 0.8.
    """

    overlap: Tensor  # sum_v min(p, q): the acceptance of rejection sampling; the sum of the two alphas
    target_only: Tensor  # p(argmax q): the acceptance of a greedy draft; the first index where q is tied
    draft_entropy: Tensor
    target_entropy: Tensor
    kl_pq: Tensor  # KL(p || q); inf where p has mass and q has none
    kl_qp: Tensor  # KL(q || p); inf where q has mass and p has none
    alpha_p_gt_q: Tensor  # sum of q over p > q
    alpha_q_ge_p: Tensor  # sum of p over q >= p


FIELDS = tuple(field.name for field in fields(PairStats))


def pair_stats(draft: Tensor, target: Tensor, *, temperature: float = 1.0, from_logits: bool = True) -> PairStats:
    """Return statistics of rows [N, V] of draft and target distributions.

    With ``from_logits`` the rows are logits, divided by ``temperature``. There are no gradients. Logits may be -inf,
    but not all of a row; distributions must sum to 1.

    Raises:
        UserError: shapes that differ, a temperature that is not positive, or one other than 1 with probabilities.
    """
    if draft.ndim != 2 or draft.shape != target.shape:
        raise UserError(f"pair_stats got {list(draft.shape)} and {list(target.shape)}; both must be the same [N, V]")
    if not temperature > 0 or (temperature != 1 and not from_logits):
        allowed = "it must be positive" if from_logits else "probabilities are taken as they are: 1"
        raise UserError(f"temperature {temperature} is not possible here; {allowed}")
    with torch.no_grad():
        if draft.is_cuda and torch.float64 not in (draft.dtype, target.dtype) and find_spec("triton") is not None:
            from bebop.kernels import stats_triton

            return stats_triton.launch(draft, target, temperature, from_logits)
        return _in_chunks(draft, target, temperature, from_logits)


def _in_chunks(draft: Tensor, target: Tensor, temperature: float, from_logits: bool) -> PairStats:
    """Compute the statistics a few rows at a time, so that intermediates stay small; CPU threads share the chunks."""
    rows = max(1, CHUNK.get(draft.device.type, 1 << 22) // max(1, draft.shape[-1]))
    pairs = list(zip(draft.split(rows), target.split(rows), strict=True))
    parts: dict[int, PairStats] = {}

    def fill(block: int) -> None:
        parts[block] = reference(*pairs[block], temperature, from_logits)

    share(fill, len(pairs), elements=draft.numel(), device=draft.device)
    columns = [torch.cat([getattr(parts[block], name) for block in range(len(pairs))]) for name in FIELDS]
    return PairStats(**dict(zip(FIELDS, columns, strict=True)))


def reference(draft: Tensor, target: Tensor, temperature: float = 1.0, from_logits: bool = True) -> PairStats:
    """Compute ``pair_stats`` in plain PyTorch, in fp32 or, for fp64 inputs, fp64 inside."""
    dtype = torch.promote_types(torch.promote_types(draft.dtype, target.dtype), torch.float32)
    q, p = draft.to(dtype), target.to(dtype)
    if from_logits:
        q_log, p_log = (q / temperature).log_softmax(-1), (p / temperature).log_softmax(-1)
        q, p = q_log.exp(), p_log.exp()
    else:
        q_log, p_log = q.log(), p.log()
    above = p > q
    p_gt_q = q.where(above, 0).sum(-1).float()
    q_ge_p = p.where(~above, 0).sum(-1).float()
    greedy = draft.argmax(-1, keepdim=True)
    numbers = {
        "overlap": p_gt_q + q_ge_p,
        "target_only": p.gather(-1, greedy)[:, 0],
        "draft_entropy": -(q * q_log).where(q > 0, 0).sum(-1),
        "target_entropy": -(p * p_log).where(p > 0, 0).sum(-1),
        "kl_pq": (p * (p_log - q_log)).where(p > 0, 0).sum(-1),
        "kl_qp": (q * (q_log - p_log)).where(q > 0, 0).sum(-1),
        "alpha_p_gt_q": p_gt_q,
        "alpha_q_ge_p": q_ge_p,
    }
    return PairStats(**{name: value.float() for name, value in numbers.items()})
