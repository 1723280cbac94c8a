"""Runs the backbone over the engine's slots; knows its cache and positions, nothing of drafts or sampling."""

from collections.abc import Collection

import torch
from torch import Tensor

from bebop.model.attention import SlotContext
from bebop.model.backbone import Policy
from bebop.model.taps import tapped
from bebop.rollout.decoding.base import Rows
from bebop.rollout.slots import Slots


class Target:
    """The backbone with its preallocated cache."""

    def __init__(self, policy: Policy, slots: Slots) -> None:
        self.policy, self.slots = policy, slots
        self.cache = slots.own("target", self._cache)

    def _cache(self, slots: Slots) -> SlotContext:
        like = self.policy.embed(torch.zeros(1, dtype=torch.long, device=slots.device))
        return SlotContext.for_model(self.policy.backbone.config, slots.sizes.slots, slots.capacity, like)

    def verify(self, rows: Rows, tokens: Tensor, layers: Collection[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Feed tokens [B, n] from each row's fed length on -> hidden [B, n, d], and after ``layers`` [B, n, d] each."""
        positions = rows.fed[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.cache.place(positions, rows.used)
        return self._run(tokens, positions, layers)

    def prefill(self, first: int, tokens: Tensor, layers: Collection[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        """Feed padded tokens [n, W] to the empty slots ``first``, ``first`` + 1, ..."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        with self.cache.at(first):
            self.cache.place(positions, tokens.shape[1])
            return self._run(tokens, positions, layers)

    def _run(self, tokens: Tensor, positions: Tensor, layers: Collection[int]) -> tuple[Tensor, dict[int, Tensor]]:
        with tapped(self.policy.backbone.get_decoder().layers, layers) as states:
            return self.policy.hidden(tokens, positions, self.cache), states
