"""CPU memory held by a call, from a record of every allocation, independent of the system's handling of pages."""

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._profiler import _EventType as EventType


def peak_bytes(call: Callable[[], object]) -> int:
    """Return the most bytes of tensors that ``call`` held at once beyond earlier ones.

    This is the highest sum of allocations minus releases, in the order in which they happened.
    """
    return max(0, *_sums(call))


def left_bytes(call: Callable[[], object]) -> int:
    """Return the bytes of tensors still held after ``call`` has returned, by its result or otherwise."""
    return _sums(call)[-1]


def _sums(call: Callable[[], object]) -> list[int]:
    """Return the bytes held after each allocation and release of ``call``, whose result lives until the end.

    A release counts if ``call`` made the block. PyTorch keeps the sizes of an earlier recording: it would report the
    release of an older block with the size of another one that had the same address then.
    """
    gc.collect()  # so that what ran before is not collected within ``call``
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    held: dict[int, int] = {}  # address -> bytes
    sums = [0]
    for address, size in _changes(profile.profiler.kineto_results.experimental_event_tree()):
        if size > 0:
            held[address] = size
        sums.append(sums[-1] + size if size > 0 else sums[-1] - held.pop(address, 0))
    del result
    return sums


def _changes(roots: Sequence[Any]) -> list[tuple[int, int]]:
    """Return the address and bytes of each allocation, and of each release (negative), in their order."""
    found, left = [], list(roots)
    while left:
        event = left.pop()
        left += event.children
        if event.tag == EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return [(address, size) for _, address, size in sorted(found, key=lambda one: one[0])]
