"""What an MTP head has put off: the target's states at entries that it may never have to read, kept until it is asked.

A head's cache is needed where it drafts, and nowhere else. One pass over what came meanwhile costs little more than one
over the latest cycle's tokens.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bebop.model.attention import SlotContext
from bebop.rollout.decoding.base import Rows, TargetOutput
from bebop.rollout.slots import Slots

ROOM = 64  # entries of a row that are put off at most, or twice a cycle's tokens


class Unread:
    """Entries of the head's cache that are still to be written, by row, with the states [R, d] to write them from."""

    def __init__(self, slots: Slots, like: Tensor) -> None:
        """``like`` [d]: a state."""
        self.slots = slots
        # [S] the first such entry: ``fed`` or -1 if there is none
        self.first = slots.add("mtp/first_unread", torch.tensor(-1), of_context=True)
        self.room = max(ROOM, 2 * (slots.sizes.drafts + 1))
        self.most = 0  # entries; no row is further behind, and nobody has to ask the device
        self.states = slots.add("mtp/unread", torch.zeros(self.room, *like.shape, dtype=like.dtype), of_context=True)

    def full(self, width: int) -> bool:
        """Whether there may be no room for ``width`` more."""
        return self.most + width > self.room

    def put_off(self, rows: Rows, out: TargetOutput, emitted: Tensor, width: int) -> None:
        """Keep the states of the entries of a cycle, ``emitted`` [B] of each row and ``width`` at most."""
        self.most += width
        first = self.first[: rows.batch]
        torch.where(first < 0, rows.fed, first, out=first)
        row, step = (torch.arange(width, device=emitted.device) < emitted[:, None]).nonzero().unbind(1)
        self.states[row, (rows.fed[row] + step) % self.room] = out.hidden[row, step]

    def read(self, first: int, batch: int) -> None:
        """Nothing is put off any more in slots ``first``, ``first`` + 1, ..."""
        self.first[first : first + batch] = -1

    def read_to(self, entries: Tensor) -> None:
        """Somebody has read on to ``entries`` [B] of the first B rows, which are all, and had read all before."""
        self.first[: len(entries)] = entries
        self.most = 0

    def behind(self, first: int, batch: int) -> Tensor:
        """How many entries are to be written [B] in slots ``first``, ``first`` + 1, ..."""
        known = self.first[first : first + batch]
        return torch.where(known < 0, 0, self.slots.fed[first : first + batch] - known)

    def of(self, first: int, behind: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Entries, tokens [B, W] and states [B, W, d] of what is ``behind`` [B], in slots ``first``, ``first`` + 1, ...

        Beyond that, and in rows that have nothing to write, entries are such as nobody sees until they are overwritten.
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
    """The cache of a head, whose drafters share what is put off.

    What is taken from a row goes on elsewhere, so what it has put off is read before.
    """

    unread: Unread | None = None  # None: nobody puts anything off
    settle: Callable[[int], None]  # reads what a slot has put off

    def taken(self, slot: int, length: int) -> tuple[Tensor, Tensor]:
        """See ``Cache``."""
        self.settle(slot)
        return super().taken(slot, length)
