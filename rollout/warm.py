"""Seconds of a cycle by rows and drafts, before the first request: what ``draft_tokens=auto`` begins with."""

from collections.abc import Callable

import torch

from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.lengths.cost import CostLength
from bebop.rollout.slots import Slots
from bebop.trajectory import SamplingParams

TURNS = 5  # cycles of each kind; the fastest counts, as other work on the machine can only slow one down
CONTEXT = 64  # tokens; less where that does not fit


@torch.inference_mode()
def time_cycles(decoder: DraftVerify, slots: Slots, clock: Callable[[], float]) -> None:
    """Run cycles upon requests that nobody asked, in slots that nobody has; one that comes sets all of it anew."""
    length = decoder.length
    assert isinstance(length, CostLength)
    room = min(CONTEXT, slots.sizes.length // 2)
    asked = SamplingParams(max_new_tokens=slots.sizes.length - room)
    for rows in length.pace.sizes:
        for drafts in range(length.pace.most + 1):
            length.forced, spent = drafts, []
            for _ in range(TURNS):
                slots.start(0, [asked] * rows, [[0] * max(1, room)] * rows)
                began = clock()
                decoder.cycle(rows, room, 0).tolist()
                spent.append(clock() - began)
            length.pace.timed(rows, drafts, min(spent))
    length.forget()
