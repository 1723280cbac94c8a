"""Draft losses of single steps, from whole logits, with gradients.

Gradients go into the draft alone and come out of the forward pass (see ``row_losses.py``). Only that gradient is kept
for the backward pass: one tensor of the logits' size, which the backward pass scales in place. Rows whose upstream
gradient is 1 are not scaled. So where the weights of rows are known, ``row_weights`` and a plain sum cost nothing.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bebop.kernels.row_losses import NUMBERS, row_losses, scale_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLossOutput:
    """Numbers per row [N], fp32 (fp64 for fp64 logits); a gradient flows through ``loss`` alone."""

    loss: Tensor  # times the row's weight
    alpha: Tensor  # sum_v min(p, q): the probability that rejection sampling accepts a draft
    draft_entropy: Tensor  # nats
    target_entropy: Tensor  # nats
    target_log: Tensor | None = None  # log p[label], of hard_ce alone


def tv_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    temperature: float = 1.0,
    kind: str = "tv",
    labels: Tensor | None = None,
    eta: float = 3.0,
    row_weights: Tensor | None = None,
) -> DraftLossOutput:
    """Return the draft loss of each row; total variation unless ``kind`` names another.

    Args:
        draft_logits: [N, V], any row stride; fp32, bf16, fp16 or fp64. Receives the gradient.
        target_logits: [N, V].
        temperature: of both distributions.
        kind: a name in ``draft_losses.LOSSES``: tv, ce, hard_ce, kl, rkl, jsd, nla, hybrid; that file has the formulas.
        labels: [N] tokens, for hard_ce.
        eta: of hybrid.
        row_weights: [N], factors of each row's loss and gradient; they get no gradient. With
            ``row_weights=mask / mask.sum()`` the sum of losses is a mean, and its backward pass does not touch the
            gradient; a mean taken afterwards reads and writes all of it once more.

    Raises:
        UserError: any input that ``row_losses`` refuses.
    """
    options = {"temperature": temperature, "kind": kind, "labels": labels, "eta": eta, "row_weights": row_weights}
    # Checked here: inside of the Function gradients are always off, and no_grad does not show.
    wanted = torch.is_grad_enabled() and draft_logits.requires_grad
    loss, *others = _RowLoss.apply(draft_logits, target_logits.detach(), options, wanted)
    return DraftLossOutput(loss=loss, **dict(zip(NUMBERS[1:], others, strict=False)))  # target_log is of hard_ce alone


class _RowLoss(torch.autograd.Function):
    """Autograd function: the numbers [N] of ``NUMBERS``; the forward pass computes the gradient."""

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor, options: dict[str, Any], wanted: bool) -> tuple[Tensor, ...]:
        rows = row_losses(draft, target, need_grad=wanted, **options)
        loss, *others = rows.numbers()
        weights = options["row_weights"]
        numbers = (loss if weights is None else loss * weights, *others)
        ctx.mark_non_differentiable(*numbers[1:])
        ctx.save_for_backward(rows.grad)
        return numbers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        if grad is None:
            return (None,) * 4
        return scale_saved(grad, upstream), None, None, None


def scale_saved(grad: Tensor, upstream: Tensor) -> Tensor:
    """Multiply the rows of a saved gradient [N, d] by ``upstream`` [N] in a backward pass.

    This happens in place, unless the graph is retained and needs the gradient again.
    """
    if torch._C._autograd._get_current_graph_task_keep_graph():
        grad = grad.clone()
    scale_rows(grad, upstream)
    return grad
