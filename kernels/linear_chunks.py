"""Draft losses of hidden states, a chunk of rows at a time: the autograd function below ``linear_losses.py``.

The gradient is computed in the forward pass: d loss_n / d hidden_n = (d loss_n / d logits_n) @ weight depends on row n
alone, so it can be scaled by any upstream gradient afterwards, exactly. A gradient of the head cannot (it sums over
rows): where it is wanted, the logits are computed again in the backward pass.

With the vocabulary split between processes every process has all hidden states and its part of both heads. Each chunk
has the two collectives of ``vocab_parallel.py``; one more adds up the gradients of the hidden states at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bebop.kernels.draft_losses import needs_labels
from bebop.kernels.large_tensors import product
from bebop.kernels.losses import DraftLossOutput, scale_saved
from bebop.kernels.row_losses import NUMBERS, RowLosses, accumulator, check, row_losses
from bebop.kernels.row_threads import share, threads_for
from bebop.kernels.truncation import truncate_
from bebop.kernels.vocab_parallel import parallel_row_losses

# Rows of a thread's chunk at least: with so few, a product with the head costs a row 1.7 times what it does with 256
# (V = 32,768, d = 256, fp32).
LEAST = 16
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # hidden, weight, target_hidden, target_weight, labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is computed from the logits of a chunk."""

    kinds: tuple[str, ...]  # as in ``row_losses``; of several, labels are for hard_ce alone
    temperature: float
    eta: float
    target_top_p: float
    target_top_k: int
    rows: int  # whose logits exist at a time
    group: dist.ProcessGroup | None


def chunked_losses(inputs: Inputs, plan: Plan, weight_grad: bool) -> list[DraftLossOutput]:
    """The losses [N] of every kind, from one product with either head per chunk; gradients as in ``linear_losses``."""
    hidden, weight, target_hidden, target_weight, labels = inputs
    head = weight if weight_grad else weight.detach()
    # Asked here: inside of the Function gradients are always off, and no_grad does not show.
    wanted = torch.is_grad_enabled() and hidden.requires_grad
    targets = target_hidden.detach(), target_weight.detach()
    losses, statistics = _ChunkedLosses.apply(hidden, head, *targets, labels, plan, wanted)
    outputs = []
    for kind, loss, numbers in zip(plan.kinds, losses, statistics, strict=True):
        names = NUMBERS[1:] if needs_labels(kind) else NUMBERS[1:4]
        outputs.append(DraftLossOutput(loss=loss, **dict(zip(names, numbers, strict=False))))
    return outputs


class _ChunkedLosses(torch.autograd.Function):
    """Losses [kinds, N] and the other numbers [kinds, 4, N]; the gradient into the states is made on the way."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, Tensor]:
        inputs, (plan, wanted) = arguments[:5], arguments[5:]
        hidden, _, target_hidden, *_ = inputs
        numbers = torch.zeros(
            len(plan.kinds), 5, len(hidden), dtype=accumulator(hidden, target_hidden), device=hidden.device
        )
        gradient = hidden.new_empty(len(plan.kinds), *hidden.shape) if wanted else None
        _each_chunk(inputs, plan, lambda rows: _chunk(inputs, rows, plan, numbers, gradient))
        if gradient is not None and plan.group is not None:
            dist.all_reduce(gradient, group=plan.group)
        ctx.plan = plan
        ctx.save_for_backward(gradient, *(inputs if ctx.needs_input_grad[1] else ()))
        losses, statistics = numbers[:, 0].clone(), numbers[:, 1:]
        ctx.mark_non_differentiable(statistics)
        return losses, statistics

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradient, *inputs = ctx.saved_tensors
        into_hidden = None
        if gradient is not None and len(gradient) == 1:
            into_hidden = scale_saved(gradient[0], upstream[0])
        elif gradient is not None:
            into_hidden = sum(g * u[:, None] for g, u in zip(gradient, upstream, strict=True)).to(gradient.dtype)
        into_weight = _weight_gradient(upstream, tuple(inputs), ctx.plan) if inputs else None
        return into_hidden, into_weight, *[None] * 5


def _each_chunk(
    inputs: Inputs, plan: Plan, work: Callable[[slice], Any], then: Callable[[Any], object] | None = None
) -> None:
    """``share`` chunks between the threads of a CPU; one after the other where processes meet in each.

    All threads together hold the logits of ``plan.rows``. A product may round otherwise for another number of rows, so
    results are those of one thread up to rounding, and the same to the bit whenever threads are as many.

    One chunk at least: what cannot be computed is refused where the logits are.
    """
    hidden, weight, *_ = inputs
    count, elements = len(hidden), 0 if plan.group is not None else len(hidden) * len(weight)
    threads, rows = threads_for(elements, hidden.device), plan.rows
    if threads > 1:
        rows = max(min(rows // threads, -(-count // threads)), min(rows, LEAST))
    chunks = [slice(start, start + rows) for start in range(0, max(1, count), rows)]
    share(lambda block: work(chunks[block]), len(chunks), elements=elements, device=hidden.device, then=then)


def _chunk(inputs: Inputs, rows: slice, plan: Plan, numbers: Tensor, gradient: Tensor | None) -> None:
    """Fill in the numbers and the gradient of one chunk; its logits are gone on return."""
    pair = _logits(inputs, rows, plan)
    for at, kind in enumerate(plan.kinds):
        chunk = _row_losses(pair, kind, inputs[4], rows, plan, need_grad=gradient is not None)
        for row, number in zip(numbers[at], chunk.numbers(), strict=False):
            row[rows] = number
        if gradient is not None and chunk.grad is not None:
            gradient[at, rows] = chunk.grad @ inputs[1]
        del chunk  # or its gradient would live on beside the next one


def _logits(inputs: Inputs, rows: slice, plan: Plan) -> tuple[Tensor, Tensor]:
    """Of draft and target [R, V]; the target's are truncated."""
    hidden, weight, target_hidden, target_weight, _ = inputs
    target = product(target_hidden[rows], target_weight.T)
    return product(hidden[rows], weight.T), truncate_(target, plan.temperature, plan.target_top_p, plan.target_top_k)


def _row_losses(
    pair: tuple[Tensor, Tensor], kind: str, labels: Tensor | None, rows: slice, plan: Plan, need_grad: bool,
    row_weights: Tensor | None = None,
) -> RowLosses:  # fmt: skip
    chosen = labels[rows] if labels is not None and (needs_labels(kind) or len(plan.kinds) == 1) else None
    options: dict[str, Any] = {"kind": kind, "temperature": plan.temperature, "labels": chosen}
    whole = {**options, "eta": plan.eta, "need_grad": need_grad, "row_weights": row_weights}
    if plan.group is None:
        return row_losses(*pair, **whole)
    check(*pair, **options, whole=False)
    return parallel_row_losses(*pair, group=plan.group, **whole)


def _weight_gradient(upstream: Tensor, inputs: Inputs, plan: Plan) -> Tensor:
    """d (upstream . losses) / d weight [V, d], from logits computed again; summed over chunks in fp32 at least."""
    hidden, weight, *_ = inputs
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

    def parts(rows: slice) -> list[Tensor]:
        """Of a chunk, by kind."""
        pair, products = _logits(inputs, rows, plan), []
        for kind, factors in zip(plan.kinds, upstream, strict=True):
            grad = _row_losses(pair, kind, inputs[4], rows, plan, need_grad=True, row_weights=factors[rows]).grad
            assert grad is not None
            products.append(grad.T @ hidden[rows])
            del grad
        return products

    def add(products: list[Tensor]) -> None:
        for part in products:
            total.add_(part)

    _each_chunk(inputs, plan, parts, add)
    return total.to(weight.dtype)
