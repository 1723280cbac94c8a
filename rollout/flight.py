"""A cycle that was launched and whose results were not read yet: where they will be, and whose they are.

Requests that end, come or move between launch and reading change their slots, not their rows in the cycle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

NONE = -1  # of a slot whose request came after the launch


def event_of(device: torch.device) -> torch.cuda.Event | None:
    """Return an event behind all that was asked of a CUDA device so far; None of another device."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(slots=True, kw_only=True)
class Flight:
    """A cycle of B rows in flight."""

    results: Tensor  # [n, B] on the host, in pinned memory if they come from a GPU; there once they have ``arrived``
    launched: torch.cuda.Event | None  # all that was asked of the device before the cycle; None: no CUDA device
    arrived: torch.cuda.Event | None  # the results
    rows: list[int]  # by slot as it is now, its row in the cycle, or NONE
    began: float  # seconds

    @property
    def wanted(self) -> bool:
        """Return whether any of its rows has not ended before."""
        return any(row != NONE for row in self.rows)

    def wait(self) -> list[list[int]]:
        """Return the results once they are there, n lists of B numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers: list[list[int]] = self.results.tolist()
        return numbers

    def admit(self, count: int) -> None:
        """Note that so many requests have come to the next slots."""
        self.rows += [NONE] * count

    def move(self, sources: Sequence[int], targets: Sequence[int], left: int) -> None:
        """Note that requests have moved from slots to others, and that the first ``left`` slots are taken now."""
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
        del self.rows[left:]

    @contextmanager
    def beside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Let work within this block run beside the cycle, on a stream; it waits for what came before the launch: the
        cycle in which rows ended, and the moves of rows after that. Without a stream it waits for the cycle too."""
        if stream is None or self.launched is None:
            yield
            return
        stream.wait_event(self.launched)
        with torch.cuda.stream(stream):
            yield
