"""Losses of the comparison by name: those of ``bebop.trainer``, and total variation on the K largest logits."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bebop.trainer.objectives import OBJECTIVES, Objective, Steps
from recipes.reproduce.top_k.losses import top_k_tv

CHUNK = 128  # rows whose logits exist at a time
TOP_K = (4, 64)
Loss = Callable[[Tensor, Tensor], Tensor]


def top_k_mean(steps: Steps, top_k: int, mode: str) -> Tensor:
    """Return ``top_k_tv`` averaged over the existing steps, without keeping the logits."""
    draft, target = steps.draft[steps.mask], steps.target[steps.mask]

    def loss(q: Tensor, p: Tensor) -> Tensor:
        return top_k_tv((q @ steps.weight.T).float(), (p @ steps.weight.T).float(), top_k, mode).sum()

    total: Tensor = _Chunked.apply(draft, target.detach(), loss)
    return total / max(1, len(draft))


class _Chunked(torch.autograd.Function):
    """Sum of a loss over rows [N, d], chunk by chunk, with the gradient computed in the forward pass.

    ``kernels/linear_losses.py`` does the same. Recomputing the logits in the backward pass would cost as much as the
    forward pass.
    """

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor, loss: Loss) -> Tensor:
        """Return the sum of ``loss`` over chunks of draft and target rows."""
        total, gradient = draft.new_zeros((), dtype=torch.float32), torch.zeros_like(draft)
        for start in range(0, len(draft), CHUNK):
            rows = slice(start, start + CHUNK)
            with torch.enable_grad():
                leaf = draft[rows].detach().requires_grad_()
                value = loss(leaf, target[rows])
            (gradient[rows],) = torch.autograd.grad(value, leaf)
            total += value.detach()
        ctx.save_for_backward(gradient)
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * upstream).to(gradient.dtype), None, None


TOP_K_LOSSES: Mapping[str, Objective] = {
    **{f"top_{k}": Objective(partial(top_k_mean, top_k=k, mode="full")) for k in TOP_K},
    **{f"top_{k}_renormalised": Objective(partial(top_k_mean, top_k=k, mode="renormalised")) for k in TOP_K},
}
COMPARED: Mapping[str, Objective] = {**{name: OBJECTIVES[name] for name in OBJECTIVES if name != "jsd"}, **TOP_K_LOSSES}
