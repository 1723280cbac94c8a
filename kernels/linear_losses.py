"""Draft losses from hidden states: the head's matrix product and the loss in chunks of rows, logits never kept.

For N rows, V tokens and a head of width d, logits of draft and target and their gradient would take 3 N V numbers; here
they take 3 ``chunk_rows`` V, and what is kept for the backward pass is one [N, d] tensor (see ``linear_chunks.py``).
The default leaves the head alone, as training of draft heads does.

Precision: products run in the dtype of the hidden states. In bf16, sums are fp32 inside the product and logits are
rounded to bf16 once, like the logits that an engine samples from; loss and statistics are fp32 from there on.
"""

import torch.distributed as dist
from torch import Tensor

from bebop.errors import UserError
from bebop.kernels import truncation
from bebop.kernels.chain_losses import corrected_loss, counted, product_loss
from bebop.kernels.draft_losses import loss_named
from bebop.kernels.linear_chunks import Plan, chunked_losses
from bebop.kernels.losses import DraftLossOutput
from bebop.kernels.row_losses import check_labels

# Rows per chunk: large enough to keep matrix units busy; a CPU gains nothing past some hundred rows.
CHUNK_ROWS = {"cuda": 1024, "cpu": 256}


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
    """The draft loss of each row, from hidden states and heads: equal to the unfused loss of ``hidden @ weight.T``.

    Args:
        hidden: [N, d], the draft's; receives the gradient.
        weight: [V, d], the draft's head; receives a gradient only with ``weight_grad``.
        target_hidden: [N, D], the target's; never a gradient.
        target_weight: [V, D], the target's head; may be ``weight`` itself. Never a gradient.
        kind: as in ``row_losses``.
        temperature: of both distributions.
        labels: [N], for hard_ce.
        eta: of hybrid.
        target_top_p: the target's distribution is cut to its nucleus, at this temperature, before the loss; 1 for all
        of it.
        target_top_k: the same for the K likeliest tokens, before the nucleus; 0 for all.
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
    """1 - expected accepted drafts / K_eff (SPEC Eq. 13), averaged over anchors, from hidden states and heads.

    Args:
        hidden: [N, K, d], the draft's at steps 1..K of N anchors; receives the gradient.
        weight: [V, d].
        target_hidden, target_weight: [N, K, D] and [V, D].
        mask: [N, K]; steps count up to the first one that is masked. Other rows are neither read nor computed.
        tokens: [N, K], the token of the data at each step, sampled from the target. With them the estimate is unbiased
            ("e2e-corrected", SPEC 1.3): step j counts alpha_j times the product over i < j of
            min(1, q_i(y_i) / p_i(y_i)), of which the gradient is kept too. Without them the prefix is the product of
            the alpha_i on this path, which is biased because accepted prefixes are not distributed like the data. They
            cost one more pass over the logits of a chunk, and a product with the head for the gradient of log q(token).
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
        """[N, K] of the rows; 0 for the others."""
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
    """Shapes [N, d], [V, d], [N, D], [V, D], labels [N], chunks of at least a row, a truncation with a meaning."""
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
    """[N, K, d] and [N, K, D]; [N, K] for mask and tokens."""
    if hidden.dim() != 3 or target_hidden.dim() != 3:
        shapes = f"{list(hidden.shape)} and {list(target_hidden.shape)}"
        raise UserError(f"hidden states must be [N, K, d] and [N, K, D], not {shapes}")
    for name, given in (("target_hidden", target_hidden[..., 0]), ("mask", mask), ("tokens", tokens)):
        if given is not None and given.shape != hidden.shape[:2]:
            raise UserError(f"{name} must be of [N, K] = {list(hidden.shape[:2])}, not {list(given.shape)}")
