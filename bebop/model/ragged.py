"""Rows of unequal lengths, side by side and padded, or end to end in one row without padding."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """Where the N places of R rows lie among R padded ones of width W.

    Linear layers, and whatever goes by the vocabulary, then waste nothing on padding; only who has to see rows as rows
    pads: attention in groups (``ragged_attention.py``), and what the cycle looks at once.
    """

    lengths: Tensor  # [R], summing to N
    places: Tensor  # [N] of R * W, row by row
    numbers: Tensor  # [R, W] of N; padding has its row's first, so that it is finite whatever it is

    @classmethod
    def of(cls, lengths: Tensor, width: int) -> Self:
        """``lengths`` [R]: 1 to ``width`` each."""
        columns = torch.arange(width, device=lengths.device)
        real = columns < lengths[:, None]  # [R, W]
        starts = (lengths.cumsum(0) - lengths)[:, None]
        places, numbers = real.reshape(-1).nonzero()[:, 0], torch.where(real, starts + columns, starts)
        return cls(lengths=lengths, places=places, numbers=numbers)

    @property
    def rows(self) -> Tensor:
        """The row of each place [N]."""
        return self.places // self.numbers.shape[1]

    def packed(self, values: Tensor) -> Tensor:
        """Values [R, W, ...] end to end [1, N, ...]."""
        return values.flatten(0, 1).index_select(0, self.places)[None]

    def padded(self, values: Tensor) -> Tensor:
        """Values [1, N, ...] side by side [R, W, ...]."""
        return values[0].index_select(0, self.numbers.flatten()).unflatten(0, self.numbers.shape)
