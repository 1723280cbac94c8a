"""The block drafter on the engine: its cache, what a draft may depend on, blocks of any size side by side."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.lengths import FixedLength
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.block.decoding import BlockDrafter
from bebop.trajectory import Completion, DecodeStats
from tests.builders import requests, tiny_policy

PROMPTS = [[1, 2, 3], [3], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2], [3, 2]]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(5, seed=11, sharp=16.0, dtype=torch.float64)


def engine(policy: Policy, drafts: int, slots: int = 4, drafter: type[BlockDrafter] | None = None) -> TorchEngine:
    one = TorchEngine(policy, DecodingConfig(system="block", draft_tokens=drafts), slots=slots, max_length=64, room=16)
    if drafter is not None:
        parts(one).__class__ = drafter
    return one


def parts(one: TorchEngine) -> BlockDrafter:
    assert isinstance(one.decoder, DraftVerify) and isinstance(one.decoder.drafter, BlockDrafter)
    return one.decoder.drafter


def started(policy: Policy, drafts: int = 3, cycles: int = 4, drafter: type[BlockDrafter] | None = None) -> TorchEngine:
    """An engine some cycles after its start."""
    one = engine(policy, drafts, drafter=drafter)
    for request in requests(PROMPTS, max_new_tokens=40):
        one.add(request)
    for _ in range(cycles):
        one.step()
    return one


# ---- its cache


def cache_error(one: TorchEngine) -> float:
    """How far the cached keys and values are from those of an engine that reads the whole contexts at once."""
    other = engine(one.policy, 3)
    assert isinstance(other.decoder, DraftVerify)
    with torch.inference_mode():
        other.decoder.prefill(0, [one._context(slot) for slot in range(len(one.active))])
    mine, fresh = parts(one).cache, parts(other).cache
    return max(
        float((a[:, slot, :, :fed] - b[:, slot, :, :fed]).abs().max())
        for slot, fed in enumerate(one.fed)
        for a, b in ((mine.keys, fresh.keys), (mine.values, fresh.values))
    )


class LateStates(BlockDrafter):
    """Reads at each position the state of the one before it."""

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        late = {layer: states.roll(1, 1) for layer, states in out.layers.items()}
        super().commit(rows, dataclasses.replace(out, layers=late), tokens, emitted)


def test_a_context_that_grows_by_cycles_is_one_that_was_read_at_once(policy: Policy) -> None:
    one = started(policy, cycles=8)
    assert min(one.fed) > 6 and cache_error(one) < 1e-5
    assert cache_error(started(tiny_policy(5, seed=11, sharp=16.0), cycles=8)) < 1e-5, "in fp32 too"
    assert cache_error(started(policy, cycles=8, drafter=LateStates)) > 1e-2


# ---- what a draft depends on


def proposed(one: TorchEngine, length: DraftLength | None = None) -> Tensor:
    """The distributions [B, K, V] that the next drafts would be drawn from."""
    rows = Rows(one.slots, len(one.active), max(one.fed))
    with torch.inference_mode():
        draft = parts(one).propose(rows, length or FixedLength(one.policy, one.slots, one.decoding))
    assert draft.probs is not None
    return draft.probs


class SeesTheAnchor(BlockDrafter):
    """Its blocks begin a place late, so that an entry made from the anchor's own state stays in sight."""

    def _pass(self, rows: Rows, block: int, wanted: Tensor | None) -> Tensor:
        positions = rows.fed[:, None] + 1 + torch.arange(block)
        seen = torch.arange(rows.used) < rows.fed[:, None, None] + 1 + block
        self.cache.place(positions, rows.used, seen.expand(-1, block, -1))
        return self.network(self.network.slots(self.policy.embed(rows.last), block), positions, self.cache)


def moved(one: TorchEngine, offset: int) -> bool:
    """Whether other states of the target from ``offset`` places after the anchor on would change the drafts."""
    before, cache = proposed(one), parts(one).cache
    for slot, fed in enumerate(one.fed):
        for store in (cache.keys, cache.values):
            store[:, slot, :, fed + offset :] = torch.randn_like(store[:, slot, :, fed + offset :])
    return not torch.equal(proposed(one), before)


def test_a_draft_depends_on_states_strictly_before_its_anchor(policy: Policy) -> None:
    assert not moved(started(policy), 0)
    assert moved(started(policy), -1)
    assert moved(started(policy, drafter=SeesTheAnchor), 0)


# ---- blocks of any size


class ByPrompt(FixedLength):
    """A block of seed % 17 + 1 slots: a size of its own for each request, from 1 to 17."""

    limit = 16

    def __init__(self) -> None:
        """Nothing of an engine is needed."""

    def start(self, rows: Rows) -> Tensor:
        return rows.slots.seed[: rows.batch] % 17


class Unmasked(BlockDrafter):
    """Lets every row see the slots of the widest block of the batch."""

    def _pass(self, rows: Rows, block: int, wanted: Tensor | None) -> Tensor:
        return super()._pass(rows, block, None)


def answers(
    policy: Policy,
    sizes: Sequence[int],
    slots: int,
    temperature: float = 1.0,
    drafter: type[BlockDrafter] | None = None,
) -> list[Completion]:
    """Of one request for each block size."""
    one = engine(policy, 16, slots, drafter)
    assert isinstance(one.decoder, DraftVerify)
    one.decoder.length = ByPrompt()
    prompts = [PROMPTS[size % len(PROMPTS)] for size in sizes]
    asked = requests(prompts, temperature=temperature, max_new_tokens=20)
    asked = [
        dataclasses.replace(r, params=dataclasses.replace(r.params, seed=17 * 5 + size - 1))
        for r, size in zip(asked, sizes, strict=True)
    ]
    return generate(one, asked)


def same(a: Completion, b: Completion) -> bool:
    close = np.allclose(a.stats.overlap, b.stats.overlap) and np.allclose(a.logprobs, b.logprobs)
    return a.token_ids.tolist() == b.token_ids.tolist() and close


def test_each_row_of_a_mixed_batch_is_itself_alone(policy: Policy) -> None:
    sizes = range(2, 18, 3)
    alone = [answers(policy, [size], 1)[0] for size in sizes]
    assert all(same(a, b) for a, b in zip(answers(policy, sizes, len(sizes)), alone, strict=True))
    unmasked = answers(policy, sizes, len(sizes), drafter=Unmasked)
    assert not all(same(a, b) for a, b in zip(unmasked, alone, strict=True))
    assert sum((a.stats for a in alone), DecodeStats()).accept_length > 1.1


def test_an_answer_never_gets_more_than_its_block_a_cycle(policy: Policy) -> None:
    for size, answer in zip(range(1, 18), answers(policy, range(1, 18), 17), strict=True):
        assert not answer.stats.reached[size - 1 :].any() and answer.stats.accept_length <= size


def test_a_block_of_one_slot_is_plain_decoding(policy: Policy) -> None:
    """The drafter is not run; a batch in which some rows draft gives the same tokens."""
    one = answers(policy, [1], 1, temperature=0.0)[0]
    beside = answers(policy, [1, 9, 17], 3, temperature=0.0)
    prompts = requests([PROMPTS[1]], temperature=0.0, max_new_tokens=20)
    plain = generate(TorchEngine(policy, DecodingConfig(system="autoregressive"), slots=1, max_length=64), prompts)[0]
    assert one.token_ids.tolist() == plain.token_ids.tolist() == beside[0].token_ids.tolist()
    assert one.stats.draft_forwards == 0 and one.stats.cycles == len(plain.token_ids)


# ---- exact at every size
