"""What a call holds of a CPU's memory, by the record of every allocation: whatever the system does with its pages."""

import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes of tensors that ``call`` held at a time, beyond what was there: the highest sum of allocations minus
    releases, in the order in which they happened."""
    return max(0, *_sums(call))


def left_bytes(call: Callable[[], object]) -> int:
    """Return the bytes of tensors that are still held when ``call`` has returned, by its result or by others."""
    return _sums(call)[-1]


def _sums(call: Callable[[], object]) -> list[int]:
    """Return the bytes held after each allocation and release of ``call``, whose result lives until the end."""
    gc.collect()  # garbage of what ran before would be released within ``call``, and lower its sums
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        result = call()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events: list[Any] = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    sums = list(accumulate((event.nbytes() for event in sorted(events, key=lambda e: e.start_ns())), initial=0))
    del result
    return sums
