"""Pivot classifier of PAD (SPEC 4.2): tells from a verification pass whether a candidate token matters."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

SMALLEST = 1e-8  # lower bound of p inside log p
Position = Literal["pred", "cand"]
Features = Literal["all", "hidden", "scalars"]


class PivotNetwork(nn.Module):
    """Two-layer network over a hidden state h [d] of the target and three numbers: H(p), p and log p of a candidate.

    g = ReLU(W_h h + b_h); m = ReLU(W_m [g; H; p; log p] + b_m); score = softmax(W_o m + b_o)[pivot]. Every feature is
    standardised by statistics of the training split, stored as buffers. ``log p`` is our addition.
    """

    hidden_mean: Tensor
    hidden_scale: Tensor
    scalar_mean: Tensor
    scalar_scale: Tensor

    def __init__(
        self,
        *,
        size: int,
        layer: int,
        position: Position = "pred",
        features: Features = "all",
        inner: int = 64,
        middle: int = 32,
    ) -> None:
        """Create the network for states of a ``layer`` of the target.

        ``position``: the state that predicts the candidate, or the candidate's own. ``size``: d; ``features``: visible
        inputs, for ablations; ``inner``, ``middle``: widths of g and m.
        """
        super().__init__()
        self.layer, self.position, self.features = layer, position, features
        self.of_hidden = nn.Linear(size, inner)
        self.of_both = nn.Linear(inner + 3, middle)
        self.out = nn.Linear(middle, 2)
        for name, width in (("hidden", size), ("scalar", 3)):
            self.register_buffer(f"{name}_mean", torch.zeros(width))
            self.register_buffer(f"{name}_scale", torch.ones(width))

    @torch.no_grad()
    def standardise(self, hidden: Tensor, p: Tensor, entropy: Tensor) -> None:
        """Store means and deviations of a training split: hidden [n, d], p [n], entropy [n]."""
        scalars = torch.stack([entropy, p, p.clamp_min(SMALLEST).log()], -1)
        for name, values in (("hidden", hidden), ("scalar", scalars)):
            values = values.to(self.hidden_mean.dtype)
            getattr(self, f"{name}_mean").copy_(values.mean(0))
            getattr(self, f"{name}_scale").copy_(values.std(0, unbiased=False).clamp_min(1e-6))

    def encode(self, hidden: Tensor) -> Tensor:
        """Return the encoding [..., inner] of hidden states [..., d], which all candidates of a position share."""
        hidden = (hidden.to(self.hidden_mean.dtype) - self.hidden_mean) / self.hidden_scale
        encoded = self.of_hidden(hidden).relu()
        return torch.zeros_like(encoded) if self.features == "scalars" else encoded

    def classify(self, encoded: Tensor, p: Tensor, entropy: Tensor) -> Tensor:
        """Return logits [..., 2] (not a pivot, a pivot) of candidates from encoded [..., inner], p and entropy (nats)
        [...].
        """
        scalars = torch.stack([entropy, p, p.clamp_min(SMALLEST).log()], -1).to(encoded.dtype)
        scalars = (scalars - self.scalar_mean) / self.scalar_scale
        if self.features == "hidden":
            scalars = torch.zeros_like(scalars)
        return self.out(self.of_both(torch.cat([encoded, scalars], -1)).relu())

    def forward(self, hidden: Tensor, p: Tensor, entropy: Tensor) -> Tensor:
        """Return logits [..., 2] from hidden [..., d], p [...] and entropy [...] (nats)."""
        return self.classify(self.encode(hidden), p, entropy)

    def score(self, encoded: Tensor, p: Tensor, entropy: Tensor) -> Tensor:
        """Return the probability [...] that a candidate is a pivot."""
        return self.classify(encoded, p, entropy).softmax(-1)[..., 1]


def default_layer(layers: int) -> int:
    """Return the default layer to read, counted from 0: three quarters up (the paper does not say)."""
    return min(layers - 1, max(0, math.ceil(0.75 * layers) - 1))
