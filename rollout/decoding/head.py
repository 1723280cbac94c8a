"""What a drafter with the model's own MTP head keeps of a request, whatever it drafts: a cache, and its next state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.model.attention import SlotContext, Span
from bebop.model.backbone import Policy
from bebop.model.lean import lean_head
from bebop.rollout.decoding.base import Rows, TargetOutput
from bebop.rollout.slots import Slots


class HeadDrafter:
    """All of a ``Drafter`` but ``propose``. At temperature 0 drafts are greedy, which is target-only."""

    layers: tuple[int, ...] = ()
    target_pass = None

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        if policy.mtp is None:
            raise UserError(f"decoding.system={config.system!r} drafts with MTP weights, and the model has none")
        self.policy, self.head = policy, lean_head(policy.mtp, slots.capacity)
        self.temperature = config.temperature_of_drafts
        self.layer = policy.mtp.layer_index
        self.cache = slots.own("mtp", self._cache)
        # [S, d] state for the first draft; zero where there is no context but one token
        fresh = torch.zeros(policy.backbone.config.hidden_size, dtype=policy.backbone.dtype)
        self.hidden = slots.add("mtp/hidden", fresh, of_context=True)

    def _cache(self, slots: Slots) -> SlotContext:
        like = self.policy.embed(torch.zeros(1, dtype=torch.long, device=slots.device))
        config = self.policy.backbone.config
        cache = SlotContext.for_model(config, slots.sizes.slots, slots.capacity, like, layers=1)
        cache.first_layer = self.layer
        return cache

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """See ``Drafter``."""
        with self.cache.at_span(span):
            states = self.head(self.policy.embed(tokens[:, 1:]), out.hidden, span.positions, self.cache)
        for row, length in enumerate(lengths):
            self.hidden[span.first + row] = states[row, length - 1] if length else 0

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter``. Entries of the drafts are overwritten by entries from real hidden states (SPEC 0.5).

        A row's state for its next draft is that of its last emitted token; what lies beyond is never seen.
        """
        states = self._feed(rows, 0, tokens, out.hidden)
        self.hidden[: rows.batch] = states[torch.arange(rows.batch, device=tokens.device), emitted - 1]

    def _feed(self, rows: Rows, offset: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        positions = rows.fed[:, None] + torch.arange(offset, offset + tokens.shape[1], device=tokens.device)
        self.cache.place(positions, rows.used)
        return self.head(self.policy.embed(tokens), hidden, positions, self.cache)
