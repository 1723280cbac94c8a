"""A cycle that was launched and not read yet: its results on the way to the host, and the requests of its rows.

Requests that end, come or move between launch and reading change their slots, not their rows in the cycle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

NONE = -1  # of a slot whose request came after the launch


def event_of(device: torch.device) -> torch.cuda.Event | None:
    """Return an event after all work queued on a CUDA device so far; None for another device."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record()
    return event


@dataclass(slots=True, kw_only=True)
class Flight:
    """A cycle of B rows in flight."""

    results: Tensor  # [n, B] on the host, in pinned memory if they come from a GPU; there once they have ``arrived``
    launched: torch.cuda.Event | None  # after all work queued on the device before the cycle; None: no CUDA device
    arrived: torch.cuda.Event | None  # when the results are on the host
    rows: list[int]  # by slot as it is now, its row in the cycle, or NONE
    began: float  # seconds

    @property
    def wanted(self) -> bool:
        """Return whether any row of the cycle belongs to a request that has not ended."""
        return any(row != NONE for row in self.rows)

    def wait(self) -> list[list[int]]:
        """Wait for the results, and return n lists of B numbers."""
        if self.arrived is not None:
            self.arrived.synchronize()
        numbers: list[list[int]] = self.results.tolist()
        return numbers

    def admit(self, count: int) -> None:
        """Record that ``count`` new requests were put into the next slots."""
        self.rows += [NONE] * count

    def move(self, sources: Sequence[int], targets: Sequence[int], left: int) -> None:
        """Record that requests have moved from slots to others, and that only the first ``left`` slots are in use."""
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
        del self.rows[left:]

    @contextmanager
    def beside(self, stream: torch.cuda.Stream | None) -> Iterator[None]:
        """Run the work within this block on ``stream``, beside the cycle.

        It waits for all work before the launch: the cycle in which rows ended, and the moves of rows after that.
        Without a stream it waits for the cycle too.
        """
        if stream is None or self.launched is None:
            yield
            return
        stream.wait_event(self.launched)
        with torch.cuda.stream(stream):
            yield
