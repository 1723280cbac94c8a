"""Hidden states and heads for tests of the losses that never hold all logits, and those losses from all logits."""

from typing import Any

import torch
from torch import Tensor

from bebop.kernels.linear_losses import linear_draft_loss
from bebop.kernels.losses import DraftLossOutput
from tests.kernels.unfused import by_definition, labels_for

ROWS, VOCABULARY = 11, 37
ANCHORS, STEPS = 4, 3
MASK = torch.tensor([[1, 1, 1], [1, 1, 0], [0, 1, 1], [1, 0, 1]]).bool()
Inputs = tuple[Tensor, Tensor, Tensor, Tensor]  # hidden states and head of the draft, then of the target


def states(
    rows: int = ROWS, vocabulary: int = VOCABULARY, width: int = 8, dtype: torch.dtype = torch.float32
) -> Inputs:
    """Hidden states and heads of a draft and a wider target whose distributions overlap by about half."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocabulary, width, generator=generator, dtype=torch.float64) * 0.6
    wide = torch.cat((hidden, torch.randn(rows, 3, generator=generator, dtype=torch.float64)), 1)
    head = torch.cat((weight, torch.randn(vocabulary, 3, generator=generator, dtype=torch.float64) * 0.3), 1)
    hidden, weight, wide, head = (x.to(dtype) for x in (hidden, weight, wide, head))
    return hidden.requires_grad_(), weight, wide, head


def anchors(dtype: torch.dtype = torch.float64) -> Inputs:
    """The states of ``states`` as [N, K, .]."""
    hidden, weight, wide, head = states(ANCHORS * STEPS, dtype=dtype)
    return hidden.detach().view(ANCHORS, STEPS, -1).requires_grad_(), weight, wide.view(ANCHORS, STEPS, -1), head


def logits_of(hidden: Tensor, weight: Tensor, wide: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
    return hidden @ weight.T, wide @ head.T


def unfused(inputs: Inputs, kind: str, temperature: float = 1.0) -> DraftLossOutput:
    """Plain autograd over all logits."""
    return by_definition(*logits_of(*inputs), kind, temperature)


def fused(inputs: Inputs, kind: str = "tv", **options: Any) -> DraftLossOutput:
    """``linear_draft_loss`` with labels where the kind takes them."""
    labels = labels_for(kind, len(inputs[0]), len(inputs[1]))
    return linear_draft_loss(*inputs, kind=kind, labels=labels, **options)


def tokens_of(steps: Tensor, seed: int = 5) -> Tensor:
    """Tokens [N, K] that the data might have."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, steps.shape[:2], generator=generator)
