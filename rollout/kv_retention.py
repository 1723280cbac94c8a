"""Parked caches: cache entries of ended completions, kept for requests that go on from their tokens.

A conversation's next turn is such a request. A trajectory whose environment is at work holds no slot. Its entries are
kept when its completion ends. They are restored when a request comes whose tokens begin with all of the tokens that
made them. Only tokens identify a cache, compared one by one. Parked caches lie on the engine's device, within a bound
of bytes: copies, or references to pages. Pages count only if no slot holds them.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from bebop.rollout.slots import HeldEntries, Slots


@dataclass(slots=True, kw_only=True)
class RetentionCounts:
    """Counts of parked caches so far, and of those present now."""

    hits: int = 0  # requests that went on from a parked cache
    misses: int = 0  # requests with ``park`` that found no parked cache: first turns, too
    reused: int = 0  # entries that did not have to be computed
    prefilled: int = 0  # entries that had to be computed
    parked: int = 0  # copies made; equal ones are one
    refused: int = 0  # completions larger than the bound
    evicted: int = 0  # to make room
    dropped: int = 0  # with the weights or the drafter that made them
    entries: int = 0  # parked now, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedKv:
    """The parked caches of one completion."""

    tokens: bytes  # of prompt and completion, see ``_written``; the last one is in no cache of the target
    entries: int
    held: HeldEntries
    oldest: int  # version among the entries
    seeds: set[int]  # of the requests that it may be of
    bytes: int  # without its pages


class KvRetention:
    """Parked caches by their tokens, evicted least recently wanted first."""

    def __init__(self, slots: Slots, limit: int) -> None:
        """Make an empty collection; ``limit`` is the bytes of all parked caches, and 0 parks nothing."""
        self.slots, self.limit = slots, limit
        self.counts = RetentionCounts()
        self._held: OrderedDict[bytes, RetainedKv] = OrderedDict()  # by tokens, the next to go first
        self._lengths: Counter[int] = Counter()  # of the keys in ``_held``
        self._copied = 0  # bytes parked now, without pages

    @property
    def held_bytes(self) -> int:
        """Return the bytes that are parked now: copies, and pages that no slot holds."""
        return self._copied + (0 if self.slots.pages is None else self.slots.pages.parked * self._page)

    @property
    def _page(self) -> int:
        return 0 if self.slots.pages is None else self.slots.pages.bytes

    def park(self, slot: int, tokens: Sequence[int], seed: int) -> None:
        """Keep the cache entries of a slot whose prompt and completion are ``tokens``, all but the last one fed."""
        key, entries, oldest = _written(tokens), len(tokens) - 1, int(self.slots.oldest[slot])
        if not entries or not self.limit:
            return
        like = self._held.get(key)
        if like is not None and like.oldest >= oldest:  # as for members of a group with equal tokens
            like.seeds.add(seed)
            self._held.move_to_end(key)
            return
        held = self.slots.snapshot(slot, entries)
        size = len(key) + held.bytes
        if size + len(held.pages) * self._page > self.limit:
            self.counts.refused += 1
            self.slots.forget(held)
            return
        if like is not None:
            self._remove(key)
        while self.held_bytes + size > self.limit and self.evict():
            pass
        seeds = {seed} if like is None else {seed, *like.seeds}
        self._held[key] = RetainedKv(tokens=key, entries=entries, held=held, oldest=oldest, seeds=seeds, bytes=size)
        self._lengths[len(key)] += 1
        self.counts.parked += 1
        self.counts.entries += entries
        self._copied += size

    def trim(self) -> None:
        """Enforce the bound after slots were freed: pages that only parked caches hold count from now on."""
        while self.held_bytes > self.limit and self.evict():
            pass

    def evict(self, spared: Collection[bytes] = ()) -> bool:
        """Evict the next parked cache; return False if there is none but those of ``spared`` tokens."""
        first = next((key for key in self._held if key not in spared), None)
        if first is not None:
            self._remove(first)
            self.counts.evicted += 1
        return first is not None

    def find(self, context: Sequence[int], seed: int, version: int) -> RetainedKv | None:
        """Return the longest cache that a request of this context can go on from, or None.

        All of its tokens are the first ones of the context. A cache of another trajectory, as the seed tells, must be
        of the newest weights, ``version``. With older ones a completion could rest on weights from before its prompt
        was admitted, against the bound on staleness.
        """
        found = self.look_up(context, seed, version)
        if found is not None:
            # A trajectory goes on from its newest turn: what was used is the first to go, but until then there may be
            # another that begins alike.
            self._held.move_to_end(found.tokens, last=False)
        return found

    def look_up(self, context: Sequence[int], seed: int, version: int) -> RetainedKv | None:
        """Return the result of ``find`` without changing the order of eviction."""
        written = _written(context)
        for length in sorted(self._lengths, reverse=True):
            found = self._held.get(written[:length]) if length <= len(written) else None
            if found is not None and (seed in found.seeds or found.oldest == version):
                return found
        return None

    def clear(self) -> None:
        """Drop all parked caches, because their weights or their drafter are gone."""
        self.counts.dropped += len(self._held)
        for key in list(self._held):
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        gone = self._held.pop(key)
        self._lengths[len(key)] -= 1
        if not self._lengths[len(key)]:
            del self._lengths[len(key)]
        self.counts.entries -= gone.entries
        self._copied -= gone.bytes
        self.slots.forget(gone.held)


def _written(tokens: Sequence[int]) -> bytes:
    """Return tokens as bytes, eight each: equal bytes are equal tokens."""
    return array("q", tokens).tobytes()
