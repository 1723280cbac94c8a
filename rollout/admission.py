"""How requests come into the slots of the embedded engine: contexts are read, and aborted completions put back."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import torch

from bebop.errors import UserError
from bebop.rollout.decoding.base import Decoder
from bebop.rollout.engine import Request
from bebop.rollout.kv_retention import KvRetention, RetainedKv
from bebop.rollout.slots import Slots


@dataclass(slots=True, kw_only=True)
class _Run:
    """Neighbouring slots with one context."""

    read: Sequence[Hashable]  # what the caches are made of
    parked: RetainedKv | None  # what it goes on from
    targets: list[int] = field(default_factory=list)  # slots

    @property
    def start(self) -> int:
        """Return the number of entries that are there.

        At least one more is computed, since what a drafter keeps follows from the last.
        """
        return 0 if self.parked is None else min(self.parked.entries, len(self.read) - 2)


class Admission:
    """Fills free slots, each distinct context computed once, from a parked cache on where there is one."""

    def __init__(self, slots: Slots, decoder: Decoder, retention: KvRetention) -> None:
        self.slots, self.decoder, self.retention = slots, decoder, retention

    def check(self, request: Request) -> None:
        """Refuse an aborted request whose decoding state another kind of engine kept.

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

    def admit(self, first: int, requests: Sequence[Request], version: int) -> tuple[list[Request], list[int]]:
        """Set slots ``first``, ``first`` + 1, ... for requests, under weights ``version``.

        Those that go on from a parked cache come first: they read a few tokens, and side by side with whole prompts
        they would be padded to those. Returns the requests in the order of their slots, and the entries of each.
        """
        found = [self._parked(request, version) for request in requests]
        order = sorted(range(len(requests)), key=lambda i: found[i] is None)
        requests, parked = [requests[i] for i in order], [found[i] for i in order]
        contexts = [_context(request) for request in requests]
        self.slots.start(first, [r.params for r in requests], contexts, version)
        opens = torch.tensor([request.park for request in requests], device=self.slots.device)
        self.slots.opens[first : first + len(requests)] = opens
        for slot, request in enumerate(requests, start=first):
            if request.partial is not None:
                self._put_back(slot, request)
        return list(requests), self.prefill(first, contexts, parked)

    def prefill(self, first: int, contexts: list[list[int]], parked: Sequence[RetainedKv | None] = ()) -> list[int]:
        """Prefill runs of slots with distinct contexts and copy them to the slots that share them -> entries of each.

        A group's requests come one after another, so equal neighbours are what sharing has to find. A run of distinct
        contexts is computed in the last slots of the block, then spread from front to back. ``parked``: what each goes
        on from, those with something first; empty: nothing.
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
        self.slots.fed[first : first + len(fed)] = torch.tensor(fed, device=self.slots.device)
        return fed

    def _read(self, place: int, runs: Sequence[_Run]) -> None:
        """Compute the caches of runs in slots ``place``, ``place`` + 1, ..., the parked ones in a pass of their own."""
        parked = [run for run in runs if run.start]
        for slot, run in enumerate(parked, start=place):
            assert run.parked is not None
            self.slots.restore(slot, run.parked.held, run.start)
        if parked:
            self.decoder.prefill(place, [run.read for run in parked], [run.start for run in parked])
        if others := runs[len(parked) :]:
            self.decoder.prefill(place + len(parked), [run.read for run in others])
        reused = sum(run.start for run in parked)
        self.retention.counts.reused += reused
        self.retention.counts.prefilled += sum(len(run.read) - 1 for run in runs) - reused

    def _parked(self, request: Request, version: int) -> RetainedKv | None:
        """Return what a request goes on from."""
        context = _context(request)
        found = None
        if self.decoder.extends and len(context) > 2:
            found = self.retention.find(context, request.params.seed, version)
        self.retention.counts.hits += found is not None
        self.retention.counts.misses += request.park and found is None
        return found

    def _put_back(self, slot: int, request: Request) -> None:
        """Put an aborted completion's tokens, with all that is known of them, and its decoding state back into a
        slot."""
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


def _context(request: Request) -> list[int]:
    """Return prompt and completion so far."""
    return [*request.token_ids, *([] if request.partial is None else request.partial.token_ids.tolist())]
