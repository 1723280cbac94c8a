"""Seconds of cycles by rows and drafts, measured before the first request: ``draft_tokens=auto`` begins with them."""

from collections.abc import Callable

import torch

from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.timed_lengths import TimedLength
from bebop.rollout.slots import Slots
from bebop.trajectory import SamplingParams

TURNS = 5  # cycles of each kind
CONTEXT = 64  # tokens; less where that does not fit


@torch.inference_mode()
def time_cycles(decoder: DraftVerify, slots: Slots, clock: Callable[[], float]) -> None:
    """Run cycles on made-up requests in free slots; a real request resets all of their state.

    A drafter from history finds as many tokens as it likes. A length that does not go by time needs no cycles.
    """
    length = decoder.length
    if not isinstance(length, TimedLength):
        return
    room = min(CONTEXT, slots.sizes.length // 2)
    asked, prompt = SamplingParams(max_new_tokens=slots.sizes.length - room), [0] * max(1, room)
    for rows in length.sizes:
        for kind in length.kinds:
            length.forced, spent = kind, []
            for _ in range(TURNS):
                slots.history.forget(prompt)
                slots.history.remember(prompt, [[0] * slots.sizes.drafts])
                slots.start(0, [asked] * rows, [prompt] * rows)
                longest = room
                for _ in range(length.before(kind)):
                    decoder.cycle(rows, longest, 0)
                    longest += 1 + slots.sizes.drafts
                began = clock()
                decoder.cycle(rows, longest, 0).tolist()
                spent.append(clock() - began)
            length.timed(spent)
    slots.history.forget(prompt)
    length.forget()
