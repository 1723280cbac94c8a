"""The experts that computed each entry of the target's cache, as the trainer replays them (``bebop.model.routing``).

The table lies beside the cache. Its entries are written, moved, shared, parked and restored together with keys and
values. So a token's experts are those of the target's pass whose keys and values later tokens read. The next pass
overwrites the entries of a rejected draft, and a token that was not fed has none. Entries lie in slots even where keys
and values lie in pages: they take k bytes a layer, some hundredth of the two.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.model.attention import SlotContext
from bebop.model.routing import UNKNOWN, watch_routers
from bebop.rollout.engine import Request
from bebop.rollout.slots import Slots
from bebop.trajectory import aligned


class RoutingTable:
    """The experts of every entry: a ``Cache`` of the slots, and the ``Routing`` of the target's passes."""

    def __init__(self, backbone: Any, cache: SlotContext, slots: Slots) -> None:
        """Watch the routers of ``backbone`` in the passes that write to ``cache``.

        Raises:
            UserError: The model has no experts, or routers that are not known.
        """
        routers = watch_routers(backbone)
        self.cache = cache
        shape = (routers.count, slots.sizes.slots, slots.capacity, routers.chosen)
        self.table = torch.full(shape, UNKNOWN, dtype=routers.dtype, device=slots.device)  # [R, S, C, k]
        cache.routing = self

    def choose(self, place: int, own: Tensor) -> Tensor:
        """Record the experts [N, k] that router ``place`` chose, and return them unchanged."""
        entries, ragged = self.cache.entries, self.cache.ragged  # [B, n]
        if ragged is None:  # pseudo states of a drafter come after the tokens of each row
            ids = own.view(len(entries), -1, own.shape[1])[:, : entries.shape[1]]
        else:
            ids = ragged.padded(own[None])
        rows = self.table[place, self.cache.first_slot : self.cache.first_slot + len(entries)]
        rows.scatter_(1, entries[..., None].expand_as(ids), ids.to(rows.dtype))
        return own

    def see(self, place: int, logits: Tensor) -> None:
        """Ignore the logits: the table keeps none."""

    def compact(self, first: Tensor, kept: Tensor) -> None:
        """Move entries ``first`` [B] + ``kept`` [B, n] of rows 0..B-1 to ``first`` + 0, 1, ..., as the cache does."""
        rows = torch.arange(len(first), device=first.device)[:, None]
        steps = torch.arange(kept.shape[1], device=first.device)
        self.table[:, rows, first[:, None] + steps] = self.table[:, rows, first[:, None] + kept]

    def copy_slot(self, source: int, first: int, end: int, length: int) -> None:
        """Copy the first ``length`` entries of one slot to slots first..end-1."""
        self.table[:, first:end, :length] = self.table[:, source : source + 1, :length].clone()

    def snapshot(self, slot: int, length: int) -> tuple[Tensor, ...]:
        """Return a copy of the first ``length`` entries of a slot [R, length, k]."""
        return (self.table[:, slot, :length].clone(),)

    def restore(self, slot: int, held: tuple[Tensor, ...], length: int) -> None:
        """Write the first ``length`` entries that ``snapshot`` returned into a slot."""
        self.table[:, slot, :length] = held[0][:, :length]

    def put_back(self, slot: int, known: Tensor) -> None:
        """Restore experts [R, n, k] of the first n entries of a slot, where they are known.

        If a context is read again, its tokens keep the experts under which they were sampled.
        """
        rows, known = self.table[:, slot, : known.shape[1]], known.to(self.table)
        rows.copy_(torch.where(known == UNKNOWN, rows, known))

    def resume(self, slot: int, request: Request) -> None:
        """Restore the experts that an aborted completion holds for its tokens."""
        assert request.partial is not None
        known = request.partial.routing
        if known is not None:
            length = len(request.token_ids) + len(request.partial.token_ids)
            whole = aligned(known, length)
            self.put_back(slot, torch.from_numpy(whole).permute(1, 0, 2))

    def completions(
        self, chosen: Tensor, fed: Sequence[int], lengths: Sequence[int]
    ) -> list[NDArray[np.int8 | np.int16]]:
        """Return the experts [P + T, R, k] of the tokens of each chosen slot; ``UNKNOWN`` for tokens that were not fed.

        Args:
            chosen: [n] slots.
            fed: entries of each.
            lengths: P + T, tokens of prompt and completion of each.
        """
        held = self.table[:, chosen, : max(lengths)].permute(1, 2, 0, 3).cpu().numpy()
        found = []
        for rows, entries, length in zip(held, fed, lengths, strict=True):
            own = rows[:length].copy()
            own[entries:] = UNKNOWN
            found.append(own)
        return found
