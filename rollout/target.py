"""Runs backbone and MTP head over the engine's slots; knows caches and positions, nothing of sampling."""

import torch
from torch import Tensor

from bebop.model.attention import SlotContext
from bebop.model.backbone import Policy
from bebop.rollout.slots import Slots

PREFIX_STEP = 32  # the looked-at part of the cache grows in steps, so that few shapes occur


class Target:
    """Backbone and head with their preallocated caches, for the first B slots."""

    def __init__(self, policy: Policy, slots: Slots) -> None:
        config = policy.backbone.config
        self.policy, self.slots = policy, slots
        sizes = slots.sizes
        self.capacity = -(-(sizes.length + sizes.drafts + 2) // PREFIX_STEP) * PREFIX_STEP
        like = policy.embed(torch.zeros(1, dtype=torch.long, device=policy.device))
        self.target = SlotContext.for_model(config, sizes.slots, self.capacity, like)
        self.draft: SlotContext | None = None
        if policy.mtp is not None and sizes.drafts > 0:
            self.draft = SlotContext.for_model(config, sizes.slots, self.capacity, like, layers=1)
            self.draft.first_layer = policy.mtp.layer_index
        self.batch = 0
        self.used = 0

    def begin(self, batch: int, longest: int) -> None:
        """Set the number of active rows and their longest fed length for the coming cycle."""
        self.batch = batch
        self.used = min(self.capacity, -(-(longest + self.slots.sizes.drafts + 2) // PREFIX_STEP) * PREFIX_STEP)

    def verify(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Backbone over tokens [B, n] from each row's fed length on -> hidden [B, n, d], logits [B, n, V]."""
        positions = self.slots.fed[: self.batch, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.target.place(positions, self.used)
        hidden = self.policy.hidden(tokens, positions, self.target)
        return hidden, self.policy.logits(hidden)

    def follow(self, tokens: Tensor, hidden: Tensor, emitted: Tensor) -> None:
        """Feed the head real hidden states [B, n, d] with the tokens [B, n] after them, before ``fed`` advances.

        Chain entries of the drafts are overwritten by entries from real hidden states (SPEC 0.5). Row b's state for
        its next draft is that of its last emitted token, ``emitted`` [B] >= 1; what lies beyond is never seen.
        """
        if self.draft is None or self.policy.mtp is None:
            return
        positions = self.slots.fed[: self.batch, None] + torch.arange(tokens.shape[1], device=tokens.device)
        self.draft.place(positions, self.used)
        out = self.policy.mtp(self.policy.embed(tokens), hidden, positions, self.draft)
        rows = torch.arange(self.batch, device=tokens.device)
        self.slots.hidden[: self.batch] = out[rows, emitted - 1]

    def draft_hidden(self) -> Tensor:
        """See ``DraftModel``."""
        return self.slots.hidden[: self.batch]

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """See ``DraftModel``."""
        return self.policy.logits(hidden)

    def draft_step(self, step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """See ``DraftModel``. Position ids go on from the anchor: t, t + 1, ..."""
        assert self.draft is not None and self.policy.mtp is not None
        positions = (self.slots.fed[: self.batch] + step)[:, None]
        self.draft.place(positions, self.used)
        return self.policy.mtp(self.policy.embed(tokens[:, None]), hidden[:, None], positions, self.draft)[:, 0]

    def seen(self) -> Tensor | None:
        """See ``DraftModel``."""
        return None if self.slots.seen is None else self.slots.seen[: self.batch]

    def prefill(self, first: int, contexts: list[list[int]]) -> None:
        """Fill the caches of slots ``first``, ``first`` + 1, ... with all but the last token of each context."""
        lengths = [len(c) - 1 for c in contexts]
        width = max(lengths)
        if width == 0:
            self.slots.hidden[first : first + len(contexts)] = 0
            return
        device = self.slots.device
        padded = torch.tensor([c + [0] * (width + 1 - len(c)) for c in contexts], device=device)
        positions = torch.arange(width, device=device).expand(len(contexts), width)
        with self.target.at(first):
            self.target.place(positions, width)
            hidden = self.policy.hidden(padded[:, :-1], positions, self.target)
        if self.draft is None or self.policy.mtp is None:
            return
        with self.draft.at(first):
            self.draft.place(positions, width)
            out = self.policy.mtp(self.policy.embed(padded[:, 1:]), hidden, positions, self.draft)
        for row, length in enumerate(lengths):
            self.slots.hidden[first + row] = out[row, length - 1] if length else 0

    def copy(self, source: int, first: int, end: int, length: int) -> None:
        """Copy a slot's cache entries and draft state to slots first..end-1: a group's common prompt, or a move."""
        for context in (self.target, self.draft):
            if context is not None:
                context.copy_slot(source, first, end, length)
        self.slots.hidden[first:end] = self.slots.hidden[source].clone()
