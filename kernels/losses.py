"""Losses for training a draft: of single steps, and of the product of acceptances over a chain of steps.

Gradients go into the draft alone and come out of the forward pass (see ``row_losses.py``): what is kept for the
backward pass is that gradient, one tensor of the logits' size, which the backward pass scales in place.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels.chain_losses import corrected_loss, counted, product_loss
from bebop.kernels.row_losses import NUMBERS, check, row_losses
from bebop.kernels.vocab_parallel import parallel_row_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLossOutput:
    """Numbers per row [N], fp32 (fp64 for fp64 logits); a gradient flows through ``loss`` alone."""

    loss: Tensor
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
    group: dist.ProcessGroup | None = None,
) -> DraftLossOutput:
    """The draft loss of each row; total variation unless ``kind`` says otherwise.

    Args:
        draft_logits: [N, V], any row stride; fp32, bf16, fp16 or fp64. Receives the gradient.
        target_logits: [N, V].
        temperature: of both distributions.
        kind: a row of ``draft_losses.LOSSES``: tv, ce, hard_ce, kl, rkl, nla, hybrid; formulas are there.
        labels: [N] tokens, for hard_ce.
        eta: of hybrid.
        group: processes between which the vocabulary is split; the logits are then [N, V / size] shards.

    Raises:
        UserError: what ``row_losses`` refuses.
    """
    check(draft_logits, target_logits, kind, temperature, labels, whole=group is None)
    options = {"temperature": temperature, "kind": kind, "labels": labels, "eta": eta, "group": group}
    return _rows(draft_logits, target_logits, options)


def e2e_tv_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    mask: Tensor,
    *,
    temperature: float = 1.0,
    tokens: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """1 - expected accepted drafts / K_eff (SPEC Eq. 13), averaged over the anchors that have a step.

    K_eff is the number of an anchor's steps before the first masked one; later ones are ignored, whatever they hold.

    Args:
        draft_logits: [N, K, V], of steps 1..K of N anchors; receives the gradient.
        target_logits: [N, K, V].
        mask: [N, K], the steps that exist.
        temperature: of both distributions.
        tokens: [N, K], the token that the data has at each step, sampled from the target. With them the estimate is
            unbiased ("e2e-corrected", SPEC 1.3): step j counts alpha_j times the product over i < j of
            min(1, q_i(y_i) / p_i(y_i)), of which the gradient is kept too. Without them the prefix is the product of
            the alpha_i on this path, which is biased because accepted prefixes are not distributed like the data.
        group: as in ``tv_loss``; tokens are those of the whole vocabulary.

    Returns:
        A scalar; 0 where no anchor has a step.

    Raises:
        UserError: shapes that do not fit, and what ``tv_loss`` refuses.
    """
    _check_steps(draft_logits, target_logits, mask, tokens)
    valid = counted(mask)
    draft, target = (x.reshape(-1, x.shape[-1]) for x in (draft_logits, target_logits))
    check(draft, target, "tv", temperature, None, whole=group is None)
    options = {"temperature": temperature, "group": group}
    steps = _rows(draft, target, {"kind": "tv", **options}, valid.flatten())
    alpha, loss = steps.alpha.view(valid.shape), steps.loss.view(valid.shape)
    if tokens is None:
        return product_loss(loss, alpha, valid)
    labels = torch.where(valid, tokens, 0).flatten()
    check(draft, target, "hard_ce", temperature, labels, whole=group is None)
    chosen = _rows(draft, target, {"kind": "hard_ce", "labels": labels, **options}, valid.flatten())
    assert chosen.target_log is not None
    return corrected_loss(loss, -chosen.loss.view(valid.shape), chosen.target_log.view(valid.shape), valid)


# ---- one row at a time


def _rows(draft: Tensor, target: Tensor, options: dict[str, Any], live: Tensor | None = None) -> DraftLossOutput:
    """Autograd around ``row_losses``; rows that are not ``live`` [N] count 0 and get gradient 0, even from NaN."""
    # Asked here: inside of the Function gradients are always off, and no_grad does not show.
    wanted = torch.is_grad_enabled() and draft.requires_grad
    loss, *others = _RowLoss.apply(draft, target.detach(), options, live, wanted)
    return DraftLossOutput(loss=loss, **dict(zip(NUMBERS[1:], others, strict=False)))  # target_log is of hard_ce alone


class _RowLoss(torch.autograd.Function):
    """The numbers [N] of ``NUMBERS``; the gradient is made in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, draft: Tensor, target: Tensor, options: dict[str, Any], live: Tensor | None, wanted: bool
    ) -> tuple[Tensor, ...]:
        rows = {key: value for key, value in options.items() if key != "group"}
        if options.get("group") is None:
            found = row_losses(draft, target, need_grad=wanted, **rows)
        else:
            found = parallel_row_losses(draft, target, group=options["group"], need_grad=wanted, **rows)
        numbers = found.numbers()
        if live is not None:
            numbers = tuple(torch.where(live, x, 0) for x in numbers)
            if found.grad is not None:
                found.grad[~live] = 0
        ctx.mark_non_differentiable(*numbers[1:])
        ctx.save_for_backward(found.grad)
        return numbers

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        if grad is None:
            return (None,) * 5
        if torch._C._autograd._get_current_graph_task_keep_graph():  # retain_graph: it will be needed again
            grad = grad.clone()
        return _scale(grad, upstream), None, None, None, None


def _scale(grad: Tensor, upstream: Tensor) -> Tensor:
    """Multiply rows [N, V] in place. On a CPU a bf16 tensor times fp32 numbers would be copied to fp32 as a whole."""
    if grad.is_cuda or grad.dtype == upstream.dtype:
        return grad.mul_(upstream[:, None])
    step = max(1, 2**16 // grad.shape[-1])
    for some, factors in zip(grad.split(step), upstream.split(step), strict=True):
        some.mul_(factors[:, None])
    return grad


# ---- what is refused


def _check_steps(draft: Tensor, target: Tensor, mask: Tensor, tokens: Tensor | None) -> None:
    """[N, K, V] twice, [N, K] for mask and tokens."""
    if draft.dim() != 3 or draft.shape != target.shape:
        shapes = f"{list(draft.shape)} and {list(target.shape)}"
        raise UserError(f"draft and target logits must both be [N, K, V], not {shapes}")
    for name, given in (("mask", mask), ("tokens", tokens)):
        if given is not None and given.shape != draft.shape[:2]:
            raise UserError(f"{name} must be [N, K] = {list(draft.shape[:2])}, not {list(given.shape)}")
