"""Draft losses from hidden states: the head's matrix product and the loss in chunks of rows, logits never kept.

For N rows, V tokens and a head of width d, logits of draft and target and their gradient would take 3 N V numbers; here
they take 3 ``chunk_rows`` V, and what is kept for the backward pass is one [N, d] tensor. The gradient is computed in
the forward pass: d loss_n / d hidden_n = (d loss_n / d logits_n) @ weight depends on row n alone, so it can be scaled
by any upstream gradient afterwards, exactly. A gradient of the head cannot (it sums over rows); ``weight_grad=True``
computes the logits again in the backward pass. The default leaves the head alone, as training of draft heads does.

Precision: products run in the dtype of the hidden states. In bf16, sums are fp32 inside the product and logits are
rounded to bf16 once, like the logits that an engine samples from; loss and statistics are fp32 from there on.
"""

from typing import Any

import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.losses import DraftLoss, e2e_weights
from bebop.kernels.row_losses import RowLosses, row_losses

# Rows per chunk: large enough to keep matrix units busy; a CPU gains nothing past some hundred rows.
CHUNK_ROWS = {"cuda": 1024, "cpu": 256}

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # hidden, weight, target_hidden, target_weight, labels


def linear_draft_loss(
    hidden: Tensor,
    weight: Tensor,
    target_hidden: Tensor,
    target_weight: Tensor,
    *,
    kind: str = "tv",
    temperature: float = 1.0,
    labels: Tensor | None = None,
    eta: float = 3.0,
    chunk_rows: int | None = None,
    weight_grad: bool = False,
) -> DraftLoss:
    """The draft loss of each row, from hidden states and heads: equal to the unfused loss of ``hidden @ weight.T``.

    Args:
        hidden: [N, d], the draft's; receives the gradient.
        weight: [V, d], the draft's head; receives a gradient only with ``weight_grad``.
        target_hidden: [N, D], the target's; never a gradient.
        target_weight: [V, D], the target's head; may be ``weight`` itself. Never a gradient.
        kind: as in ``row_losses``.
        temperature: of both laws.
        labels: [N], for hard_ce.
        eta: of hybrid.
        chunk_rows: rows whose logits exist at a time; None for 1024 on a GPU and 256 on a CPU.
        weight_grad: also give the head its gradient, for one more product per chunk and a second pass over the logits.

    Returns:
        DraftLoss of [N] each; only ``loss`` carries a gradient.

    Raises:
        UserError: shapes that do not fit, or a chunk of less than one row.
    """
    chunk = CHUNK_ROWS.get(hidden.device.type, 1024) if chunk_rows is None else chunk_rows
    _check(hidden, weight, target_hidden, target_weight, chunk)
    head = weight if weight_grad else weight.detach()
    targets = (target_hidden.detach(), target_weight.detach())
    # Asked here: inside of the Function gradients are always off, and no_grad does not show.
    wanted = torch.is_grad_enabled() and hidden.requires_grad
    options = {"kind": kind, "temperature": temperature, "eta": eta}
    loss, alpha, entropy, target_entropy = _LinearLoss.apply(hidden, head, *targets, labels, chunk, wanted, options)
    return DraftLoss(loss=loss, alpha=alpha, draft_entropy=entropy, target_entropy=target_entropy)


def linear_e2e_tv_loss(
    hidden: Tensor,
    weight: Tensor,
    target_hidden: Tensor,
    target_weight: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    chunk_rows: int | None = None,
    weight_grad: bool = False,
) -> Tensor:
    """1 - expected accepted drafts / K_eff (SPEC Eq. 13), averaged over anchors, from hidden states and heads.

    Args:
        hidden: [N, K, d], the draft's at steps 1..K of N anchors; receives the gradient.
        weight: [V, d].
        target_hidden: [N, K, D].
        target_weight: [V, D].
        mask: [N, K]; steps count up to the first one that is masked. Other rows are neither read nor computed.
        temperature: of both laws.
        chunk_rows: as in ``linear_draft_loss``.
        weight_grad: as in ``linear_draft_loss``.

    Returns:
        A scalar; 0 where no anchor has a step. The gradient of step k is its weight from ``e2e_weights`` times that of
        its TV loss, without a division by an acceptance.
    """
    valid = mask.bool().cumprod(-1).bool()
    # Padding is left out before the product with the head, which is where the time goes; it may hold anything.
    rows = valid.flatten().nonzero()[:, 0]
    draft, target = (x.flatten(0, 1)[rows] for x in (hidden, target_hidden.detach()))
    options: dict[str, Any] = {"temperature": temperature, "chunk_rows": chunk_rows, "weight_grad": weight_grad}
    steps = linear_draft_loss(draft, weight, target, target_weight, **options)
    blank = torch.zeros(valid.numel(), dtype=steps.loss.dtype, device=valid.device)
    alpha, loss = (blank.index_put((rows,), x).view_as(valid) for x in (steps.alpha, steps.loss))
    length = valid.sum(-1)
    anchors = (length > 0).sum().clamp_min(1)
    accepted = alpha.cumprod(-1).sum(-1)  # alpha is 0 from the first masked step on, and so are the products
    value = torch.where(length > 0, 1 - accepted / length.clamp_min(1), 0).sum() / anchors
    # The value is that of the formula, the gradient that of the weighted TV losses: the bracket is 0.
    return value + (e2e_weights(alpha, valid) * (loss - loss.detach())).sum() / anchors


def _check(hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor, chunk: int) -> None:
    """Shapes [N, d], [V, d], [N, D], [V, D], and chunks of at least a row."""
    named = {"hidden": hidden, "weight": weight, "target_hidden": target_hidden, "target_weight": target_weight}
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in named.items())
    fit = (
        all(x.dim() == 2 for x in named.values())
        and hidden.shape[0] == target_hidden.shape[0]
        and weight.shape[0] == target_weight.shape[0]
        and hidden.shape[1] == weight.shape[1]
        and target_hidden.shape[1] == target_weight.shape[1]
    )
    if not fit:
        raise UserError(f"[N, d], [V, d], [N, D] and [V, D] are needed; these do not fit: {shapes}")
    if chunk < 1:
        raise UserError(f"chunk_rows must be at least 1, not {chunk}")


class _LinearLoss(torch.autograd.Function):
    """Loss, alpha and entropies [N] of hidden states; the gradient into them is made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        target_hidden: Tensor,
        target_weight: Tensor,
        labels: Tensor | None,
        chunk: int,
        wanted: bool,
        options: dict[str, Any],
    ) -> tuple[Tensor, ...]:
        ctx.chunk, ctx.options = chunk, options
        slices = [slice(start, start + chunk) for start in range(0, max(1, len(hidden)), chunk)]
        inputs: Inputs = (hidden, weight, target_hidden, target_weight, labels)
        gradient = torch.empty_like(hidden) if wanted else None
        columns = []
        for rows in slices:
            part = _logit_losses(inputs, rows, options, need_grad=wanted)
            columns.append((part.loss, part.alpha, part.draft_entropy, part.target_entropy))
            if gradient is not None and part.grad is not None:
                gradient[rows] = part.grad @ weight
            del part  # or its logits' gradient would live on beside the next chunk's logits
        loss, *statistics = (torch.cat(column) for column in zip(*columns, strict=True))
        ctx.mark_non_differentiable(*statistics)
        ctx.save_for_backward(gradient, *(inputs if ctx.needs_input_grad[1] else ()))
        return loss, *statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *inputs = ctx.saved_tensors
        into_hidden = None if gradient is None else (gradient * upstream[:, None]).to(gradient.dtype)
        into_weight = _weight_gradient(upstream, inputs, ctx.chunk, ctx.options) if inputs else None
        return into_hidden, into_weight, *[None] * 6


def _logit_losses(inputs: Inputs, rows: slice, options: dict[str, Any], need_grad: bool) -> RowLosses:
    """The losses of one chunk; its logits are gone on return."""
    hidden, weight, target_hidden, target_weight, labels = inputs
    logits = (hidden[rows] @ weight.T, target_hidden[rows] @ target_weight.T)
    chosen = None if labels is None else labels[rows]
    return row_losses(*logits, labels=chosen, need_grad=need_grad, **options)


def _weight_gradient(upstream: Tensor, inputs: Inputs, chunk: int, options: dict[str, Any]) -> Tensor:
    """d (upstream . loss) / d weight [V, d], from logits computed again; summed over chunks in fp32 at least."""
    hidden, weight, *_ = inputs
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        grad = _logit_losses(inputs, rows, options, need_grad=True).grad
        assert grad is not None
        total += (grad * upstream[rows, None].to(grad.dtype)).T @ hidden[rows]
        del grad
    return total.to(weight.dtype)
