"""The losses that are compared, by name: those of ``bebop.trainer``, and total variation on the K largest logits."""

from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bebop.trainer.objectives import OBJECTIVES, Objective, Steps
from recipes.reproduce.top_k.losses import top_k_tv

CHUNK = 128  # rows whose logits exist at a time
TOP_K = (4, 64)


def top_k_mean(steps: Steps, top_k: int, mode: str) -> Tensor:
    """``top_k_tv`` averaged over the steps that exist, logits made again in the backward pass."""
    draft, target = steps.draft[steps.mask], steps.target[steps.mask]

    def loss(q: Tensor, p: Tensor) -> Tensor:
        return top_k_tv((q @ steps.weight.T).float(), (p @ steps.weight.T).float(), top_k, mode).sum()

    parts = [
        checkpoint(loss, q, p, use_reentrant=False)
        for q, p in zip(draft.split(CHUNK), target.split(CHUNK), strict=True)
    ]
    total = torch.stack(parts).sum() if parts else steps.draft.sum() * 0
    return total / max(1, len(draft))


COMPARED: Mapping[str, Objective] = {
    **{name: OBJECTIVES[name] for name in OBJECTIVES if name != "jsd"},
    **{f"top_{k}": Objective(partial(top_k_mean, top_k=k, mode="full")) for k in TOP_K},
    **{f"top_{k}_renormalised": Objective(partial(top_k_mean, top_k=k, mode="renormalised")) for k in TOP_K},
}
