"""Draft losses from hidden states: the head's matrix product and the loss in chunks of rows, logits never kept.

For N rows, V tokens and a head of width d, logits of draft and target and their gradient would take 3 N V numbers. Here
they take 3 ``chunk_rows`` V, and the backward pass needs one [N, d] tensor. By default the head gets no gradient, as in
training of draft heads.

Precision: products run in the dtype of the hidden states. In bf16, sums are fp32 inside the product and logits are
rounded to bf16 once, like the logits that an engine samples from; loss and statistics are fp32 from there on.

The gradient is computed in the forward pass: d loss_n / d hidden_n = (d loss_n / d logits_n) @ weight depends on row n
alone, so any upstream gradient can scale it afterwards, exactly. This does not work for a gradient of the head, which
sums over rows. With ``weight_grad`` the backward pass computes the logits again.

With the vocabulary split between processes every process has all hidden states and its part of both heads. Each chunk
has the two collectives of ``vocab_parallel.py``; one more adds up the gradients of the hidden states at the end.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels import truncation
from bebop.kernels.draft_losses import loss_named, needs_labels
from bebop.kernels.losses import DraftLossOutput, scale_saved
from bebop.kernels.row_losses import NUMBERS, RowLosses, accumulator, check, check_labels, row_losses
from bebop.kernels.row_threads import product, share, threads_for
from bebop.kernels.vocab_parallel import parallel_row_losses

# Rows per chunk: large enough to keep matrix units busy; a CPU gains nothing past some hundred rows.
CHUNK_ROWS = {"cuda": 1024, "cpu": 256}
# Fewest rows of a thread's chunk: with so few, a product with the head costs a row 1.7 times what it does with 256
# (V = 32,768, d = 256, fp32).
MIN_CHUNK_ROWS = 16
Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]  # hidden, weight, target_hidden, target_weight, labels


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a computation: the losses to compute from the logits of each chunk, and how."""

    kinds: tuple[str, ...]  # as in ``row_losses``; of several, labels are for hard_ce alone
    temperature: float
    eta: float
    target_top_p: float
    target_top_k: int
    rows: int  # whose logits exist at a time
    group: dist.ProcessGroup | None


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
    target_top_p: float = 1.0,
    target_top_k: int = 0,
    chunk_rows: int | None = None,
    weight_grad: bool = False,
    group: dist.ProcessGroup | None = None,
) -> DraftLossOutput:
    """Return the draft loss of each row, equal to the unfused loss of ``hidden @ weight.T``.

    Args:
        hidden: [N, d], the draft's; receives the gradient.
        weight: [V, d], the draft's head; receives a gradient only with ``weight_grad``.
        target_hidden: [N, D], the target's; never a gradient.
        target_weight: [V, D], the target's head; may be ``weight`` itself. Never a gradient.
        kind: as in ``row_losses``.
        temperature: of both distributions.
        labels: [N], for hard_ce.
        eta: of hybrid.
        target_top_p: cuts the target's distribution to its nucleus, at this temperature, before the loss; 1 keeps all.
        target_top_k: cuts it to the K likeliest tokens, before the nucleus; 0 keeps all.
        chunk_rows: rows whose logits exist at a time, in all threads; None for 1024 on a GPU and 256 on a CPU.
        weight_grad: also give the head its gradient, for one more product per chunk and a second pass over the logits;
            each thread then holds a tensor of the head's size.
        group: processes between which the vocabulary is split: the heads are then [V / size, .] parts in the order of
            ranks, the hidden states and the results the same in every process. Not together with a truncated target.

    Returns:
        DraftLossOutput of [N] each; only ``loss`` carries a gradient.

    Raises:
        UserError: shapes that do not fit, a chunk of less than one row, or a truncation that has no meaning.
    """
    plan = Plan(
        kinds=(kind,), temperature=temperature, eta=eta, target_top_p=target_top_p, target_top_k=target_top_k,
        rows=_rows_of_chunk(hidden, chunk_rows), group=group,
    )  # fmt: skip
    inputs = hidden, weight, target_hidden, target_weight, labels
    _check(*inputs, plan)
    (losses,) = chunked_losses(inputs, plan, weight_grad)
    return losses


def linear_e2e_tv_loss(
    hidden: Tensor,
    weight: Tensor,
    target_hidden: Tensor,
    target_weight: Tensor,
    mask: Tensor,
    *,
    tokens: Tensor | None = None,
    temperature: float = 1.0,
    target_top_p: float = 1.0,
    target_top_k: int = 0,
    chunk_rows: int | None = None,
    weight_grad: bool = False,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """Return 1 - expected accepted drafts / K_eff (SPEC Eq. 13), averaged over anchors, from hidden states and heads.

    Args:
        hidden: [N, K, d], the draft's at steps 1..K of N anchors; receives the gradient.
        weight: [V, d].
        target_hidden, target_weight: [N, K, D] and [V, D].
        mask: [N, K]; steps count up to the first one that is masked. Other rows are neither read nor computed.
        tokens: [N, K], the token of the data at each step, sampled from the target. With them the estimate is unbiased
            ("e2e-corrected", SPEC 1.3): step j counts alpha_j times the product over i < j of min(1, q_i(y_i) /
            p_i(y_i)), and that product keeps its gradient. Without them the prefix is the product of the alpha_i on
            this path. That is biased, because accepted prefixes are not distributed like the data. Tokens cost one more
            pass over the logits of a chunk, and a product with the head for the gradient of log q(token).
        temperature: of both distributions.
        target_top_p, target_top_k: as in ``linear_draft_loss``; tokens are then data of the truncated distribution.
        chunk_rows, weight_grad, group: as in ``linear_draft_loss``.

    Returns:
        A scalar; 0 where no anchor has a step. Without tokens the gradient of step k is its weight from ``e2e_weights``
        times that of its TV loss, without a division by an acceptance.

    Raises:
        UserError: as ``linear_draft_loss``, and a mask or tokens of another shape.
    """
    _check_steps(hidden, target_hidden, mask, tokens)
    valid = counted(mask)
    # Padding is left out before the product with the head, which is where the time goes; it may hold anything.
    rows = valid.flatten().nonzero()[:, 0]
    draft, target = (x.flatten(0, 1)[rows] for x in (hidden, target_hidden.detach()))
    labels = None if tokens is None else tokens.flatten()[rows]
    plan = Plan(
        kinds=("tv",) if labels is None else ("tv", "hard_ce"), temperature=temperature, eta=0.0,
        target_top_p=target_top_p, target_top_k=target_top_k, rows=_rows_of_chunk(hidden, chunk_rows), group=group,
    )  # fmt: skip
    inputs = draft, weight, target, target_weight, labels
    _check(*inputs, plan)
    tv, *chosen = chunked_losses(inputs, plan, weight_grad)

    def back(number: Tensor | None) -> Tensor:
        """Return the numbers of the rows as [N, K]; 0 for all other steps."""
        assert number is not None
        return number.new_zeros(valid.numel()).index_put((rows,), number).view_as(valid)

    if not chosen:
        return product_loss(back(tv.loss), back(tv.alpha), valid)
    return corrected_loss(back(tv.loss), back(-chosen[0].loss), back(chosen[0].target_log), valid)


def _rows_of_chunk(hidden: Tensor, chunk_rows: int | None) -> int:
    return CHUNK_ROWS.get(hidden.device.type, 1024) if chunk_rows is None else chunk_rows


def _check(
    hidden: Tensor, weight: Tensor, target_hidden: Tensor, target_weight: Tensor, labels: Tensor | None, plan: Plan
) -> None:
    """Raise ``UserError`` unless shapes, labels, chunk size and truncation can be used.

    The shapes are [N, d], [V, d], [N, D], [V, D] and labels [N]; a chunk has at least one row.
    """
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
    if plan.rows < 1:
        raise UserError(f"chunk_rows must be at least 1, not {plan.rows}")
    if labels is not None:
        check_labels(labels, len(hidden), len(weight) if plan.group is None else None)
    truncation.check(plan.target_top_p, plan.target_top_k)
    if plan.target_top_p < 1 or plan.target_top_k > 0:
        for kind in plan.kinds:
            divergence = loss_named(kind).divergence
            if divergence is not None and not divergence.bounded:
                reason = "is infinite where the target is truncated: leave target_top_p and target_top_k"
                raise UserError(f"kind {kind!r} {reason}")
        if plan.group is not None:
            raise UserError("a truncated target needs whole rows: it does not go together with a process group")


def _check_steps(hidden: Tensor, target_hidden: Tensor, mask: Tensor, tokens: Tensor | None) -> None:
    """Raise ``UserError`` unless hidden states are [N, K, d] and [N, K, D], and mask and tokens [N, K]."""
    if hidden.dim() != 3 or target_hidden.dim() != 3:
        shapes = f"{list(hidden.shape)} and {list(target_hidden.shape)}"
        raise UserError(f"hidden states must be [N, K, d] and [N, K, D], not {shapes}")
    for name, given in (("target_hidden", target_hidden[..., 0]), ("mask", mask), ("tokens", tokens)):
        if given is not None and given.shape != hidden.shape[:2]:
            raise UserError(f"{name} must be of [N, K] = {list(hidden.shape[:2])}, not {list(given.shape)}")


# ---- the autograd function


def chunked_losses(inputs: Inputs, plan: Plan, weight_grad: bool) -> list[DraftLossOutput]:
    """Return the losses [N] of every kind, from one product with either head per chunk.

    Gradients are as in ``linear_draft_loss``.
    """
    hidden, weight, target_hidden, target_weight, labels = inputs
    head = weight if weight_grad else weight.detach()
    # Checked here: inside of the Function gradients are always off, and no_grad does not show.
    wanted = torch.is_grad_enabled() and hidden.requires_grad
    targets = target_hidden.detach(), target_weight.detach()
    losses, statistics = _ChunkedLosses.apply(hidden, head, *targets, labels, plan, wanted)
    outputs = []
    for kind, loss, numbers in zip(plan.kinds, losses, statistics, strict=True):
        names = NUMBERS[1:] if needs_labels(kind) else NUMBERS[1:4]
        outputs.append(DraftLossOutput(loss=loss, **dict(zip(names, numbers, strict=False))))
    return outputs


class _ChunkedLosses(torch.autograd.Function):
    """Autograd function: losses [kinds, N] and statistics [kinds, 4, N].

    The forward pass also computes the gradient of the hidden states.
    """

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
    """Share chunks between the threads of a CPU as ``share`` does; run them one by one if a process group is set.

    All threads together hold the logits of ``plan.rows`` rows. A product may round otherwise for another number of
    rows. So results equal those of one thread up to rounding, and are the same to the bit for the same number of
    threads.

    There is at least one chunk, so that the loss itself refuses inputs that it cannot use.
    """
    hidden, weight, *_ = inputs
    count, elements = len(hidden), 0 if plan.group is not None else len(hidden) * len(weight)
    threads, rows = threads_for(elements, hidden.device), plan.rows
    if threads > 1:
        rows = max(min(rows // threads, -(-count // threads)), min(rows, MIN_CHUNK_ROWS))
    chunks = [slice(start, start + rows) for start in range(0, max(1, count), rows)]
    share(lambda block: work(chunks[block]), len(chunks), elements=elements, device=hidden.device, then=then)


def _chunk(inputs: Inputs, rows: slice, plan: Plan, numbers: Tensor, gradient: Tensor | None) -> None:
    """Fill in the numbers and the gradient of one chunk; its logits are freed on return."""
    pair = _logits(inputs, rows, plan)
    for at, kind in enumerate(plan.kinds):
        chunk = _row_losses(pair, kind, inputs[4], rows, plan, need_grad=gradient is not None)
        for row, number in zip(numbers[at], chunk.numbers(), strict=False):
            row[rows] = number
        if gradient is not None and chunk.grad is not None:
            gradient[at, rows] = chunk.grad @ inputs[1]
        del chunk  # or its gradient would live on beside the next one


def _logits(inputs: Inputs, rows: slice, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return the logits of draft and target [R, V] of some rows, with the target's truncated."""
    hidden, weight, target_hidden, target_weight, _ = inputs
    target = product(target_hidden[rows], target_weight.T)
    return product(hidden[rows], weight.T), truncation.truncate_(
        target, plan.temperature, plan.target_top_p, plan.target_top_k
    )


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
    """Return d (upstream . losses) / d weight [V, d], from logits computed again.

    The sum over chunks is in fp32 at least.
    """
    hidden, weight, *_ = inputs
    total = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))

    def parts(rows: slice) -> list[Tensor]:
        """Return the gradient products [V, d] of a chunk, one per kind."""
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


# ---- the loss of a chain, from the numbers of its steps [N, K], for N anchors. Steps from an anchor's first masked
# step on do not count, whatever they hold.


def counted(mask: Tensor) -> Tensor:
    """Return which steps [N, K] lie before the first masked one (bool)."""
    return mask.bool().cumprod(-1).bool()


def product_loss(loss: Tensor, alpha: Tensor, valid: Tensor) -> Tensor:
    """Return 1 - sum_j alpha_1 ... alpha_j / K_eff (SPEC Eq. 13), averaged over anchors.

    All arguments are [N, K], 0 where not ``valid``.

    ``loss`` are the TV losses 1 - alpha, which carry the gradient.
    """
    value = _mean(alpha.cumprod(-1).sum(-1), valid)  # alpha is 0 from the first masked step on, and so is the product
    # The value is that of the formula, the gradient that of the weighted TV losses: the bracket is 0.
    return value + (e2e_weights(alpha, valid) * (loss - loss.detach())).sum() / _anchors(valid)


def corrected_loss(loss: Tensor, draft_log: Tensor, target_log: Tensor, valid: Tensor) -> Tensor:
    """Return the unbiased loss of a chain for data y ~ p (SPEC 1.3).

    Step j counts alpha_j times the product of min(1, q(y) / p(y)) over the steps before it. ``draft_log`` and
    ``target_log`` are the logarithms of q(y) and p(y) [N, K]. Gradients flow through ``loss``, the TV losses, and
    ``draft_log``.
    """
    # Clamped before the exponential: the derivative of a ratio above 1 is 0. p(y) = 0 cannot be data: it counts as 1.
    known = valid & (target_log > -torch.inf)
    ratio = torch.where(known, draft_log - target_log, 0).clamp_max(0).exp()
    return _mean((_before(ratio) * (1 - loss) * valid).sum(-1), valid)


def e2e_weights(alpha: Tensor, mask: Tensor) -> Tensor:
    """Return w_k [N, K] of SPEC Eq. 13: minus the derivative of an anchor's loss by alpha_k.

    It scales the TV gradient of step k. w_k = P R_k / K_eff, with P the product of alpha before k and R_k = 1 +
    alpha_(k+1) R_(k+1). So there is no division by an alpha, which may be 0. Steps from the first masked one on have
    weight 0. alpha and mask are [N, K].
    """
    valid = counted(mask)
    alpha = torch.where(valid, alpha, 0)
    rest = torch.ones_like(alpha)
    for k in range(alpha.shape[-1] - 2, -1, -1):
        rest[:, k] = 1 + alpha[:, k + 1] * rest[:, k + 1]
    return _before(alpha) * rest * valid / valid.sum(-1, keepdim=True).clamp_min(1)


def _before(factors: Tensor) -> Tensor:
    """Return the products [N, K] of all factors before each step; 1 at the first step."""
    return torch.cat((torch.ones_like(factors[:, :1]), factors[:, :-1]), -1).cumprod(-1)


def _anchors(valid: Tensor) -> Tensor:
    """Return the number of anchors that have a step, at least 1."""
    return valid.any(-1).sum().clamp_min(1)


def _mean(accepted: Tensor, valid: Tensor) -> Tensor:
    """Return 1 - accepted / K_eff, averaged over the anchors that have a step; 0 where none has."""
    length = valid.sum(-1)
    return torch.where(length > 0, 1 - accepted / length.clamp_min(1), 0).sum() / _anchors(valid)
