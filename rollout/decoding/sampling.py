"""Sampling distributions: from logits to probabilities, in one order for target and draft (SPEC 0.4).

The order is penalty -> temperature -> top-k -> top-p -> min-p -> renormalise. Verification is lossless only if p and q
are exactly the distributions that tokens are drawn from, so one function serves both.
"""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bebop.kernels.truncation import BORDER


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSampling:
    """Sampling parameters of B rows, each [B]; ``None`` where all rows have the neutral value."""

    temperature: Tensor | None = None  # 0 is greedy
    top_k: Tensor | None = None  # 0 is all
    top_p: Tensor | None = None
    min_p: Tensor | None = None
    penalty: Tensor | None = None

    def probs(self, logits: Tensor, seen: Tensor | None = None) -> Tensor:
        """Return the distributions [B, n, V] (float32) of logits [B, n, V].

        ``seen`` [B, n, V] marks the tokens that are penalised.
        """
        logits = self.penalised(logits.float(), seen)
        if self.temperature is None:
            probs = logits.softmax(-1)
        else:
            greedy = self.temperature == 0
            divisor = torch.where(greedy, torch.ones_like(self.temperature), self.temperature)[:, None, None]
            one_hot = torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
            probs = torch.where(greedy[:, None, None], one_hot, (logits / divisor).softmax(-1))
        if self.top_k is not None or self.top_p is not None:
            probs = self._nucleus(probs)
        if self.min_p is not None:
            floor = (1 - BORDER) * self.min_p[:, None, None] * probs.amax(-1, keepdim=True)
            probs = _cut(probs, probs >= floor, self.min_p > 0)
        return probs

    def of(self, rows: Tensor) -> "BatchSampling":
        """Return the parameters of the given rows, in their order."""
        columns = {one.name: getattr(self, one.name) for one in fields(self)}
        return BatchSampling(**{name: None if column is None else column[rows] for name, column in columns.items()})

    @property
    def asked(self) -> tuple[bool, ...]:
        """Return for each parameter whether any row has another than the neutral value."""
        return tuple(getattr(self, one.name) is not None for one in fields(self))

    @property
    def truncates(self) -> bool:
        """Return whether any row truncates its distribution."""
        return self.top_k is not None or self.top_p is not None or self.min_p is not None

    @property
    def plain(self) -> bool:
        """Return whether all distributions are just those of logits over a temperature."""
        return not self.truncates and self.penalty is None

    def penalised(self, logits: Tensor, seen: Tensor | None) -> Tensor:
        """Return logits [B, n, V] with penalties on the tokens that ``seen`` [B, n, V] marks."""
        if self.penalty is None or seen is None:
            return logits
        factor = self.penalty[:, None, None]
        return torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)

    def _nucleus(self, probs: Tensor) -> Tensor:
        """Apply top-k, then top-p to the remaining mass [B, n, V]; of equal tokens at the border the first are kept."""
        ranked, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        if self.top_k is not None:
            limit = torch.where(self.top_k == 0, probs.shape[-1], self.top_k)[:, None, None]
            ranked = _cut(ranked, torch.arange(probs.shape[-1], device=probs.device) < limit, self.top_k > 0)
        if self.top_p is not None:
            # A token is kept while the mass before it is below p by more than rounding. The first one always is.
            keep = ranked.cumsum(-1) - ranked < self.top_p[:, None, None] - BORDER
            keep[..., 0] = True
            ranked = _cut(ranked, keep, self.top_p < 1)
        return torch.zeros_like(probs).scatter_(-1, order, ranked)


def _cut(probs: Tensor, keep: Tensor, asked: Tensor) -> Tensor:
    """Set tokens outside of ``keep`` [B, n, V] to 0 and renormalise, in the rows ``asked`` [B] (bool).

    Other rows stay the same to the last bit, so that a request never depends on the settings of its neighbours.
    """
    kept = probs * keep
    return torch.where(asked[:, None, None], kept / kept.sum(-1, keepdim=True), probs)


def entropy(probs: Tensor) -> Tensor:
    """Return the Shannon entropy in nats over the last axis; 0 log 0 = 0."""
    if probs.is_cuda:
        return torch.special.entr(probs).sum(-1)
    # On a CPU ``entr`` takes 2.5 times as long as the vectorised logarithm. The clamp makes 0 log 0 = 0.
    return -(probs * probs.clamp_min(torch.finfo(probs.dtype).tiny).log()).sum(-1)
