"""Drive an embedded engine by hand: start requests, step, stop them, go on elsewhere, and look at what was left."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch

from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine
from bebop.trajectory import Completion

T = TypeVar("T")


def decoder_of(one: TorchEngine) -> DraftVerify:
    assert isinstance(one.decoder, DraftVerify)
    return one.decoder


def drafter_of(one: TorchEngine, kind: type[T]) -> T:
    drafter = decoder_of(one).drafter
    assert isinstance(drafter, kind)
    return drafter


def started(one: TorchEngine, asked: Sequence[Request], cycles: int = 0) -> TorchEngine:
    """Add requests to an engine, step so many cycles, and return it."""
    for request in asked:
        one.add(request)
    for _ in range(cycles):
        one.step()
    return one


def finished(one: TorchEngine) -> dict[int, Completion]:
    """Step until nothing is left to do, and return the completions by request."""
    done: dict[int, Completion] = {}
    while one.unfinished:
        done |= {f.id: f.completion for f in one.step()}
    return done


def aborted(one: TorchEngine) -> dict[int, Completion]:
    """Abort all requests, and return what they have by request."""
    return {f.id: f.completion for f in one.abort()}


def resumed(asked: Sequence[Request], parts: Mapping[int, Completion]) -> list[Request]:
    """Return the requests with what they had when they were aborted."""
    return [dataclasses.replace(request, partial=parts[request.id]) for request in asked]


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [completion.token_ids.tolist() for completion in completions]


def read_at_once(one: TorchEngine, other: TorchEngine) -> TorchEngine:
    """Let another engine read the contexts of the running requests from the beginning, and return it."""
    contexts = [one._context(slot) for slot in range(len(one.active))]
    with torch.inference_mode():
        other.slots.reserve(0, [len(context) - 1 for context in contexts])
        other.decoder.prefill(0, contexts)
    return other


def cache_error(one: TorchEngine, other: TorchEngine, name: str = "target") -> float:
    """Return how far the cached keys and values of the running requests are from those of another engine."""
    mine, wanted = one.slots.caches[name], other.slots.caches[name]
    layers = range(mine.first_layer, mine.first_layer + len(mine.keys))
    return max(
        float((a[slot, :, :fed] - b[slot, :, :fed]).abs().max())
        for layer in layers
        for a, b in zip(mine.held(layer, len(one.fed)), wanted.held(layer, len(one.fed)), strict=True)
        for slot, fed in enumerate(one.fed)
    )
