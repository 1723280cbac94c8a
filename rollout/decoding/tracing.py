"""Watches verification, and says of some requests how each of their tokens came about (``bebop.trajectory``).

What a cycle shows is condensed where it is, to a few numbers a place, and stays there until its request ends: a cycle
waits for nothing more than before. Rows that nobody asked about cost nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.places import condensed, unknown, unpacked
from bebop.trajectory import TOP, Completion, Trace, join_traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Cycle:
    """What is kept of a cycle, of the R rows that are traced."""

    drafter: str
    places: Tensor  # [R, K + 1, 7 + 4M], see ``condensed``


class Tracer:
    """An ``Observer`` of cycles, which is told where requests come, move and end."""

    def __init__(self, drafter: str) -> None:
        """``drafter``: who is in charge now."""
        self.drafter = drafter
        self._cycles: dict[int, list[tuple[Cycle, int]]] = {}  # slot -> the cycles of its request, and its row in each
        self._chosen: Tensor | slice | None = None  # the slots as an index, until they change

    def follow(self, slot: int) -> None:
        """Trace the request that has come to a slot."""
        self._cycles[slot], self._chosen = [], None

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Requests go from slots to others, whose own have ended."""
        for source, target in zip(sources, targets, strict=True):
            if source in self._cycles:
                self._cycles[target], self._chosen = self._cycles.pop(source), None

    def end(self, slot: int, count: int, before: Completion | None, vocabulary: int) -> Trace | None:
        """The trace of an answer of ``count`` tokens that leaves a slot, if it is followed.

        ``before``: what it went on from; of tokens that came without a trace nothing is known.
        """
        if slot not in self._cycles:
            return None
        cycles, self._chosen, top = self._cycles.pop(slot), None, min(TOP, vocabulary)
        done = 0 if before is None else len(before.token_ids)
        own = unpacked([c.places[row] for c, row in cycles], [c.drafter for c, _ in cycles], count - done, top)
        return own if before is None else join_traces([before.trace or unknown(done, top), own])

    def __call__(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted, emitted: Tensor) -> None:
        """See ``Observer``."""
        if not self._cycles:
            return
        slots, chosen = sorted(self._cycles), self._index(rows.last.device)
        places = condensed(
            draft.tokens[chosen],
            None if draft.probs is None else draft.probs[chosen],
            None if draft.lengths is None else draft.lengths[chosen],
            None if draft.entropies is None else draft.entropies[chosen],
            out.probs[chosen],
            accepted.tokens[chosen],
            accepted.lengths[chosen],
            emitted[chosen],
        )
        cycle = Cycle(drafter=self.drafter, places=places)
        for row, slot in enumerate(slots):
            self._cycles[slot].append((cycle, row))

    def _index(self, device: torch.device) -> Tensor | slice:
        """The slots in order; neighbours as a slice, which copies nothing."""
        if self._chosen is None:
            slots = sorted(self._cycles)
            first, end = slots[0], slots[-1] + 1
            if end - first == len(slots):
                self._chosen = slice(first, end)
            else:  # put together on the device, which a copy would have to wait for
                numbers = torch.arange(end, device=device)
                self._chosen = torch.cat([numbers[slot : slot + 1] for slot in slots])
        return self._chosen
