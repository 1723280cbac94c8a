"""Asynchronous copies from a device to the host."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


class HostCopy:
    """Asynchronous copies of tensors to the host, by name.

    On a GPU they go to pinned memory on the current stream, so that the next launch does not wait for them. On a CPU
    they are copied at once, since their owner may write them again.
    """

    def __init__(self, **tensors: Tensor) -> None:
        """Start the copies."""
        self._host = {name: _begin(tensor.detach()) for name, tensor in tensors.items()}
        self._event: torch.cuda.Event | None = None
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(device))

    def get(self) -> dict[str, Tensor]:
        """Wait until the copies are complete, and return them."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._host


def _begin(tensor: Tensor) -> Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)


def to_device(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Return numbers [N] as a tensor on a device, without waiting for queued work of the device."""
    host = torch.tensor(numbers)
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)


class LateEntries(Sequence[dict[str, Any]]):
    """One entry for each request of a step, built from the step's copy when the first entry is read."""

    def __init__(self, copy: HostCopy, count: int, make: Callable[[dict[str, Tensor]], list[dict[str, Any]]]) -> None:
        """Keep the copy; ``make`` turns its tensors on the host into the entries of ``count`` requests."""
        self._copy, self._count, self._make = copy, count, make
        self._entries: list[dict[str, Any]] | None = None

    def __len__(self) -> int:
        """Return the number of requests."""
        return self._count

    def __getitem__(self, place: Any) -> Any:
        """Return the entry of one request, or those of several."""
        if self._entries is None:
            self._entries = self._make(self._copy.get())
        return self._entries[place]
