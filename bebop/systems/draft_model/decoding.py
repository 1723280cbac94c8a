"""Drafts of a separate causal language model (Leviathan et al. 2023), with its own keys and values.

The draft model reads every token that the target reads, at the same positions. Before a cycle its cache holds the
entries of all tokens but the newest, as the target's does. But the entry before the newest may be missing: the last
draft of a cycle is drawn and not read. So the first pass of a cycle reads two tokens, the one before the newest and the
newest. That costs no extra pass, and the host need not know which rows lack the entry. Entries of rejected drafts are
overwritten before anything sees them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.model.attention import SlotContext, Span, cache_shape
from bebop.model.backbone import Policy
from bebop.model.lean import lean_hidden
from bebop.rollout.decoding.base import Draft, DraftLength, Rows, TargetOutput, takes_logits
from bebop.rollout.decoding.mtp import ChainDrafter, HeadCache, HeadPages
from bebop.rollout.slots import Slots

# The logit of tokens that only the target has rows for. Finite, since a kernel that multiplies
# a probability of 0 with it must give 0.
ABSENT = -1e4


@takes_logits
class ModelDrafter(ChainDrafter):
    """Drafter that samples a chain, each draft from the draft model's distribution."""

    layers: tuple[int, ...] = ()
    target_pass = None

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        super().__init__(slots, config)
        if policy.draft is None:
            raise UserError(f"decoding.system={config.system!r} drafts with a model of its own: give model.draft=DIR")
        self.draft, self.slots, self.vocab = policy.draft, slots, policy.vocab_size
        self.cache = slots.register_cache("draft_model", self._cache)
        self.hidden = lean_hidden(self.draft, slots.capacity)
        self.drafted = False  # whether this drafter made this cycle's drafts, so that it has read them

    def _cache(self, slots: Slots) -> SlotContext:
        like = self.draft.embed(torch.zeros(1, dtype=torch.long, device=slots.device))
        cache = slots.kv_cache(cache_shape(self.draft.backbone.config), like, HeadCache, HeadPages)
        assert isinstance(cache, HeadCache)
        cache.settle = self._settle
        return cache

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """Read the text of a prefill into the draft model's cache."""
        with self.cache.at_span(span):
            self.hidden(self._readable(tokens[:, :-1]), span.positions, self.cache)

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft the next tokens of every row, as a chain."""
        draft = super().propose(rows, length)
        self.drafted = draft.tokens.shape[1] > 0
        return draft

    def begin(self, rows: Rows) -> Tensor:
        """Read the newest token of each row and the one before it; return the states [B, d] that predict drafts."""
        entry, before = self._before_newest(0, rows.batch)
        return self._read(torch.stack([before, rows.last], 1), torch.stack([entry, rows.fed], 1), rows.used)[:, -1]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [B, V] over the target's vocabulary, whose padding may differ from the draft model's."""
        logits = self.draft.logits(hidden)
        lacking = self.vocab - logits.shape[-1]
        return logits if lacking == 0 else pad(logits, (0, lacking), value=ABSENT).contiguous()

    def step(self, rows: Rows, step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Read the drafts [B] of ``step``; return the states [B, d] that predict the next ones."""
        return self._read(tokens[:, None], rows.fed[:, None] + step + 1, rows.used)[:, 0]

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Learn from the emitted tokens; if another drafter or none was in charge, read them now."""
        self.learn(rows, out, emitted)
        if not self.drafted:
            entry, before = self._before_newest(0, rows.batch)
            read = torch.cat([before[:, None], rows.last[:, None], tokens[:, :-1]], 1)
            entries = rows.fed[:, None] + torch.arange(tokens.shape[1], device=tokens.device)
            self._read(read, torch.cat([entry[:, None], entries], 1), rows.used)
        self.drafted = False

    def _before_newest(self, first: int, batch: int) -> tuple[Tensor, Tensor]:
        """Return entries and tokens [B] of slots ``first``, ``first`` + 1, ...: those before the newest token.

        A context of one token returns that token itself: its entry is then written twice, with the same values.
        """
        slots, rows = self.slots, slice(first, first + batch)
        entry = (slots.fed[rows] - 1).clamp_min(0)
        answered = entry - slots.asked[rows]
        asked = slots.prompts[rows].gather(1, entry[:, None])[:, 0]
        own = slots.tokens[rows].gather(1, answered.clamp_min(0)[:, None])[:, 0]
        return entry, torch.where(answered < 0, asked, own)

    def _read(self, tokens: Tensor, entries: Tensor, used: int) -> Tensor:
        """Run the model over tokens [B, n] with the given entries [B, n], and return hidden states [B, n, d]."""
        self.cache.place(entries, used)
        return self.hidden(self._readable(tokens), entries, self.cache)

    def _readable(self, tokens: Tensor) -> Tensor:
        """Return tokens for which the draft model has embeddings: ids in the target's padding become its last id."""
        rows = self.draft.vocab_size
        return tokens if rows >= self.vocab else tokens.clamp_max(rows - 1)

    def _settle(self, slot: int) -> None:
        """Write the entry that a slot may lack, before its entries are kept for another turn."""
        entry, before = self._before_newest(slot, 1)
        with self.cache.at(slot):
            self._read(before[:, None], entry[:, None], self.slots.attention_width(int(self.slots.fed[slot])))
