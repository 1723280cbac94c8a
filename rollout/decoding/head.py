"""What a drafter with the model's own MTP head keeps of a request, whatever it drafts: a cache, and its next state."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.model.attention import Span
from bebop.model.backbone import Policy
from bebop.model.lean import lean_head
from bebop.model.mtp import gather_rows
from bebop.model.ragged_attention import Ragged
from bebop.rollout.decoding.base import Rows, TargetOutput
from bebop.rollout.decoding.unread import HeadCache, Unread
from bebop.rollout.slots import Slots


class HeadDrafter:
    """All of a ``Drafter`` but ``propose``. At temperature 0 drafts are greedy, which is target-only.

    The head reads every cycle. Of a drafter that puts it off (``Unread``) the first draft begins with ``catch_up``;
    once there is another drafter of the head as well, which began with all that there was, nothing is put off any more.
    """

    layers: tuple[int, ...] = ()
    target_pass = None

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        if policy.mtp is None:
            raise UserError(f"decoding.system={config.system!r} drafts with MTP weights, and the model has none")
        self.policy, self.head, self.slots = policy, lean_head(policy.mtp, slots.capacity), slots
        self.temperature = config.temperature_of_drafts
        self.layer = policy.mtp.layer_index
        self.cache = slots.own("mtp", self._cache)
        # [S, d] state for the first draft; zero where there is no context but one token
        fresh = torch.zeros(policy.backbone.config.hidden_size, dtype=policy.backbone.dtype)
        self.hidden = slots.add("mtp/hidden", fresh, of_context=True)

    def _cache(self, slots: Slots) -> HeadCache:
        like = self.policy.embed(torch.zeros(1, dtype=torch.long, device=slots.device))
        config = self.policy.backbone.config
        cache = HeadCache.for_model(config, slots.sizes.slots, slots.capacity, like, layers=1)
        cache.first_layer = self.layer
        cache.settle = self._settle
        return cache

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """See ``Drafter``."""
        with self.cache.at_span(span):
            states = self.head(self.policy.embed(tokens[:, 1:]), out.hidden, span.positions, self.cache)
        if self.cache.unread is not None:
            self.cache.unread.read(span.first, len(tokens))
        for row, length in enumerate(lengths):
            self.hidden[span.first + row] = states[row, length - 1] if length else 0

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """See ``Drafter``. Entries of the drafts are overwritten by entries from real hidden states (SPEC 0.5).

        A row's state for its next draft is that of its last emitted token; what lies beyond is never seen.
        """
        states = self._feed(rows, 0, tokens, out.hidden)
        self.hidden[: rows.batch] = gather_rows(states, emitted[:, None] - 1)[:, 0]
        if self.cache.unread is not None:
            self.cache.unread.read_to(rows.fed + emitted)

    def catch_up(self, rows: Rows) -> bool:
        """Read what the rows, which are all, have put off; False if that is nothing."""
        unread = self.cache.unread
        if unread is None or not unread.most:
            return False
        unread.most = 0
        return self._catch_up(unread, 0, rows.batch, rows.used)

    def _catch_up(self, unread: Unread, first: int, batch: int, used: int) -> bool:
        """In one pass over slots ``first``, ``first`` + 1, ..., which see ``used`` entries at most."""
        behind = unread.behind(first, batch)
        width = int(behind.max())
        if not width:
            return False
        lengths = behind.clamp_min(1)
        ragged = Ragged.of(lengths, width)
        entries, tokens, states = unread.of(first, behind, width)
        with self.cache.at(first):
            self.cache.place(entries, used, ragged=ragged)
            packed = [ragged.packed(x) for x in (tokens, states, entries)]
            states = self.head(self.policy.embed(packed[0]), packed[1], packed[2], self.cache)
        hidden = self.hidden[first : first + batch]
        hidden.copy_(torch.where(behind[:, None] > 0, states[0, lengths.cumsum(0) - 1], hidden))
        unread.read(first, batch)
        return True

    def _settle(self, slot: int) -> None:
        """A slot alone; nothing where nobody puts anything off."""
        if self.cache.unread is not None:
            self._catch_up(self.cache.unread, slot, 1, self.slots.looked_at(int(self.slots.fed[slot])))

    def _feed(self, rows: Rows, offset: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        positions = rows.fed[:, None] + torch.arange(offset, offset + tokens.shape[1], device=tokens.device)
        self.cache.place(positions, rows.used)
        return self.head(self.policy.embed(tokens), hidden, positions, self.cache)
