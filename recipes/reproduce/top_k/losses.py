"""Total variation on the K tokens with the largest draft logits, in the paper's two possible readings (SPEC 1.4)."""

import torch
from torch import Tensor

from bebop.kernels.losses import tv_loss

MODES = ("full", "renormalised")


def top_k_tv(draft: Tensor, target: Tensor, top_k: int | None, mode: str) -> Tensor:
    """Return the loss [N] of logits [N, V], on the ``top_k`` largest draft logits; None: on the whole vocabulary.

    Only ``draft`` gets a gradient.
    full: distributions over the whole vocabulary, overlap over K tokens. The loss stays above 1 minus the target's mass
    there.
    renormalised: both distributions are restricted to K tokens and normalised there.
    Neither sees a token with large p and small q, which is where q should grow.
    """
    assert mode in MODES
    if top_k is None:
        return tv_loss(draft, target).loss
    chosen = draft.detach().topk(min(top_k, draft.shape[-1]), -1).indices
    if mode == "renormalised":
        return tv_loss(draft.gather(-1, chosen), target.gather(-1, chosen)).loss
    q, p = (x.log_softmax(-1).gather(-1, chosen).exp() for x in (draft, target.detach()))
    return 1 - torch.minimum(q, p).sum(-1)
