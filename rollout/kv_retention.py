"""What the caches held of completions that ended, for requests that go on from their tokens: a conversation's next
turn.

A trajectory whose environment is at work holds no slot. Its entries are copied out when its completion ends, and copied
back when a request comes whose tokens begin with all of those that made them. Only tokens say so, compared one by one:
a request has no other name for what it goes on from. The copies lie on the engine's device, within a bound of bytes.
"""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from bebop.rollout.slots import Slots


@dataclass(slots=True, kw_only=True)
class RetentionCounts:
    """What became of parked caches so far, and what there is now."""

    hits: int = 0  # requests that went on from a parked cache
    misses: int = 0  # requests that are to be parked, and found none: first turns, too
    reused: int = 0  # entries that did not have to be computed
    prefilled: int = 0  # entries that were
    parked: int = 0  # copies made; equal ones are one
    refused: int = 0  # completions larger than the bound
    evicted: int = 0  # to make room
    dropped: int = 0  # with the weights or the drafter that made them
    entries: int = 0  # parked now, tokens
    bytes: int = 0  # parked now


@dataclass(frozen=True, slots=True, kw_only=True)
class RetainedKv:
    """The caches of one completion."""

    tokens: bytes  # of prompt and completion, see ``_written``; the last one is in no cache of the target
    entries: int
    held: dict[str, tuple[Tensor, ...]]  # by cache
    oldest: int  # version among the entries
    seeds: set[int]  # of the requests that it may be of
    bytes: int


class KvRetention:
    """Parked caches, those that were wanted longest ago going first."""

    def __init__(self, slots: Slots, limit: int) -> None:
        """``limit``: bytes of all of them; 0 parks nothing."""
        self.slots, self.limit = slots, limit
        self.counts = RetentionCounts()
        self._held: OrderedDict[bytes, RetainedKv] = OrderedDict()  # by tokens, the next to go first
        self._lengths: Counter[int] = Counter()  # of the keys in ``_held``

    def park(self, slot: int, tokens: Sequence[int], seed: int) -> None:
        """Keep what the caches hold of a slot whose prompt and completion are ``tokens``, all but the last one fed."""
        key, entries, oldest = _written(tokens), len(tokens) - 1, int(self.slots.oldest[slot])
        if not entries or not self.limit:
            return
        like = self._held.get(key)
        if like is not None and like.oldest >= oldest:  # as members of a group say the same
            like.seeds.add(seed)
            self._held.move_to_end(key)
            return
        held = self.slots.snapshot(slot, entries)
        size = len(key) + sum(tensor.nbytes for tensors in held.values() for tensor in tensors)
        if size > self.limit:
            self.counts.refused += 1
            return
        if like is not None:
            self._remove(key)
        while self.counts.bytes + size > self.limit:
            self._remove(next(iter(self._held)))
            self.counts.evicted += 1
        seeds = {seed} if like is None else {seed, *like.seeds}
        self._held[key] = RetainedKv(tokens=key, entries=entries, held=held, oldest=oldest, seeds=seeds, bytes=size)
        self._lengths[len(key)] += 1
        self.counts.parked += 1
        self.counts.entries += entries
        self.counts.bytes += size

    def find(self, context: Sequence[int], seed: int, version: int) -> RetainedKv | None:
        """Return the longest cache that a request of this context can go on from, or None.

        Its tokens are the first ones of the context, all of them. Of another trajectory's caches, as the seed tells,
        only those of the newest weights, ``version``, will do: with older ones a completion could rest on weights from
        before its prompt was let in, against the bound on staleness.
        """
        written = _written(context)
        for length in sorted(self._lengths, reverse=True):
            found = self._held.get(written[:length]) if length <= len(written) else None
            if found is not None and (seed in found.seeds or found.oldest == version):
                # A trajectory goes on from its newest turn: what was used is the first to go, but until then there
                # may be another that begins alike.
                self._held.move_to_end(found.tokens, last=False)
                return found
        return None

    def clear(self) -> None:
        """Forget all: nothing may go on from weights, or a drafter, that are no more."""
        self.counts.dropped += len(self._held)
        for key in list(self._held):
            self._remove(key)

    def _remove(self, key: bytes) -> None:
        gone = self._held.pop(key)
        self._lengths[len(key)] -= 1
        if not self._lengths[len(key)]:
            del self._lengths[len(key)]
        self.counts.entries -= gone.entries
        self.counts.bytes -= gone.bytes


def _written(tokens: Sequence[int]) -> bytes:
    """Return tokens as bytes, eight each: equal ones are equal tokens."""
    return array("q", tokens).tobytes()
