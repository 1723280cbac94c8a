"""Rivals of FIRP: Medusa heads and early exits. Neither is a part of the product."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from bebop.kernels.linear_losses import linear_draft_loss
from bebop.model.backbone import Policy, shared_tables
from bebop.model.mtp import gather_rows
from bebop.systems.firp.losses import Anchored, Drafts
from bebop.systems.firp.network import RealText


class Heads(nn.Module):
    """Draft heads with one vocabulary matrix per step, initialised from the language-model head."""

    layers: tuple[int, ...] = ()  # the heads read states after these layers, besides the last one

    def __init__(self, policy: Policy, steps: int) -> None:
        super().__init__()
        head = policy.backbone.get_output_embeddings().weight.detach()
        self.out = nn.ParameterList(nn.Parameter(head.clone()) for _ in range(steps))

    def states(self, step: int, real: RealText, anchors: Tensor) -> Tensor:
        """Return the states [B,A,d] to which the matrix of ``step`` (from 0) is applied."""
        raise NotImplementedError

    def own(self, step: int) -> dict[str, nn.Parameter]:
        """Return the parameters that are trained with a step."""
        return {f"out.{step}": self.out[step]}

    def drafts(self) -> Drafts:
        """Return a function that computes the logits of all steps."""

        def logits(real: RealText, anchors: Tensor) -> Tensor:
            states = [self.states(step, real, anchors) for step in range(len(self.out))]
            return torch.stack([x @ w.T for x, w in zip(states, self.out, strict=True)], 2)

        return logits


class MedusaHeads(Heads):
    """Medusa-1 (arXiv 2401.10774): out_k(h + SiLU(W_k h + b_k)) of the final state h, W_k and b_k initially zero."""

    def __init__(self, policy: Policy, steps: int) -> None:
        super().__init__(policy, steps)
        size = policy.backbone.config.hidden_size
        self.inner = nn.ModuleList(nn.Linear(size, size) for _ in range(steps))
        for one in self.inner.parameters():
            nn.init.zeros_(one)

    def states(self, step: int, real: RealText, anchors: Tensor) -> Tensor:
        """See ``Heads``."""
        hidden = gather_rows(real.hidden, anchors)
        return hidden + silu(self.inner[step](hidden))

    def own(self, step: int) -> dict[str, nn.Parameter]:
        """See ``Heads``."""
        return super().own(step) | {f"inner.{step}.{n}": p for n, p in self.inner[step].named_parameters()}


class EarlyExits(Heads):
    """Early exits: out_k(norm(h)) of the state h after layer t_k. The norm is the model's last one, frozen."""

    def __init__(self, policy: Policy, layers: tuple[int, ...]) -> None:
        super().__init__(policy, len(layers))
        self.layers = layers
        self._norm: tuple[Callable[[Tensor], Tensor], ...] = (policy.backbone.get_decoder().norm,)  # not registered

    def states(self, step: int, real: RealText, anchors: Tensor) -> Tensor:
        """See ``Heads``."""
        return self._norm[0](gather_rows(real.entering[self.layers[step]], anchors))


def head_loss(policy: Policy, heads: Heads, texts: Anchored, token_ids: Tensor, step: int, kind: str) -> Tensor:
    """Return the loss of a head, as ``firp_loss`` does; ``hard_ce`` needs ``token_ids`` [B,L] of the texts."""
    _, target_weight = shared_tables(policy)
    last = token_ids.shape[1] - 1
    counted, anchors = texts.mask(step)[..., -1], texts.anchors.clamp_max(last)
    states = heads.states(step - 1, texts.real, anchors)[counted]
    targets = gather_rows(texts.real.hidden, (anchors + step).clamp_max(last))[counted]
    labels = token_ids.gather(1, (anchors + step + 1).clamp_max(last))[counted] if kind == "hard_ce" else None
    losses = linear_draft_loss(
        states, heads.out[step - 1], targets, target_weight, kind=kind, labels=labels, weight_grad=True
    ).loss
    return losses.sum() / counted.sum().clamp_min(1)
