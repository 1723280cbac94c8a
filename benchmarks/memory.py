"""What a call holds of a CPU's memory, by the record of every allocation: whatever the system does with its pages."""

from collections.abc import Callable
from typing import Any

import torch


def peak_bytes(call: Callable[[], object]) -> int:
    """Most bytes of tensors that ``call`` held at a time, beyond what was there: the highest sum of allocations minus
    releases, in the order in which they happened."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events: list[Any] = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, highest = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        highest = max(highest, held)
    return highest
