"""The engine's state: one slot per request, with everything that a decoding cycle reads or writes as tensors.

Active requests occupy slots 0..B-1. When one leaves, the last moves into its place, so that every tensor of the active
rows is a view of the first B rows.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.model.attention import SlotContext
from bebop.model.paged_cache import PagedContext
from bebop.rollout.decoding.sampling import BatchSampling
from bebop.rollout.history import History
from bebop.rollout.pages import Pages, page_size, pages_of
from bebop.trajectory import DRAFT_STATS, STRETCH, SamplingParams

PREFIX_STEP = 32  # the part of a cache that attention reads grows in steps, so that few shapes occur
NEUTRAL = {"temperature": 1.0, "top_k": 0.0, "top_p": 1.0, "min_p": 0.0, "penalty": 1.0}


class Cache(Protocol):
    """Interface of a cache with entries of S slots, such as keys and values."""

    def copy_slot(self, source: int, first: int, end: int, length: int) -> None:
        """Copy the first ``length`` entries of one slot to slots first..end-1."""
        ...

    def snapshot(self, slot: int, length: int) -> tuple[Tensor, ...]:
        """Return a copy of the first ``length`` entries of a slot."""
        ...

    def restore(self, slot: int, held: Any, length: int) -> None:
        """Write the first ``length`` entries that ``snapshot`` returned into a slot."""
        ...


C = TypeVar("C", bound=Cache)
# Sums [B, n, K] of a cycle, stretches [B], tokens emitted [B], the rows of ``Slots.names``, tokens before the drafts.
Recorded = tuple[Tensor, Tensor, Tensor, list[int], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSizes:
    """Fixed sizes of the slot tensors."""

    slots: int  # S
    length: int  # tokens of prompt + completion
    drafts: int  # K
    vocab: int  # V
    stops: int = 8  # stop tokens a request may have
    cache_tokens: int | None = 0  # that the pages hold; None: as many as slots * length; 0: slots hold their entries


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldEntries:
    """A snapshot of the entries of all caches of a slot."""

    copies: Mapping[str, tuple[Tensor, ...]]  # by cache; empty for caches in pages
    pages: tuple[int, ...] = ()  # pages with the entries of the other caches

    @property
    def bytes(self) -> int:
        """Return the bytes of the copies."""
        return sum(tensor.nbytes for tensors in self.copies.values() for tensor in tensors)


def starts(length: int) -> list[int]:
    """Return where the stretches of a completion of at most ``length`` tokens begin: 0, 64, 128, 256, ..."""
    starts, edge = [0], STRETCH
    while edge < length:
        starts.append(edge)
        edge *= 2
    return starts


class Slots:
    """Tensors over S slots; the comments give shapes and meaning."""

    def __init__(self, sizes: SlotSizes, device: torch.device) -> None:
        self.sizes, self.device = sizes, device
        self.capacity = _rounded(sizes.length + sizes.drafts + 2)  # entries that a slot of a cache has
        s, width = sizes.slots, sizes.length + sizes.drafts + 1
        long: dict[str, Any] = {"dtype": torch.long, "device": device}
        self.fed = torch.zeros(s, **long)  # [S] entries in the caches; a decoder defines what an entry is
        self.asked = torch.zeros(s, **long)  # [S] tokens of the prompt
        self.last = torch.zeros(s, **long)  # [S] the newest token, not fed yet
        self.count = torch.zeros(s, **long)  # [S] completion tokens so far
        self.limit = torch.zeros(s, **long)  # [S] completion tokens allowed
        self.seed = torch.zeros(s, **long)  # [S]
        self.stops = torch.full((s, sizes.stops), -1, **long)  # [S, stops] stop tokens, -1 padded
        self.exact = torch.ones(s, dtype=torch.bool, device=device)  # [S] all tokens have the target's distribution
        self.prompts = torch.zeros(s, width, **long)  # [S, length + K + 1] prompt tokens of the request
        self.tokens = torch.zeros(s, width, **long)  # [S, length + K + 1] completion tokens
        self.versions = torch.zeros(s, width, **long)  # same shape
        self.contexts = torch.zeros(s, width, **long)  # same shape, oldest version among the keys and values it saw
        self.oldest = torch.zeros(s, **long)  # [S] oldest version among the keys and values in the cache
        self.logprobs = torch.zeros(s, width, dtype=torch.float32, device=device)  # same shape
        self.sampled: Tensor | None = None  # same shape, under what was drawn from; NaN: not known; see ``drawn``
        self.starts = torch.tensor(starts(sizes.length), device=device)  # [P] where the stretches of a completion begin
        self.names = [*DRAFT_STATS]  # statistics summed over the draft positions; ``extend_stats`` adds some
        # Sums by stretch; the last row is of the first cycle, where that is counted separately.
        self.opens = torch.zeros(s, dtype=torch.bool, device=device)  # [S] whether it is: for turns of a conversation
        shape = (s, len(self.starts) + 1, len(self.names), sizes.drafts)
        self.stats = torch.zeros(shape, dtype=torch.float64, device=device)
        self.begun = torch.zeros(s, len(self.starts) + 1, 2, **long)  # [S, P + 1, 2] cycles begun, their tokens
        self.work = torch.zeros(s, 4, **long)  # [S, 4] cycles, backbone passes, drafter passes, extra positions
        self._neutral = torch.tensor(list(NEUTRAL.values()), device=device)
        self.settings = self._neutral.repeat(s, 1)  # [S, 5] in NEUTRAL's order
        self.top_k = torch.zeros(s, **long)  # [S] top_k of the settings as an integer
        self.seen: Tensor | None = None  # [S, V] tokens in the context; made when a request has a penalty
        self.columns: dict[str, Tensor] = {}  # name -> [S, ...] state that a part keeps per request
        self.caches: dict[str, Any] = {}  # name -> Cache of a part
        self.pages = None if sizes.cache_tokens == 0 else self._pages()  # of all caches of keys and values
        self.history = History()  # other completions of the prompts of these requests, for parts that draft from them
        self._fresh: dict[str, Tensor] = {}  # name -> [...] initial state of a new request
        self._derived: set[str] = set()  # columns that follow from the context
        self.layout = 0  # counts the times that a tensor came or was replaced by another
        self.by_token: set[str] = set()  # columns with an entry a token of the completion
        self.recorded: set[str] = set()  # names that were ever given to ``record``
        self.latest: Recorded | None = None  # what ``record`` was given in the cycle before
        self.version = torch.zeros((), **long)  # of the weights that decode, see ``set_version``
        self._version = 0
        self._sampling: tuple[int, BatchSampling] | None = None
        self._retired = 0  # from this slot on all are as ``retire`` leaves them
        self._asked = [tuple(NEUTRAL.values())] * s  # S rows of ``settings``, known without asking the device

    def register_column(self, name: str, fresh: Tensor, of_context: bool = False, by_token: bool = False) -> Tensor:
        """Return a column [S, ...] for a part: requests start from ``fresh`` [...], rows move, aborted requests resume.

        ``of_context``: the column follows from the context, so slots share it with a prompt, and prefilling makes it
        again. ``by_token``: it has one entry per token of the completion, so that an engine of another ``length`` can
        restore it. An existing column stays, so that requests in progress keep theirs when a system returns.
        """
        fresh = fresh.to(self.device)
        known = self._fresh.get(name)
        if known is None or known.shape != fresh.shape:
            self.columns[name] = fresh.expand(self.sizes.slots, *fresh.shape).clone()
            self.layout += 1
        self._fresh[name] = fresh
        if of_context:
            self._derived.add(name)
        if by_token:
            self.by_token.add(name)
        return self.columns[name]

    def extend_stats(self, names: Sequence[str]) -> None:
        """Make room for further sums over the draft positions, unless they exist."""
        if not (new := [name for name in names if name not in self.names]):
            return
        slots, stretches, _, drafts = self.stats.shape
        self.stats = torch.cat([self.stats, self.stats.new_zeros(slots, stretches, len(new), drafts)], 2)
        self.names += new
        self.layout += 1

    def register_cache(self, name: str, make: Callable[["Slots"], C]) -> C:
        """Return the cache of this name, made on first use.

        Its entries move with their row and are shared with a prompt.
        """
        if name not in self.caches:
            self.caches[name] = make(self)
            self.layout += 1
        cache: C = self.caches[name]
        return cache

    def _pages(self) -> Pages:
        """Return a page table whose pool holds ``cache_tokens``, and what one request's cycle writes beyond them."""
        size, slots = page_size(self.device), self.sizes.slots
        each = pages_of(self.capacity, size)
        count = slots * each
        if self.sizes.cache_tokens is not None:
            beyond = each - self.sizes.length // size
            count = min(count, pages_of(self.sizes.cache_tokens, size) + beyond)
        return Pages(slots, self.capacity, count, self.device)

    def kv_cache(
        self,
        shape: tuple[int, int, int],
        like: Tensor,
        plain: type[SlotContext] = SlotContext,
        paged: type[PagedContext] = PagedContext,
    ) -> SlotContext:
        """Return a new cache of keys and values for these slots, with the dtype and device of ``like``.

        ``shape``: layers, heads of keys and values, their size. ``plain`` and ``paged`` are the classes for entries in
        slots and for entries in pages.
        """
        if self.pages is not None:
            return self.pages.pool(shape, like, paged)
        return plain(shape[0], self.sizes.slots, self.capacity, *shape[1:], like)

    @property
    def ahead(self) -> int:
        """Return how many entries a cycle may write beyond the existing ones of a row."""
        return self.sizes.drafts + 2

    def short(self, fed: Sequence[int], cycles: int = 1) -> bool:
        """Return whether too few pages are free to ``reserve`` for slots 0, 1, ...; always False without pages."""
        if self.pages is None:
            return False
        missing = [
            self.pages.missing(slot, min(self.capacity, entries + cycles * self.ahead))
            for slot, entries in enumerate(fed)
        ]
        return sum(missing) > self.pages.free

    def reserve(self, first: int, fed: Sequence[int], cycles: int = 0) -> None:
        """Give slots ``first``, ``first`` + 1, ... pages for ``fed`` entries and what ``cycles`` more cycles write."""
        if self.pages is not None:
            for slot, entries in enumerate(fed, start=first):
                self.pages.reserve(slot, min(self.capacity, entries + cycles * self.ahead))
            self.pages.upload()

    def release(self, first: int, end: int) -> None:
        """Take the pages of slots first..end-1, whose requests have left."""
        if self.pages is not None:
            for slot in range(first, end):
                self.pages.release(slot)

    def attention_width(self, longest: int) -> int:
        """Return the number of cache entries that a cycle may read, where the longest row has ``longest`` entries."""
        return min(self.capacity, _rounded(longest + self.ahead))

    def context(self, batch: int, width: int) -> Tensor:
        """Return prompt and completion [B, C <= width] of the first B slots; the padding is arbitrary."""
        width = min(width, self.tokens.shape[1])
        answered = torch.arange(width, device=self.device) - self.asked[:batch, None]
        answer = self.tokens[:batch].gather(1, answered.clamp_min(0))
        return torch.where(answered < 0, self.prompts[:batch, :width], answer)

    def export(self, slot: int) -> dict[str, Tensor]:
        """Return the state of a request that parts need to resume it later."""
        return {name: column[slot] for name, column in self.columns.items() if name not in self._derived}

    def _all(self) -> list[Tensor]:
        own = [self.fed, self.asked, self.last, self.count, self.limit, self.seed, self.stops, self.exact]
        own += [self.prompts, self.tokens, self.versions, self.contexts, self.oldest, self.logprobs, self.stats]
        own += [self.begun, self.work, self.settings, self.top_k, self.opens, *self.columns.values()]
        return [*own, *(table for table in (self.seen, self.sampled) if table is not None)]

    def start(
        self, first: int, params: Sequence[SamplingParams], contexts: Sequence[Sequence[int]], version: int = 0
    ) -> None:
        """Set slots ``first``, ``first`` + 1, ... for requests with the given contexts (prompt, completion so far).

        ``version``: of the weights that will compute their keys and values. There is one write per tensor, however many
        requests come at once. The whole context counts as prompt until a completion is restored, and each entry as one
        token until a decoder says otherwise.
        """
        rows = slice(first, first + len(params))
        self._retired = max(self._retired, rows.stop)
        width = self.sizes.stops
        numbers = [
            [
                *(len(c) - 1, len(c), c[-1], p.max_new_tokens, p.seed),
                *(*p.stop_token_ids, *[-1] * (width - len(p.stop_token_ids))),
            ]
            for p, c in zip(params, contexts, strict=True)
        ]
        table = sent(numbers, self.device)
        self.fed[rows], self.asked[rows], self.last[rows], self.limit[rows], self.seed[rows] = table[:, :5].unbind(1)
        self.stops[rows] = table[:, 5:]
        for row, context in zip(self.prompts[rows], contexts, strict=True):
            row[: len(context)] = sent(context, self.device)
        self.exact[rows] = True
        self.count[rows] = 0
        self.stats[rows] = 0
        self.begun[rows] = 0
        self.work[rows] = 0
        self.oldest[rows] = version
        for name, column in self.columns.items():
            column[rows] = self._fresh[name]
        sampling = [(p.temperature, p.top_k, p.top_p, p.min_p, p.repetition_penalty) for p in params]
        self.settings[rows] = sent(sampling, self.device)
        self.top_k[rows] = self.settings[rows, 1].long()
        self._asked[rows] = sampling
        penalised = [i for i, p in enumerate(params) if p.repetition_penalty != 1.0]
        if penalised and self.seen is None:
            shape = (self.sizes.slots, self.sizes.vocab)
            self.seen = torch.zeros(shape, dtype=torch.bool, device=self.device)
            self.layout += 1
        if self.seen is not None:
            self.seen[rows] = False
            for i in penalised:
                self.seen[first + i, torch.tensor(contexts[i], device=self.device)] = True
        self._sampling = None

    def set_version(self, version: int) -> None:
        """Set the version of the weights of the next cycles, a number on the device that each of their tokens gets."""
        if version != self._version:
            self.version.fill_(version)
            self._version = version

    def drawn(self) -> Tensor:
        """Return ``sampled``, made on first use.

        For exact cycles it starts from log p, since tokens are drawn from the target.
        """
        if self.sampled is None:
            self.sampled = torch.where(self.exact[:, None], self.logprobs, torch.nan)
            self.layout += 1
        return self.sampled

    def record(self, names: Sequence[str], sums: Tensor, emitted: Tensor, ahead: int = 0) -> None:
        """Add a cycle of the first B slots: sums [B, n, K] of n names, and tokens emitted [B].

        They belong to the stretch of the completion in which the cycle began (-1, the last row: see ``opens``).
        ``ahead``: tokens before its first draft.
        """
        self.recorded.update(names)
        batch, _, drafts = sums.shape
        kinds = [self.names.index(name) for name in names]
        count = self.count[:batch]
        stretch = torch.bucketize(count, self.starts[1:], right=True)
        stretch = stretch.masked_fill(self.opens[:batch] & (count == 0), -1)
        row = torch.arange(batch, device=self.device)
        # A row that emits nothing has ended before, or is dead: no cycle of its completion begins.
        self.begun[row, stretch] += torch.stack([emitted.clamp_max(1), emitted], 1)
        if kinds == [*range(len(kinds))]:  # the usual case, and a slice costs the device nothing
            self.stats[row, stretch, : len(kinds), :drafts] += sums
        else:
            self.stats[row[:, None], stretch[:, None], on_device(tuple(kinds), self.device), :drafts] += sums
        self.latest = (sums, stretch, emitted, kinds, ahead)

    def cut(self, slot: int, count: int) -> None:
        """End a slot's completion after ``count`` tokens; remove later tokens of its latest cycle from the sums."""
        if self.latest is not None:
            sums, stretch, emitted = (part[slot] for part in self.latest[:3])
            beyond, kinds, ahead = int(self.count[slot]) - count, *self.latest[3:]
            left = max(0, int(emitted) - beyond - ahead)
            self.stats[slot, stretch, kinds, left : sums.shape[1]] -= sums[:, left:]
            self.begun[slot, stretch, 1] -= beyond
        self.count[slot] = count

    def named(self, sums: NDArray[np.float64]) -> dict[str, Any]:
        """Return sums [n, K] over the draft positions as fields of ``DecodeStats``.

        Statistics that were not measured are empty, not 0.
        """
        found: dict[str, Any] = dict(zip(self.names, sums, strict=True))
        stats = {name: found.pop(name) for name in DRAFT_STATS}
        return {name: own if name in self.recorded else own[:0] for name, own in stats.items()} | {"counts": found}

    def move(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """Move the states of slots to other slots, none of which is a source, with ``lengths`` entries of their caches.

        For caches in pages the rows of the table move, and no entry.
        """
        rows, places = (sent(slots, self.device) for slots in (sources, targets))
        for tensor in self._all():
            tensor[places] = tensor[rows]
        if self.pages is not None:
            for source, target in zip(sources, targets, strict=True):
                self.pages.move(source, target)
        for cache in self.caches.values():
            for source, target, length in zip(sources, targets, lengths, strict=True):
                cache.copy_slot(source, target, target + 1, length)
        for source, target in zip(sources, targets, strict=True):
            self._asked[target] = self._asked[source]
        self._sampling = None

    def retire(self, batch: int) -> None:
        """Turn all slots from ``batch`` on into dead rows.

        They run in a cycle and emit nothing, as they have no room, and hold no request. Nothing reads the entries that
        a cycle writes there, and ``start`` resets the slot.
        """
        dead = slice(batch, self._retired)
        if dead.start >= self._retired:
            return
        for tensor in (self.fed, self.last, self.count, self.limit, self.top_k):
            tensor[dead] = 0
        self.settings[dead] = self._neutral
        self._asked[dead] = [tuple(NEUTRAL.values())] * (self._retired - batch)
        self._retired, self._sampling = batch, None

    def own_columns(self, batch: int) -> dict[str, Tensor]:
        """Return copies [B, ...] of the columns of the first B slots that do not follow from their contexts."""
        return {name: column[:batch].clone() for name, column in self.columns.items() if name not in self._derived}

    def freeze(self, before: Mapping[str, Tensor], emitted: Tensor, done: Tensor) -> None:
        """Make rows that are ``done`` [B] emit nothing later, and restore the columns of rows that emitted nothing.

        Rows that emitted nothing ended before this cycle. ``before`` is the result of ``own_columns`` when the cycle
        began, and ``emitted`` [B] are its tokens.
        """
        batch = len(emitted)
        limit, count = self.limit[:batch], self.count[:batch]
        torch.where(done, count, limit, out=limit)
        for name, old in before.items():
            column = self.columns[name][:batch]
            torch.where((emitted > 0).view(-1, *[1] * (column.dim() - 1)), column, old, out=column)

    def share(self, source: int, first: int, end: int, length: int) -> None:
        """Copy the context's state of a slot, with ``length`` entries of its caches, to slots first..end-1."""
        if self.pages is not None:
            self.pages.share(source, first, end, length)
        for cache in self.caches.values():
            cache.copy_slot(source, first, end, length)
        for name in self._derived:
            self.columns[name][first:end] = self.columns[name][source].clone()

    def snapshot(self, slot: int, length: int) -> HeldEntries:
        """Return the first ``length`` entries of a slot: its pages, and copies of caches that have none."""
        if self.pages is not None:
            self.pages.upload()  # a cache may run a pass over its deferred entries
        copies = {name: cache.snapshot(slot, length) for name, cache in self.caches.items()}
        pages = () if self.pages is None else self.pages.hold(slot, length)
        return HeldEntries(copies=copies, pages=pages)

    def restore(self, slot: int, held: HeldEntries, length: int) -> None:
        """Write the first ``length`` entries that ``snapshot`` returned into a slot."""
        if self.pages is not None:
            self.pages.restore(slot, held.pages, length)
        for name, cache in self.caches.items():
            cache.restore(slot, held.copies[name], length)

    def forget(self, held: HeldEntries) -> None:
        """Release the pages that ``snapshot`` returned."""
        if self.pages is not None:
            self.pages.drop(held.pages)

    def sampling(self, batch: int) -> BatchSampling:
        """Return the sampling parameters of the first ``batch`` slots; neutral settings cost nothing."""
        if self._sampling is None or self._sampling[0] != batch:
            columns = {}
            for i, (name, neutral) in enumerate(NEUTRAL.items()):
                asked = any(row[i] != neutral for row in self._asked[:batch])
                columns[name] = self.settings[:batch, i] if asked else None
            if columns["top_k"] is not None:
                columns["top_k"] = self.top_k[:batch]
            self._sampling = (batch, BatchSampling(**columns))
        return self._sampling[1]


@lru_cache
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Return numbers [n] that every cycle needs as a tensor, copied once, since the host waits for such a copy."""
    return torch.tensor(numbers, device=device)


def sent(numbers: Sequence[Any], device: torch.device) -> Tensor:
    """Return numbers as a tensor on a device; the host does not wait for queued work of the device."""
    made = torch.tensor(numbers)
    return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)


def _rounded(entries: int) -> int:
    return -(-entries // PREFIX_STEP) * PREFIX_STEP
