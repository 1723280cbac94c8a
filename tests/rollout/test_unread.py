"""A head that reads when it is asked has read, in the end, what one that reads every cycle has."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch

from bebop.config.job import DecodingConfig
from bebop.rollout.decoding import mtp
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.mtp import HeadDrafter
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import bare_policy, requests

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [1, 2, 3], [2, 2], [9, 3, 1]]
NEVER = 1e6  # cost of a pass at which the head is never asked


def engine(system: str = "bebop_history", cost: float = NEVER, slots: int = 3, **more: int) -> TorchEngine:
    config = DecodingConfig(system=system, draft_tokens=4, cost_ratio=cost)
    one = TorchEngine(bare_policy(seed=3, dtype=torch.float64), config, slots=slots, max_length=96, **more)
    one.remember([1, 2, 3], [[5, 6, 7, 5, 6], [2, 2, 2]])
    return one


def drafter(one: TorchEngine) -> HeadDrafter:
    assert isinstance(one.decoder, DraftVerify) and isinstance(one.decoder.drafter, HeadDrafter)
    return one.decoder.drafter


def agrees(one: TorchEngine, slots: Sequence[int]) -> None:
    """State and cache of rows are those of an engine that reads their contexts from the beginning."""
    other = engine("bebop", slots=one.slots.sizes.slots)
    for slot in slots:
        context = one._context(slot)
        other.slots.reserve(slot, [len(context) - 1])
        other.decoder.prefill(slot, [context])
        states, wanted = (e.slots.columns["mtp/hidden"][slot] for e in (one, other))
        assert torch.allclose(states, wanted) and states.abs().sum() > 0
        heads = [e.slots.caches["mtp"] for e in (one, other)]
        held, read = (head.held(head.first_layer, slot + 1)[0][slot, :, : len(context) - 1] for head in heads)
        assert torch.allclose(held, read)


@pytest.mark.parametrize("room", [10, 64])
@pytest.mark.parametrize("turns", [1, 5, 13])
def test_what_was_put_off_is_read_at_once(turns: int, room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of different ages, those that moved among them, and one that has just come; some so far behind that there
    was no room."""
    monkeypatch.setattr(mtp, "ROOM", room)
    one = engine(slots=4)
    for request in requests(PROMPTS[:3], max_new_tokens=50, seed=2):
        one.add(request)
    for _ in range(turns):
        one.step()
    one.add(dataclasses.replace(requests(PROMPTS, max_new_tokens=9)[4], id=9))
    one._admit()
    rows = Rows(one.slots, len(one.active), max(one.fed))
    kept = one.slots.caches["mtp"].deferred
    behind = kept.behind(0, rows.batch)
    assert kept.most >= behind.max() > 0 == behind[-1] and kept.room == max(room, 2 * 5)
    with torch.inference_mode():
        drafter(one).catch_up(rows)
    assert not kept.behind(0, rows.batch).any()
    agrees(one, range(len(one.active)))


def test_it_reads_nothing_until_it_is_asked() -> None:
    answers = generate(engine(), requests(PROMPTS, max_new_tokens=18, seed=2))
    asked = generate(engine(cost=0.0), requests(PROMPTS, max_new_tokens=18, seed=2))
    assert sum(a.stats.draft_forwards for a in answers) == 0 < sum(a.stats.draft_forwards for a in asked)


def test_another_drafter_of_the_head_misses_nothing() -> None:
    """Its states after a switch are those of one that was in charge all along; and back again."""
    one = engine()
    for request in requests(PROMPTS[:2], max_new_tokens=60, temperature=0.0):
        one.add(request)
    for system in ("bebop", "bebop_history", "bebop", "bebop_history"):
        for _ in range(3):
            one.step()
        one.configure(DecodingConfig(system=system, draft_tokens=4, cost_ratio=NEVER))
    one.configure(DecodingConfig(system="bebop", draft_tokens=2))
    one.step()
    agrees(one, range(2))


@pytest.mark.usefixtures("in_slots")
def test_what_is_parked_has_been_read() -> None:
    one = engine()
    for request in requests(PROMPTS[:2], max_new_tokens=30):
        one.add(request)
    for _ in range(4):
        one.step()
    assert one.slots.caches["mtp"].deferred.behind(0, 2).min() > 0
    with torch.inference_mode():
        keys, values = one.slots.snapshot(1, one.fed[1]).copies["mtp"]
    agrees(one, [1])
    assert torch.equal(keys, one.slots.caches["mtp"].keys[:, 1, :, : one.fed[1]]) and values.shape == keys.shape
