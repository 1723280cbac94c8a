"""Losses of a draft distribution q against a target distribution p, row by row of logits, with gradients.

This is the primitive of training. Each kind is an entry of ``draft_losses.LOSSES``, whose table has the formulas. It
has a closed gradient into the draft's logits that depends on its own row alone. The forward pass computes it; a
backward pass only scales it by the upstream gradient of the row. Here q = softmax(draft / T) and p = softmax(target /
T).

A logit of -inf is a token without mass. Losses are then infinite where mathematics says so: ce and kl where q = 0 < p
(gradient still finite), nla where no token is shared (gradient 0; in fp32 an overlap below 1e-38 is none), rkl where p
= 0 < q (that row's gradient is not finite; other rows are not touched). A row that has no finite logit in draft or
target is no distribution: all of its numbers and its gradient are NaN, whatever the kind; other rows are not touched.
"""

import functools
import logging
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.draft_losses import LOSSES, gradient, loss_named, needs_labels
from bebop.kernels.row_threads import share

logger = logging.getLogger(__name__)

KINDS = tuple(LOSSES)
NUMBERS = ("loss", "alpha", "draft_entropy", "target_entropy", "target_log")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALED = 2**18  # elements of rows that a CPU scales together, in 30 us


@dataclass(frozen=True, slots=True)
class RowLosses:
    """Numbers per row in fp32 (fp64 for fp64 logits), and the gradient in the dtype of the draft's logits."""

    loss: Tensor  # [N]
    alpha: Tensor  # [N], sum_v min(p, q): the probability that rejection sampling accepts a draft
    draft_entropy: Tensor  # [N], nats
    target_entropy: Tensor  # [N], nats
    grad: Tensor | None  # [N, V], d loss_n / d draft_logits[n] times the row's weight
    target_log: Tensor | None = None  # [N], log p[label], of kinds with labels alone

    def numbers(self) -> tuple[Tensor, ...]:
        """Return the fields of ``NUMBERS`` that are not None, in that order."""
        return tuple(x for x in (getattr(self, name) for name in NUMBERS) if x is not None)


def row_losses(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    kind: str,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    eta: float = 3.0,
    need_grad: bool = True,
    row_weights: Tensor | None = None,
) -> RowLosses:
    """Return loss, acceptance, entropies and gradient of each row, without autograd (see ``losses.py`` for that).

    Args:
        draft_logits: [N, V], any row stride.
        target_logits: [N, V], same device; its dtype may differ.
        kind: one of ``KINDS``.
        temperature: of both distributions.
        labels: [N] tokens, for kinds that need a label (hard_ce) and only there. One outside of [0, V) is an error on a
            CPU and NaN on a GPU.
        eta: of hybrid.
        need_grad: without it ``grad`` is None.
        row_weights: [N], factors of each row's gradient, applied before it is rounded; the numbers are not scaled. On a
            GPU they cost nothing, where a multiplication afterwards would read and write all of [N, V].

    Raises:
        UserError: shapes, dtypes, a kind, a temperature, labels or weights that cannot be used.
    """
    check(draft_logits, target_logits, kind, temperature, labels)
    row_weights = check_row_weights(draft_logits, target_logits, row_weights)
    arguments = (draft_logits.detach(), target_logits.detach(), kind, temperature, labels, eta, need_grad)
    double = torch.float64 in (draft_logits.dtype, target_logits.dtype)
    if draft_logits.is_cuda and not double and find_spec("triton") is not None:
        from bebop.kernels.draft_losses_triton import TWINS
        from bebop.kernels.row_losses_triton import launch

        if kind in TWINS:
            return launch(*arguments, row_weights)
        warn_without_twin(kind)
    from bebop.kernels.row_losses_cpu import run

    rows = run(*arguments)
    if rows.grad is not None and row_weights is not None:
        scale_rows(rows.grad, row_weights)
    return rows


def scale_rows(grad: Tensor, factors: Tensor) -> None:
    """Multiply the rows of ``grad`` [N, V] in place by ``factors`` [N], in fp32 or the wider dtype of ``grad``.

    Rows whose factor is 1 stay as they are. A CPU scales a few rows at a time, because bf16 times fp32 numbers copies
    to fp32. A GPU compares with 1 in the kernel, so that the host need not wait for it.
    """
    if grad.is_cuda and grad.dtype != torch.float64 and find_spec("triton") is not None:
        from bebop.kernels import row_losses_triton

        row_losses_triton.scale_rows(grad, factors)
        return
    if grad.device.type == "cpu" and bool((factors == 1).all()):
        return
    step = max(1, SCALED // grad.shape[-1])

    def scale(block: int) -> None:
        some = slice(block * step, block * step + step)
        grad[some].mul_(factors[some, None])

    share(scale, -(-len(grad) // step), elements=grad.numel(), device=grad.device)


@functools.cache
def warn_without_twin(kind: str) -> None:
    """Log once per kind that a GPU computes this loss in slow eager PyTorch."""
    logger.warning("the draft loss %r has no Triton twin in draft_losses_triton.py: it runs in eager PyTorch", kind)


def check(
    draft: Tensor, target: Tensor, kind: str, temperature: float, labels: Tensor | None, *, whole: bool = True
) -> None:
    """Raise ``UserError`` for inputs that ``row_losses`` cannot use; ``whole``: V is the whole vocabulary."""
    divergence = loss_named(kind).divergence
    if draft.dim() != 2 or draft.shape != target.shape or draft.shape[-1] == 0:
        shapes = f"{list(draft.shape)} and {list(target.shape)}"
        raise UserError(f"draft and target logits must both be [N, V] with V > 0, not {shapes}")
    for name, logits in (("draft", draft), ("target", target)):
        if logits.dtype not in DTYPES:
            raise UserError(f"{name} logits must be fp32, bf16, fp16 or fp64, not {logits.dtype}")
    if draft.device != target.device:
        raise UserError(f"draft logits are on {draft.device}, target logits on {target.device}; one device is needed")
    if not 0 < temperature < float("inf"):
        raise UserError(f"temperature must be positive and finite, not {temperature}")
    if (labels is not None) != (divergence is not None and divergence.labels):
        wanting = ", ".join(repr(name) for name in LOSSES if needs_labels(name))
        raise UserError(f"labels are for kind={wanting} and needed there; kind is {kind!r}")
    if labels is not None:
        check_labels(labels, draft.shape[0], draft.shape[1] if whole else None)


def check_row_weights(draft: Tensor, target: Tensor, weights: Tensor | None) -> Tensor | None:
    """Return row weights in the dtype of sums; raise ``UserError`` unless they are [N] floats on the logits' device."""
    if weights is None:
        return None
    if weights.shape != draft.shape[:1] or not weights.is_floating_point() or weights.device != draft.device:
        allowed = f"{len(draft)} floating-point numbers on {draft.device}"
        given = f"{weights.dtype} of shape {list(weights.shape)} on {weights.device}"
        raise UserError(f"row_weights must be {allowed}, not {given}")
    return weights.detach().to(accumulator(draft, target))


def check_labels(labels: Tensor, rows: int, vocabulary: int | None) -> None:
    """Raise ``UserError`` unless labels are [N] integers, and on a CPU tokens in [0, V).

    On a GPU the range check would cost a synchronisation.
    """
    if labels.shape != (rows,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise UserError(f"labels must be {rows} integers, not {labels.dtype} of shape {list(labels.shape)}")
    if vocabulary is None or labels.device.type != "cpu" or rows == 0:
        return
    if not 0 <= int(labels.min()) <= int(labels.max()) < vocabulary:
        raise UserError(f"labels must be tokens in [0, {vocabulary}), not {int(labels.min())} to {int(labels.max())}")


def accumulator(draft: Tensor, target: Tensor) -> torch.dtype:
    """Return the dtype of sums: fp64 if either input is fp64, else fp32."""
    return torch.promote_types(torch.promote_types(draft.dtype, target.dtype), torch.float32)


def reference(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    kind: str,
    temperature: float = 1.0,
    labels: Tensor | None = None,
    eta: float = 3.0,
    need_grad: bool = True,
) -> RowLosses:
    """Compute ``row_losses`` by the formulas of the table in ``draft_losses.py``, with all of [N, V] in memory.

    In fp64 these are the exact numbers.
    """
    dtype = accumulator(draft_logits, target_logits)
    q_log = (draft_logits.to(dtype) / temperature).log_softmax(-1)
    p_log = (target_logits.to(dtype) / temperature).log_softmax(-1)
    q, p = q_log.exp(), p_log.exp()
    alpha = torch.minimum(q, p).sum(-1)
    below = torch.where(q <= p, q, 0).sum(-1)
    p_entropy = -torch.where(p > 0, p * p_log, 0).sum(-1)
    q_entropy = -torch.where(q > 0, q * q_log, 0).sum(-1)
    row = LOSSES[kind]
    tv, own = q * (below[:, None] - (q <= p).to(dtype)), None
    divergence = alpha
    if row.divergence is not None:
        hit = None if labels is None else torch.arange(q.shape[-1], device=q.device) == labels[:, None]
        tile = (q, q_log, p, p_log, hit)
        divergence = row.divergence.terms(*tile).sum(-1)
        second = divergence if row.divergence.second is None else row.divergence.second(*tile).sum(-1)
        own = row.divergence.gradient(*tile, divergence[:, None], second[:, None])
    loss, grad = row.value(alpha, divergence, p_entropy, eta), gradient(row, tv, own, alpha, eta)
    lost = torch.where(torch.isfinite(draft_logits.amax(-1) + target_logits.amax(-1)), 0.0, torch.nan).to(dtype)
    target_log = None if labels is None else p_log.gather(-1, labels[:, None].long())[:, 0] + lost
    scaled = ((grad + lost[:, None]) / temperature).to(draft_logits.dtype) if need_grad else None
    loss, alpha, q_entropy, p_entropy = (x + lost for x in (loss, alpha, q_entropy, p_entropy))
    return RowLosses(loss, alpha, q_entropy, p_entropy, scaled, target_log)
