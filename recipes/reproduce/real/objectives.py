"""The losses that are compared, by name: those of ``bebop.trainer``, and total variation on the K largest logits."""

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
    """``top_k_tv`` averaged over the steps that exist, logits never kept."""
    draft, target = steps.draft[steps.mask], steps.target[steps.mask]

    def loss(q: Tensor, p: Tensor) -> Tensor:
        return top_k_tv((q @ steps.weight.T).float(), (p @ steps.weight.T).float(), top_k, mode).sum()

    total: Tensor = _Chunked.apply(draft, target.detach(), loss)
    return total / max(1, len(draft))


class _Chunked(torch.autograd.Function):
    """A sum over rows [N, d], chunk by chunk; the gradient is made on the way, as in ``kernels/linear_losses.py``.

    Logits that are made again in the backward pass would cost as much as those of the forward pass.
    """

    @staticmethod
    def forward(ctx: Any, draft: Tensor, target: Tensor, loss: Loss) -> Tensor:
        """The sum; ``loss`` of some rows of both."""
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
