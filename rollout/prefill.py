"""Admission of requests into slots: which requests start, and how their contexts are read, in passes of a bounded size.

- A pass computes at most ``tokens`` positions, padding included, and at most ``tokens`` ** 2 scores of each attention
  head. So its memory is bounded however many and however long the contexts are.
- Contexts that fit into one pass are read in one, whatever its padding: few tokens are read fastest that way.
- Otherwise neighbours of like lengths share a pass, and a context that is too long for one pass is read in pieces. Each
  piece sees the entries of those before it, so that the result is that of one pass, up to rounding.

Rows within a pass stay side by side. Laid end to end they would need no padding, but every drafter would have to read
them so. Sorted by length (``arrange``) they are padded by a few per cent.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Self

import torch

from bebop.errors import UserError
from bebop.rollout.decoding.base import Decoder
from bebop.rollout.engine import Request
from bebop.rollout.kv_retention import KvRetention, RetainedKv
from bebop.rollout.pages import pages_of
from bebop.rollout.slots import Slots
from bebop.trajectory import STRETCH

# Cost of one more pass, in tokens: calls on a CPU, launches and a read of all weights on a GPU.
PASS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over neighbouring contexts: entries ``starts[i]`` to ``ends[i]`` - 1 of context ``first`` + i."""

    first: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def computed(self) -> int:
        """Return the positions that the pass computes, padding included."""
        return len(self.starts) * max(end - start for start, end in zip(self.starts, self.ends, strict=True))

    def fits(self, tokens: int) -> bool:
        """Return whether the pass is within the bounds for at most ``tokens`` tokens."""
        return self.computed <= tokens and self.computed * max(self.ends) <= tokens**2

    @classmethod
    def over(cls, first: int, end: int, starts: Sequence[int], ends: Sequence[int]) -> Self:
        """Return one pass that reads contexts ``first`` to ``end`` - 1 completely."""
        return cls(first=first, starts=tuple(starts[first:end]), ends=tuple(ends[first:end]))


def passes(starts: Sequence[int], ends: Sequence[int], tokens: int) -> list[Pass]:
    """Return the passes that read contexts with the least cost in positions; those of a context are in order.

    Args:
        starts: [n] entries of each context that are in the cache already.
        ends: [n] entries that are to be in the cache.
        tokens: most tokens of a pass, padding included.
    """
    count = len(starts)
    if not count:
        return []
    everything = Pass.over(0, count, starts, ends)
    if everything.fits(tokens):
        return [everything]
    # best[i]: the cost of the first i contexts; last[i]: the passes over the last of them. As in ``row_groups``.
    best, last = [0.0], list[list[Pass]]()
    for end in range(1, count + 1):
        own = _pieces(end - 1, starts[end - 1], ends[end - 1], tokens)
        least, cut = best[end - 1] + sum(PASS + one.computed for one in own), end - 1
        width = most = 0
        for first in range(end - 1, -1, -1):
            width, most = max(width, ends[first] - starts[first]), max(most, ends[first])
            size = (end - first) * width
            if size > tokens or size * most > tokens**2:
                break  # with more contexts it is larger still
            if (cost := best[first] + PASS + size) < least:
                least, cut = cost, first
        best.append(least)
        last.append(own if cut == end - 1 else [Pass.over(cut, end, starts, ends)])
    parts: list[list[Pass]] = []
    while count:
        parts.append(last[count - 1])
        count = parts[-1][0].first
    return [one for part in reversed(parts) for one in part]


def arrange(contexts: Sequence[Sequence[Hashable]], held: Sequence[int], tokens: int) -> list[int]:
    """Return the order in which contexts are read with least padding.

    Contexts that go on from ``held`` [n] entries come first, as they read a few tokens each. Equal contexts are
    neighbours, so that one is read for all of them. Beyond that they keep their order, unless reading takes several
    passes of ``tokens`` tokens. Then they are sorted by the number of entries to compute.
    """
    first: dict[tuple[Hashable, ...], int] = {}
    same = [first.setdefault(tuple(context), place) for place, context in enumerate(contexts)]
    work = [len(context) - there for context, there in zip(contexts, held, strict=True)]
    fresh = [there == 0 for there in held]
    several = {}
    for kind in (False, True):
        group = [i for i, own in enumerate(fresh) if own is kind]
        several[kind] = len({same[i] for i in group}) * max((work[i] for i in group), default=0) > tokens
    return sorted(range(len(contexts)), key=lambda i: (fresh[i], work[i] if several[fresh[i]] else 0, same[i]))


def _pieces(place: int, start: int, end: int, tokens: int) -> list[Pass]:
    """Return the passes over one context, each as long as the bounds allow."""
    found = [Pass(first=place, starts=(start,), ends=(end,))]
    while found[-1].computed > 1 and not found[-1].fits(tokens):
        # With c <= tokens and c (start + tokens) <= tokens ** 2 both bounds hold.
        size = min(end - start - 1, tokens, max(1, tokens**2 // (start + tokens)))
        found[-1:] = [
            Pass(first=place, starts=(start,), ends=(start + size,)),
            Pass(first=place, starts=(start + size,), ends=(end,)),
        ]
        start += size
    return found


# ---- admission


@dataclass(slots=True, kw_only=True)
class _Run:
    """Neighbouring slots with the same context."""

    read: Sequence[Hashable]  # the items that the caches are made of, see ``Decoder.entries``
    parked: RetainedKv | None  # the parked cache that it goes on from
    targets: list[int] = field(default_factory=list)  # slots

    @property
    def start(self) -> int:
        """Return how many entries are restored from the parked cache.

        At least one entry is computed, since a drafter's state follows from the last.
        """
        return 0 if self.parked is None else min(self.parked.entries, len(self.read) - 2)


class Admission:
    """Fills free slots; each distinct context is computed once, and goes on from a parked cache if there is one.

    Aborted completions are restored with their tokens and state.
    """

    def __init__(self, slots: Slots, decoder: Decoder, retention: KvRetention, tokens: int) -> None:
        """Keep the parts; ``tokens`` is the most tokens that a pass over contexts computes, padding included."""
        self.slots, self.decoder, self.retention, self.tokens = slots, decoder, retention, tokens

    def check(self, request: Request) -> None:
        """Refuse an aborted request whose decoding state comes from an engine of another kind.

        Raises:
            UserError: A state of this engine has another shape.
        """
        held = {} if request.partial is None else request.partial.state
        for name, row in self.slots.export(0).items():
            if name not in held or held[name].shape == tuple(row.shape):
                continue
            if name not in self.slots.by_token:
                raise UserError(
                    f"request {request.id} cannot go on in this engine: its state {name!r} has the shape "
                    f"{held[name].shape}, and here it has {tuple(row.shape)}; decode it with the settings it began with"
                )

    def can_start(self, first: int, waiting: Sequence[Request], version: int) -> int:
        """Return how many of the first waiting requests can start now, in slots ``first``, ``first`` + 1, ...

        Where caches have pages, those for the context and the first stretch of a completion have to be free. Parked
        pages are evicted for this. The ones that these requests go on from are evicted last. A request alone always
        starts.
        """
        most, pages = min(self.slots.sizes.slots - first, len(waiting)), self.slots.pages
        if pages is None:
            return most
        needed, spared = 0, set[bytes]()
        before: tuple[list[int], RetainedKv | None] = ([], None)
        for place, request in enumerate(islice(waiting, most)):
            context, alone = _context_of(request), first + place == 0
            found = self.retention.look_up(context, request.params.seed, version) if self._extends(context) else None
            same = context == before[0] and found is before[1]
            left = len(request.token_ids) + request.params.max_new_tokens - len(context)
            entries = len(context) - 1 + min(STRETCH, left) + self.slots.ahead
            start = 0 if found is None else min(found.entries, len(context) - 2)
            shared = (len(context) - 1 if same else start) // pages.size
            # A further context is computed in one slot and shared from there, where its last page stays for a while.
            needed += pages_of(min(self.slots.capacity, entries), pages.size) - shared + (not same and not alone)
            if found is not None:
                spared.add(found.tokens)
            while needed > pages.free and self.retention.evict(spared):
                pass
            if needed > pages.free and not alone:
                return place
            if needed > pages.free:  # it needs the pages of the parked cache that it would go on from
                self.retention.evict()
                return 1
            before = (context, found)
        return most

    def admit(self, first: int, requests: Sequence[Request], version: int) -> tuple[list[Request], list[int]]:
        """Set slots ``first``, ``first`` + 1, ... for requests, under weights ``version``.

        Requests that go on from a parked cache come first: they read a few tokens, and side by side with whole prompts
        they would be padded to those. See ``arrange`` for the rest of the order. Return the requests in the order of
        their slots, and the entries of each.
        """
        found = [self._parked(request, version) for request in requests]
        contexts = [_context_of(request) for request in requests]
        order = arrange(contexts, [0 if held is None else held.entries for held in found], self.tokens)
        requests, parked = [requests[i] for i in order], [found[i] for i in order]
        contexts = [contexts[i] for i in order]
        self.slots.start(first, [r.params for r in requests], contexts, version)
        opens = torch.tensor([request.park for request in requests], device=self.slots.device)
        self.slots.opens[first : first + len(requests)] = opens
        for slot, request in enumerate(requests, start=first):
            if request.partial is not None:
                self._put_back(slot, request)
        return list(requests), self.prefill(first, contexts, parked)

    def prefill(self, first: int, contexts: list[list[int]], parked: Sequence[RetainedKv | None] = ()) -> list[int]:
        """Compute the distinct contexts, copy them to all slots that share them, and return the entries of each slot.

        Equal contexts are neighbours (see ``arrange``), so sharing has only to look at neighbours. A run of distinct
        contexts is computed in the last slots of the block, then spread from front to back. ``parked`` holds the cache
        that each context goes on from, contexts with a cache first; empty: there are none.
        """
        parked = parked or [None] * len(contexts)
        entries = [self.decoder.entries(first + offset, context) for offset, context in enumerate(contexts)]
        runs: list[_Run] = []
        for offset, (read, held) in enumerate(zip(entries, parked, strict=True)):
            if not (runs and runs[-1].read == read and runs[-1].parked is held):
                runs.append(_Run(read=read, parked=held))
            runs[-1].targets.append(first + offset)
        self._read(first + len(contexts) - len(runs), runs)
        for i, run in enumerate(runs, start=first + len(contexts) - len(runs)):
            # Run i lies at or beyond its own targets' end, so no run is overwritten before it has been spread.
            self.slots.share(i, run.targets[0], run.targets[-1] + 1, len(run.read) - 1)
            if run.parked is not None:
                self.slots.oldest[run.targets[0] : run.targets[-1] + 1] = run.parked.oldest
        fed = [len(read) - 1 for read in entries]
        self.slots.reserve(first, fed, cycles=1)
        self.slots.fed[first : first + len(fed)] = torch.tensor(fed, device=self.slots.device)
        return fed

    def _read(self, place: int, runs: Sequence[_Run]) -> None:
        """Compute the caches of runs in slots ``place``, ``place`` + 1, ..., the parked ones in passes of their own."""
        parked = [run for run in runs if run.start]
        for slot, run in enumerate(parked, start=place):
            assert run.parked is not None
            self.slots.restore(slot, run.parked.held, run.start)
        self.slots.reserve(place, [len(run.read) - 1 for run in runs])
        for first, alike in ((place, parked), (place + len(parked), runs[len(parked) :])):
            starts, ends = [run.start for run in alike], [len(run.read) - 1 for run in alike]
            for one in passes(starts, ends, self.tokens):
                # The item after the last entry goes along: a head reads pairs of a state and the next token.
                contexts = [run.read[: end + 1] for run, end in zip(alike[one.first :], one.ends, strict=False)]
                self.decoder.prefill(first + one.first, contexts, one.starts)
        reused = sum(run.start for run in parked)
        self.retention.counts.reused += reused
        self.retention.counts.prefilled += sum(len(run.read) - 1 for run in runs) - reused

    def _parked(self, request: Request, version: int) -> RetainedKv | None:
        """Return the parked cache that a request goes on from, and count a hit or a miss."""
        context = _context_of(request)
        found = self.retention.find(context, request.params.seed, version) if self._extends(context) else None
        self.retention.counts.hits += found is not None
        self.retention.counts.misses += request.park and found is None
        return found

    def _extends(self, context: Sequence[int]) -> bool:
        """Return whether a request with this context may go on from existing entries."""
        return self.decoder.extends and len(context) > 2

    def _put_back(self, slot: int, request: Request) -> None:
        """Restore an aborted completion in a slot: its tokens, their log-probs and versions, and its decoding state."""
        assert request.partial is not None
        slots, partial, done = self.slots, request.partial, len(request.partial.token_ids)
        slots.asked[slot], slots.count[slot], slots.exact[slot] = len(request.token_ids), done, partial.exact
        tables = (slots.tokens, slots.logprobs, slots.versions, slots.contexts)
        for table, values in zip(
            tables, (partial.token_ids, partial.logprobs, partial.versions, partial.oldest), strict=True
        ):
            table[slot, :done] = torch.as_tensor(values, device=slots.device)
        if slots.sampled is not None or partial.sampled_logprobs is not None:
            known = partial.logprobs if partial.exact else partial.sampled_logprobs
            slots.drawn()[slot, :done] = torch.nan if known is None else torch.as_tensor(known, device=slots.device)
        for name, row in slots.export(slot).items():
            if name in partial.state:
                state = torch.as_tensor(partial.state[name])
                if name in slots.by_token:  # of an engine of another length, perhaps; the completion fits into both
                    row[:done].copy_(state[:done])
                else:
                    row.copy_(state)


def _context_of(request: Request) -> list[int]:
    """Return prompt and completion so far of a request."""
    return [*request.token_ids, *([] if request.partial is None else request.partial.token_ids.tolist())]
