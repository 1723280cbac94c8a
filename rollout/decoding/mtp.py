"""Drafts of the model's own MTP head: the request state that all drafters with the head share, and a chain drafter."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.kernels.draw import LogitRows, draw
from bebop.kernels.verify import sample
from bebop.model.attention import SlotContext, Span, cache_shape
from bebop.model.backbone import Policy
from bebop.model.lean import lean_head
from bebop.model.mtp import gather_rows
from bebop.model.paged_cache import PagedContext
from bebop.model.ragged_attention import Ragged
from bebop.rollout.decoding.base import Draft, DraftLength, Rows, TargetOutput, newest, takes_logits
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.decoding.temperature import DraftTemperature, Drawn
from bebop.rollout.slots import Slots

# ---- deferred prefill


ROOM = 64  # entries of a row that are put off at most, or twice a cycle's tokens


class DeferredPrefill:
    """Entries of the head's cache that are still to be written, by row.

    It holds the states [R, d] that they are computed from.
    """

    def __init__(self, slots: Slots, like: Tensor) -> None:
        """Register the columns; ``like`` [d] is a state that gives shape and dtype."""
        self.slots = slots
        # [S] the first deferred entry: ``fed`` or -1 if there is none
        self.first = slots.register_column("mtp/first_deferred", torch.tensor(-1), of_context=True)
        self.room = max(ROOM, 2 * (slots.sizes.drafts + 1))
        self.most = 0  # entries; no row is further behind: known without a wait for the device
        fresh = torch.zeros(self.room, *like.shape, dtype=like.dtype)
        self.states = slots.register_column("mtp/deferred", fresh, of_context=True)

    def full(self, width: int) -> bool:
        """Return whether there may be no room for ``width`` more entries."""
        return self.most + width > self.room

    def put_off(self, rows: Rows, out: TargetOutput, emitted: Tensor, width: int) -> None:
        """Keep the states of a cycle's entries for later: ``emitted`` [B] of each row, ``width`` at most."""
        self.most += width
        first = self.first[: rows.batch]
        torch.where(first < 0, rows.fed, first, out=first)
        row, step = (torch.arange(width, device=emitted.device) < emitted[:, None]).nonzero().unbind(1)
        self.states[row, (rows.fed[row] + step) % self.room] = out.hidden[row, step]

    def read(self, first: int, batch: int) -> None:
        """Mark slots ``first``, ``first`` + 1, ... as having no deferred entries."""
        self.first[first : first + batch] = -1

    def read_to(self, entries: Tensor) -> None:
        """Record that another drafter has read on to ``entries`` [B] of the first B rows.

        That drafter had read everything before, and the first B rows are all rows.
        """
        self.first[: len(entries)] = entries
        self.most = 0

    def behind(self, first: int, batch: int) -> Tensor:
        """Return how many entries are still to be written [B] in slots ``first``, ``first`` + 1, ..."""
        known = self.first[first : first + batch]
        return torch.where(known < 0, 0, self.slots.fed[first : first + batch] - known)

    def of(self, first: int, behind: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return entries, tokens [B, W] and states [B, W, d] of the ``behind`` [B] deferred entries.

        They are those of slots from ``first`` on. Beyond them, and in rows that have nothing to write, entries are
        overwritten before they are read.
        """
        slots = self.slots
        rows, last = slice(first, first + len(behind)), slots.capacity - 1
        entries = self.first[rows, None] + torch.arange(width, device=behind.device)
        entries = torch.where(behind[:, None] > 0, entries, last).clamp_max(last)
        answered = (entries + 1 - slots.asked[rows, None]).clamp(0, slots.tokens.shape[1] - 1)
        tokens = slots.tokens[rows].gather(1, answered)
        states = self.states[
            torch.arange(first, first + len(behind), device=behind.device)[:, None], entries % self.room
        ]
        return entries, tokens, states


class HeadCache(SlotContext):
    """The cache of a head, whose drafters share the deferred prefill.

    A snapshot of a slot continues elsewhere, so its deferred entries are read before.
    """

    deferred: DeferredPrefill | None = None  # None: no prefill is put off
    settle: Callable[[int], None]  # reads the deferred entries of a slot

    def snapshot(self, slot: int, length: int) -> tuple[Tensor, ...]:
        """Return a copy of the first ``length`` entries of a slot, all of them written."""
        self.settle(slot)
        return super().snapshot(slot, length)


class HeadPages(HeadCache, PagedContext):
    """A ``HeadCache`` whose entries lie in pages."""


# ---- the head


class HeadDrafter:
    """Base class of drafters with the MTP head: all of a ``Drafter`` but ``propose``.

    At temperature 0 drafts are greedy, which is target-only. The head reads the tokens of every cycle. A drafter that
    defers this (``DeferredPrefill``) begins its first draft with ``catch_up``. Once a second drafter of the head
    exists, which began with all entries read, nothing is deferred any more.
    """

    name = "mtp"  # of its cache and its column
    layers: tuple[int, ...] = ()
    target_pass = None
    layer: int  # what its cache's only layer is called
    shape: tuple[int, int, int]  # of its cache: layers, heads, numbers of each

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.policy, self.slots = policy, slots
        self.head = self._make(config)
        self.temperature = config.temperature_of_drafts
        self.cache = slots.register_cache(self.name, self._cache)
        # [S, d] state for the first draft; zero where there is no context but one token
        fresh = torch.zeros(policy.backbone.config.hidden_size, dtype=policy.backbone.dtype)
        self.hidden = slots.register_column(f"{self.name}/hidden", fresh, of_context=True)

    def _make(self, config: DecodingConfig) -> Callable[..., Tensor]:
        """Return the function that runs one step of the head, and set ``layer`` and ``shape``."""
        policy = self.policy
        if policy.mtp is None:
            raise UserError(f"decoding.system={config.system!r} drafts with MTP weights, and the model has none")
        self.layer, self.shape = policy.mtp.layer_index, cache_shape(policy.backbone.config, layers=1)
        return lean_head(policy.mtp, self.slots.capacity)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the embeddings [..., d] of tokens [...]."""
        return self.policy.embed(tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, V] of the head's states [B, d]."""
        return self.policy.logits(hidden)

    def states(self, out: TargetOutput) -> Tensor:
        """Return the target's states [B, n, d] that the first step reads."""
        return out.hidden

    def _cache(self, slots: Slots) -> HeadCache:
        like = self.policy.embed(torch.zeros(1, dtype=torch.long, device=slots.device))
        cache = slots.kv_cache(self.shape, like, HeadCache, HeadPages)
        assert isinstance(cache, HeadCache)
        cache.first_layer = self.layer
        cache.settle = self._settle
        return cache

    def prefill(self, span: Span, tokens: Tensor, lengths: Sequence[int], out: TargetOutput) -> None:
        """Read the tokens of a prefill into the head's cache."""
        with self.cache.at_span(span):
            states = self.head(self.embed(tokens[:, 1:]), self.states(out), span.positions, self.cache)
        if self.cache.deferred is not None:
            self.cache.deferred.read(span.first, len(tokens))
        for row, length in enumerate(lengths):
            self.hidden[span.first + row] = states[row, length - 1] if length else 0

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Read the emitted tokens of a cycle into the head's cache.

        Entries from real hidden states overwrite those of the drafts (SPEC 0.5). A row's state for its next draft is
        that of its last emitted token; entries beyond it are never seen.
        """
        states = self._feed(rows, 0, tokens, self.states(out))
        self.hidden[: rows.batch] = gather_rows(states, newest(emitted))[:, 0]
        if self.cache.deferred is not None:
            self.cache.deferred.read_to(rows.fed + emitted)

    def catch_up(self, rows: Rows) -> bool:
        """Read the deferred entries of all rows; return False if there are none."""
        deferred = self.cache.deferred
        if deferred is None or not deferred.most:
            return False
        deferred.most = 0
        return self._catch_up(deferred, 0, rows.batch, rows.used)

    def _catch_up(self, deferred: DeferredPrefill, first: int, batch: int, used: int) -> bool:
        """Read the deferred entries of slots ``first``, ``first`` + 1, ... in one pass; return False if there are none.

        The pass reads at most ``used`` entries of each slot.
        """
        behind = deferred.behind(first, batch)
        width = int(behind.max())
        if not width:
            return False
        lengths = behind.clamp_min(1)
        ragged = Ragged.of(lengths, width)
        entries, tokens, states = deferred.of(first, behind, width)
        with self.cache.at(first):
            self.cache.place(entries, used, ragged=ragged)
            packed = [ragged.packed(x) for x in (tokens, states, entries)]
            states = self.head(self.policy.embed(packed[0]), packed[1], packed[2], self.cache)
        hidden = self.hidden[first : first + batch]
        hidden.copy_(torch.where(behind[:, None] > 0, states[0, lengths.cumsum(0) - 1], hidden))
        deferred.read(first, batch)
        return True

    def _settle(self, slot: int) -> None:
        """Read the deferred entries of one slot."""
        if self.cache.deferred is not None:
            self._catch_up(self.cache.deferred, slot, 1, self.slots.attention_width(int(self.slots.fed[slot])))

    def _feed(self, rows: Rows, offset: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        positions = rows.fed[:, None] + torch.arange(offset, offset + tokens.shape[1], device=tokens.device)
        self.cache.place(positions, rows.used)
        return self.head(self.embed(tokens), hidden, positions, self.cache)


# ---- a chain of drafts


class ChainDrafter:
    """Samples a chain of drafts, each from the distribution of a network that reads one token a pass.

    At temperature 0 drafts are greedy. A subclass runs the network in ``begin``, ``logits`` and ``step``.
    """

    def __init__(self, slots: Slots, config: DecodingConfig) -> None:
        self.temperature = config.temperature_of_drafts
        self.tempered = DraftTemperature(slots) if config.chooses_temperature else None
        self.drawn: Drawn | None = None  # from ``propose`` to ``commit``

    def begin(self, rows: Rows) -> Tensor:
        """Return the states [B, d] that predict the first drafts."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits [B, V] of states [B, d], over the target's vocabulary."""
        raise NotImplementedError

    def step(self, rows: Rows, step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Run one pass over tokens [B] just drafted at ``step`` and their states [B, d]; return the next states."""
        raise NotImplementedError

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft the next tokens of every row.

        Rows that stop early keep drafting beside the others; those drafts do not count. When all have stopped, the
        draft ends, unless the cycle is static and may not read from the device whether they have.
        """
        length.start(rows)
        if length.limit == 0:  # the cache still reads the cycle's tokens
            return Draft(tokens=rows.last.new_zeros(rows.batch, 0), probs=None, forwards=1)
        hidden, seen = self.begin(rows), rows.seen
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        kept: list[LogitRows] = []  # in place of ``probs`` where distributions stay logits
        entropies: list[Tensor] = []
        chosen = None if self.tempered is None else self.tempered.choose(rows, length.limit)
        drawn = Drawn(limit=length.limit)
        alive: Tensor | None = None
        lengths: Tensor | None = None
        for step in range(length.limit):
            logits = self.logits(hidden)[:, None]
            number = rows.uniforms[:, step]
            temperature = self.temperature if chosen is None else chosen[:, step]
            if rows.logits:  # drawn in the same pass: the decision about the length below does not see the token
                one, token = draw(logits[:, 0], rows.temperature(temperature), number)
                kept.append(one)
                entropies.append(one.entropy[:, 0])
            else:
                distribution = rows.probs(logits, None if seen is None else seen[:, None], temperature)[:, 0]
                entropies.append(entropy(distribution))
            known = torch.stack(entropies, 1)
            go_on = length.extend(step, known)
            if go_on is not None:
                alive = go_on if alive is None else alive & go_on
                lengths = alive.long() if lengths is None else lengths + alive.long()
                if tokens and not rows.static and not alive.any():
                    break
            if not rows.logits:
                token = sample(distribution, number)
                probs.append(distribution)
            tokens.append(token)
            if self.tempered is not None:
                drawn.add(logits[:, 0], seen)
            if seen is not None:
                seen = seen.scatter(-1, token[:, None], True)
            if step + 1 < length.limit:
                hidden = self.step(rows, step, token, hidden)
        drawn.lengths = lengths
        self.drawn = drawn
        return Draft(
            tokens=torch.stack(tokens, 1),
            probs=None if self.temperature == 0 else torch.stack(probs or [one.logits[:, 0, :0] for one in kept], 1),
            rows=kept[: len(tokens)] if kept and self.temperature != 0 else None,
            entropies=known[:, : len(tokens)].contiguous(),
            lengths=lengths,
            forwards=len(tokens),
        )

    def learn(self, rows: Rows, out: TargetOutput, emitted: Tensor) -> None:
        """Learn the draft temperature, where it is chosen, from the drafts of a cycle and the tokens it emitted."""
        if self.tempered is not None and self.drawn is not None:
            self.tempered.observe(rows, self.drawn, out.probs, emitted)
        self.drawn = None  # another drafter may be in charge of the next cycle


@takes_logits
class MTPDrafter(HeadDrafter, ChainDrafter):
    """Samples a chain of drafts, each from the head's distribution."""

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        HeadDrafter.__init__(self, policy, slots, config)
        ChainDrafter.__init__(self, slots, config)

    def begin(self, rows: Rows) -> Tensor:
        """Return the states [B, d] of the newest tokens."""
        return self.hidden[: rows.batch]

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        """Learn from the emitted tokens of a cycle and read them into the head's cache."""
        self.learn(rows, out, emitted)
        super().commit(rows, out, tokens, emitted)

    def step(self, rows: Rows, step: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Run one recursive pass over tokens [B] just drafted at ``step`` and hidden [B, d] -> the next hidden [B, d].

        Position ids go on from the anchor: t, t + 1, ...
        """
        return self._feed(rows, step, tokens[:, None], hidden[:, None])[:, 0]
