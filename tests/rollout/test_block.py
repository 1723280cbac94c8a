"""The block drafter on the engine: its cache, what a draft may depend on, blocks of any size side by side."""

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Rows, TargetOutput
from bebop.rollout.decoding.lengths import FixedLength
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.block.decoding import BlockDrafter
from bebop.trajectory import Completion, DecodeStats
from tests.builders import requests, tiny_policy
from tests.rollout.driving import cache_error, decoder_of, drafter_of, read_at_once, started

PROMPTS = [[1, 2, 3], [3], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2], [3, 2]]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(5, seed=11, sharp=16.0, dtype=torch.float64)


def engine(policy: Policy, drafts: int = 3, slots: int = 4, drafter: type[BlockDrafter] = BlockDrafter) -> TorchEngine:
    one = TorchEngine(policy, DecodingConfig(system="block", draft_tokens=drafts), slots=slots, max_length=64, room=16)
    drafter_of(one, BlockDrafter).__class__ = drafter
    return one


def running(policy: Policy, cycles: int = 4, drafter: type[BlockDrafter] = BlockDrafter) -> TorchEngine:
    """Return an engine some cycles after its start."""
    return started(engine(policy, drafter=drafter), requests(PROMPTS, max_new_tokens=40), cycles)


# ---- its cache


class LateStates(BlockDrafter):
    """Reads at each position the state of the one before it."""

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        late = {layer: states.roll(1, 1) for layer, states in out.layers.items()}
        super().commit(rows, dataclasses.replace(out, layers=late), tokens, emitted)


def test_a_context_that_grows_by_cycles_is_one_that_was_read_at_once(policy: Policy) -> None:
    def error(one: TorchEngine) -> float:
        assert min(one.fed) > 6
        return cache_error(one, read_at_once(one, engine(one.policy)), "block")

    assert error(running(policy, 8)) < 1e-5
    assert error(running(tiny_policy(5, seed=11, sharp=16.0), 8)) < 1e-5, "in fp32 too"
    assert error(running(policy, 8, LateStates)) > 1e-2


# ---- what a draft depends on


def proposed(one: TorchEngine) -> Tensor:
    """Return the distributions [B, K, V] that the next drafts would be drawn from."""
    rows = Rows(one.slots, len(one.active), max(one.fed))
    with torch.inference_mode():
        draft = drafter_of(one, BlockDrafter).propose(rows, FixedLength(one.policy, one.slots, one.decoding))
    assert draft.probs is not None
    return draft.probs


class SeesTheAnchor(BlockDrafter):
    """Its blocks begin a place late, so that an entry made from the anchor's own state stays in sight."""

    def _pass(self, rows: Rows, block: int, wanted: Tensor | None) -> Tensor:
        positions = rows.fed[:, None] + 1 + torch.arange(block)
        ways = torch.ones(rows.batch, block, block, dtype=torch.bool)
        self.cache.place(positions, rows.used, (rows.fed + 1, ways))
        return self.network(self.network.slots(self.policy.embed(rows.last), block), positions, self.cache)


def moved(one: TorchEngine, offset: int) -> bool:
    """Whether other states of the target from ``offset`` places after the anchor on would change the drafts."""
    before, cache = proposed(one), drafter_of(one, BlockDrafter).cache
    for slot, fed in enumerate(one.fed):
        for store in (cache.keys, cache.values):
            store[:, slot, :, fed + offset :] = torch.randn_like(store[:, slot, :, fed + offset :])
    return not torch.equal(proposed(one), before)


@pytest.mark.usefixtures("in_slots")
def test_a_draft_depends_on_states_strictly_before_its_anchor(policy: Policy) -> None:
    assert not moved(running(policy), 0)
    assert moved(running(policy), -1)
    assert moved(running(policy, drafter=SeesTheAnchor), 0)


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
    policy: Policy, sizes: Sequence[int], temperature: float = 1.0, drafter: type[BlockDrafter] = BlockDrafter
) -> list[Completion]:
    """Return a completion for each block size, all side by side."""
    one = engine(policy, 16, len(sizes), drafter)
    decoder_of(one).length = ByPrompt()
    asked = [
        request
        for size in sizes
        for request in requests(
            [PROMPTS[size % len(PROMPTS)]], seed=17 * 5 + size - 1, temperature=temperature, max_new_tokens=20
        )
    ]
    return generate(one, [dataclasses.replace(request, id=i) for i, request in enumerate(asked)])


def same(a: Completion, b: Completion) -> bool:
    close = np.allclose(a.stats.overlap, b.stats.overlap) and np.allclose(a.logprobs, b.logprobs)
    return a.token_ids.tolist() == b.token_ids.tolist() and close


def test_each_row_of_a_mixed_batch_is_itself_alone(policy: Policy) -> None:
    sizes = range(2, 18, 3)
    alone = [answers(policy, [size])[0] for size in sizes]
    assert all(same(a, b) for a, b in zip(answers(policy, sizes), alone, strict=True))
    unmasked = answers(policy, sizes, drafter=Unmasked)
    assert not all(same(a, b) for a, b in zip(unmasked, alone, strict=True))
    assert sum((a.stats for a in alone), DecodeStats()).accept_length > 1.1


def test_a_completion_never_gets_more_than_its_block_a_cycle(policy: Policy) -> None:
    for size, answer in zip(range(1, 18), answers(policy, range(1, 18)), strict=True):
        assert not answer.stats.reached[size - 1 :].any() and answer.stats.accept_length <= size


def test_a_block_of_one_slot_is_plain_decoding(policy: Policy) -> None:
    """The drafter is not run; a batch in which some rows draft gives the same tokens."""
    one = answers(policy, [1], temperature=0.0)[0]
    beside = answers(policy, [1, 9, 17], temperature=0.0)
    prompts = requests([PROMPTS[1]], temperature=0.0, max_new_tokens=20)
    plain = generate(TorchEngine(policy, DecodingConfig(system="autoregressive"), slots=1, max_length=64), prompts)[0]
    assert one.token_ids.tolist() == plain.token_ids.tolist() == beside[0].token_ids.tolist()
    assert one.stats.draft_forwards == 0 and one.stats.cycles == len(plain.token_ids)
