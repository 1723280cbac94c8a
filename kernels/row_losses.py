"""Losses of a draft law q against a target law p, row by row of logits, with gradients: the primitive of training.

Every kind has a closed gradient into the draft's logits that depends on its own row alone. It is therefore made in the
forward pass, and a backward pass only scales it by the upstream gradient of the row. With q = softmax(draft / T),
p = softmax(target / T), alpha = sum min(p, q) and S = sum of q over the tokens with q <= p (SPEC 1.2):

=========  ===============================  ==================================================
kind       loss                             T * gradient
=========  ===============================  ==================================================
tv         1 - alpha                        q (S - 1[q <= p])
ce         H(p) + KL(p||q)                  q - p
hard_ce    -log q[label]                    q - 1[token = label]
kl         KL(p||q)                         q - p
rkl        KL(q||p)                         q (log q - log p - KL(q||p))
nla        -log alpha                       that of tv / alpha
hybrid     w KL(p||q) + (1 - w) (1 - alpha) w (q - p) + (1 - w) that of tv; w = exp(-eta alpha), held fixed
=========  ===============================  ==================================================

A logit of -inf is a token without mass. Losses are then infinite where mathematics says so: ce and kl where q = 0 < p
(gradient still finite), nla where no token is shared (gradient 0; in fp32 an overlap below 1e-38 is none), rkl where
p = 0 < q (that row's gradient is not finite; other rows are not touched). A row that has no finite logit in draft or
target is no law: all of its numbers and its gradient are NaN, whatever the kind; other rows are not touched.
"""

from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor

from bebop.errors import UserError

KINDS = ("tv", "ce", "hard_ce", "kl", "rkl", "nla", "hybrid")
NUMBERS = ("loss", "alpha", "draft_entropy", "target_entropy", "target_log")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class RowLosses:
    """Numbers per row in fp32 (fp64 for fp64 logits), and the gradient in the dtype of the draft's logits."""

    loss: Tensor  # [N]
    alpha: Tensor  # [N], sum_v min(p, q): the probability that rejection sampling accepts a draft
    draft_entropy: Tensor  # [N], nats
    target_entropy: Tensor  # [N], nats
    grad: Tensor | None  # [N, V], d loss_n / d draft_logits[n]; divided by the temperature already
    target_log: Tensor | None = None  # [N], log p[label], of hard_ce alone

    def numbers(self) -> tuple[Tensor, ...]:
        """Those of ``NUMBERS`` that there are."""
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
) -> RowLosses:
    """Loss, acceptance, entropies and gradient of each row; no autograd, see ``losses.py`` for that.

    Args:
        draft_logits: [N, V], any row stride.
        target_logits: [N, V], same device; its dtype may differ.
        kind: one of ``KINDS``.
        temperature: of both laws.
        labels: [N] tokens, for hard_ce and only there. One outside of [0, V) is an error on a CPU and NaN on a GPU.
        eta: of hybrid.
        need_grad: without it ``grad`` is None.

    Raises:
        UserError: shapes, dtypes, a kind, a temperature or labels that cannot be used.
    """
    check(draft_logits, target_logits, kind, temperature, labels)
    arguments = (draft_logits.detach(), target_logits.detach(), kind, temperature, labels, eta, need_grad)
    double = torch.float64 in (draft_logits.dtype, target_logits.dtype)
    if draft_logits.is_cuda and not double and find_spec("triton") is not None:
        from bebop.kernels.row_losses_triton import launch

        return launch(*arguments)
    from bebop.kernels.row_losses_cpu import run

    return run(*arguments)


def check(
    draft: Tensor, target: Tensor, kind: str, temperature: float, labels: Tensor | None, *, whole: bool = True
) -> None:
    """Refuse what ``row_losses`` cannot use, in one line that names it; ``whole``: V is the whole vocabulary."""
    if kind not in KINDS:
        raise UserError(f"unknown kind of draft loss {kind!r}; known are {', '.join(KINDS)}")
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
    if (labels is not None) != (kind == "hard_ce"):
        raise UserError(f"labels are for kind='hard_ce' and needed there; kind is {kind!r}")
    if labels is not None:
        check_labels(labels, draft.shape[0], draft.shape[1] if whole else None)


def check_labels(labels: Tensor, rows: int, vocabulary: int | None) -> None:
    """[N] integers; on a CPU also inside of [0, V), which on a GPU would cost a synchronisation."""
    if labels.shape != (rows,) or labels.is_floating_point() or labels.dtype == torch.bool:
        raise UserError(f"labels must be {rows} integers, not {labels.dtype} of shape {list(labels.shape)}")
    if vocabulary is None or labels.device.type != "cpu" or rows == 0:
        return
    if not 0 <= int(labels.min()) <= int(labels.max()) < vocabulary:
        raise UserError(f"labels must be tokens in [0, {vocabulary}), not {int(labels.min())} to {int(labels.max())}")


def accumulator(draft: Tensor, target: Tensor) -> torch.dtype:
    """fp32, or fp64 where either side is."""
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
    """``row_losses`` as the table above reads, with all of [N, V] at hand; give it fp64 for exact numbers."""
    dtype = accumulator(draft_logits, target_logits)
    q_log = (draft_logits.to(dtype) / temperature).log_softmax(-1)
    p_log = (target_logits.to(dtype) / temperature).log_softmax(-1)
    q, p = q_log.exp(), p_log.exp()
    alpha = torch.minimum(q, p).sum(-1)
    below = torch.where(q <= p, q, 0).sum(-1)
    kl = torch.where(p > 0, p * (p_log - q_log), 0).sum(-1)
    rkl = torch.where(q > 0, q * (q_log - p_log), 0).sum(-1)
    p_entropy = -torch.where(p > 0, p * p_log, 0).sum(-1)
    q_entropy = -torch.where(q > 0, q * q_log, 0).sum(-1)
    weight = (-eta * alpha).exp()
    tv_grad = q * (below[:, None] - (q <= p).to(dtype))
    ce_grad = q - p

    if kind == "tv":
        loss, grad = 1 - alpha, tv_grad
    elif kind == "nla":
        loss, grad = -alpha.log(), torch.where(alpha[:, None] > 0, tv_grad / alpha[:, None], 0)
    elif kind == "hybrid":
        loss = weight * kl + (1 - weight) * (1 - alpha)
        grad = weight[:, None] * ce_grad + (1 - weight[:, None]) * tv_grad
    elif kind == "rkl":
        loss, grad = rkl, torch.where(q > 0, q * (q_log - p_log - rkl[:, None]), 0)
    elif kind == "hard_ce":
        assert labels is not None
        column = labels[:, None].long()
        loss, grad = -q_log.gather(-1, column)[:, 0], q.scatter_add(-1, column, torch.full_like(q[:, :1], -1))
    else:
        loss, grad = kl + p_entropy if kind == "ce" else kl, ce_grad
    lost = torch.where(torch.isfinite(draft_logits.amax(-1) + target_logits.amax(-1)), 0.0, torch.nan).to(dtype)
    target_log = None if labels is None else p_log.gather(-1, labels[:, None].long())[:, 0] + lost
    scaled = ((grad + lost[:, None]) / temperature).to(draft_logits.dtype) if need_grad else None
    loss, alpha, q_entropy, p_entropy = (x + lost for x in (loss, alpha, q_entropy, p_entropy))
    return RowLosses(loss, alpha, q_entropy, p_entropy, scaled, target_log)
