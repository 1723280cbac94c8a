"""Log-probs and entropies of tokens from hidden states, without ever holding the logits of all rows.

At 8192 rows and a vocabulary of 151,936 fp32 logits take 5 GB, and autograd would keep several such arrays. Here rows
go through the head in chunks, and the backward computes each chunk's logits once more: one extra product with the
head's matrix, a few per cent of an update.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

CHUNK_ELEMENTS = 1 << 24  # logits held at once: 64 MB in fp32


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """log p(target) [A] and the entropy of p in nats [A], p = softmax((hidden @ weight.T + bias) / temperature).

    hidden [A,d] (already gathered: answer tokens alone), weight [V,d], targets [A]. The matrix product is done in
    ``dtype`` (None: as ``hidden``), everything behind it in fp32 or better. Both results have gradients.
    """
    rows = max(1, chunk_elements // weight.shape[0])
    logp, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, dtype or hidden.dtype, rows)
    return logp, entropy


class _TokenLogprobs(torch.autograd.Function):
    """With z the scaled logits and H the entropy: dlogp_y/dz = 1[y] - p and dH/dz = -p (log p + H)."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.dtype, ctx.rows = temperature, dtype, rows
        ctx.set_materialize_grads(False)  # None tells that entropy takes no part in the loss
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        logps, entropies = [], []
        for part, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            logq = _log_softmax(part.to(dtype), cast_weight, cast_bias, temperature)
            logps.append(logq.gather(1, target[:, None])[:, 0])
            entropies.append(-(logq.exp() * logq).sum(1))
        logp, entropy = torch.cat(logps), torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        cast_weight, cast_bias = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        d_hidden, d_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        d_bias = None if bias is None else torch.zeros_like(bias)
        for start in range(0, len(hidden), ctx.rows):
            rows = slice(start, start + ctx.rows)
            part = hidden[rows].to(ctx.dtype)
            logq = _log_softmax(part, cast_weight, cast_bias, ctx.temperature)
            q = logq.exp()
            d_logits = torch.zeros_like(q)
            if grad_logp is not None:
                d_logits -= q * grad_logp[rows, None]
                d_logits.scatter_add_(1, targets[rows, None], grad_logp[rows, None].to(q.dtype))
            if grad_entropy is not None:
                d_logits -= q * (logq + entropy[rows, None]) * grad_entropy[rows, None]
            d_logits = (d_logits / ctx.temperature).to(ctx.dtype)
            d_hidden[rows] = (d_logits @ cast_weight).to(hidden.dtype)
            d_weight += (d_logits.T @ part).to(weight.dtype)
            if d_bias is not None:
                d_bias += d_logits.sum(0).to(bias.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """log softmax of the scaled logits [A,V] in fp32 or better."""
    logits = functional.linear(hidden, weight, bias)
    return (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
