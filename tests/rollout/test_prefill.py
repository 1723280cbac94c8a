"""Contexts are read in passes of a bounded size, and what is read does not depend on how it was cut into passes."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bebop.model.attention import SlotContext
from bebop.rollout.engine import Request
from bebop.rollout.prefill import arrange, passes
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems import SYSTEMS
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.driving import started, tokens
from tests.rollout.test_conformance import engine, policy_of


def long_tail(count: int, seed: int = 0, most: int = 2000) -> list[int]:
    chance = random.Random(seed)
    return [min(most, max(50, int(chance.lognormvariate(5.7, 1.0)))) for _ in range(count)]


@pytest.mark.parametrize("tokens", [16, 100, 2048, 8192])
@pytest.mark.parametrize("seed", range(4))
def test_passes_read_every_entry_once_and_in_order_within_their_bounds(tokens: int, seed: int) -> None:
    chance = random.Random(seed)
    lengths = [*long_tail(5, seed, 400), 0, 1, *long_tail(3, seed + 10)]
    starts = [chance.choice([0, 0, 7, 333]) for _ in lengths]
    ends = [start + length for start, length in zip(starts, lengths, strict=True)]
    there = list(starts)
    for one in passes(starts, ends, tokens):
        for row, (start, end) in enumerate(zip(one.starts, one.ends, strict=True), start=one.first):
            assert start == there[row] <= end
            there[row] = end
        assert one.computed <= tokens
        # One token is read in any case, however many entries it sees.
        assert one.computed * max(one.ends) <= tokens**2 or one.computed == 1
    assert there == ends


def test_what_fits_one_pass_is_one_pass_whatever_its_padding() -> None:
    [one] = passes([0, 0, 5], [1, 2000, 6], 3 * 2000)
    assert (one.first, one.starts, one.ends) == (0, (0, 0, 5), (1, 2000, 6))
    assert passes([], [], 16) == []


def test_padding_of_long_tailed_lengths_is_a_few_per_cent() -> None:
    """One pass over them would compute four times as many positions."""
    for seed in range(5):
        lengths = long_tail(32, seed)
        order = arrange([[n] * length for n, length in enumerate(lengths)], [0] * 32, 8192)
        ordered = [lengths[i] for i in order]
        parts = passes([0] * 32, ordered, 8192)
        assert sum(one.computed for one in parts) < 1.07 * sum(lengths)
        assert 32 * max(lengths) > 2 * sum(lengths) and len(parts) <= 16


def test_contexts_are_ordered_by_length_only_where_one_pass_is_too_few() -> None:
    contexts = [[1, 2, 3], [4, 5], [1, 2, 3], [6], [4, 5]]
    assert arrange(contexts, [0] * 5, 9) == [0, 2, 1, 4, 3]  # equal ones are read once: three of three tokens
    assert arrange(contexts, [0] * 5, 8) == [3, 1, 4, 0, 2]
    assert arrange(contexts, [0, 0, 2, 0, 1], 9) == [2, 4, 0, 1, 3], "those with entries come first"
    assert arrange(contexts, [0, 0, 2, 0, 1], 1) == [2, 4, 3, 1, 0]


# ---- the engine

LONG = [[(7 * row + 3 * place) % 11 for place in range(length)] for row, length in enumerate((1, 40, 3, 55, 17, 40))]


def asked() -> list[Request]:
    """The second prompt comes again at the end: equal contexts that are no neighbours."""
    return requests([*LONG, LONG[1]], max_new_tokens=8, seed=5)


def state(one: TorchEngine) -> dict[int, list[torch.Tensor]]:
    """Return by request what its slot holds after its context was read: entries of all caches, columns that follow."""
    found: dict[int, list[torch.Tensor]] = {}
    for slot, (request, fed) in enumerate(zip(one.active, one.fed, strict=True)):
        own = [one.slots.columns[name][slot].double() for name in sorted(one.slots._derived)]
        for cache in one.slots.caches.values():
            if isinstance(cache, SlotContext):  # history keeps matches, which are found anew
                own += [store[:, slot, :, :fed] for store in (cache.keys, cache.values)]
        found[request.id] = own
    return found


def admitted(system: str, budget: int) -> tuple[TorchEngine, list[tuple[int, Sequence[int]]]]:
    """An engine that has read all contexts, and its passes: positions that the target computed, starts."""
    policy = policy_of(system, seed=3, dtype=torch.float64)
    one = engine(policy, system, slots=8, prefill_tokens=budget)
    seen: list[tuple[int, Sequence[int]]] = []
    prefill = one.decoder.prefill

    def watched(first: int, contexts: Sequence[Sequence[Any]], starts: Sequence[int]) -> None:
        width = max(len(context) - start for context, start in zip(contexts, starts, strict=True)) - 1
        seen.append((width * len(contexts), starts))
        prefill(first, contexts, starts)

    one.decoder.prefill = watched  # type: ignore[method-assign]
    started(one, asked())
    with torch.inference_mode():
        one._admit()
    return one, seen


@pytest.mark.parametrize("system", slow_but(["bebop", "block", "firp", "pipo"], SYSTEMS))
def test_contexts_read_in_pieces_leave_the_state_of_one_pass(system: str) -> None:
    """A drafter reads across the borders of pieces: its last entry of one pairs a state with the next one's token."""
    (whole, once), (cut, often) = admitted(system, 8192), admitted(system, 16)
    assert len(once) == 1 and len(often) > 6 and any(any(starts) for _, starts in often)
    assert max(size for size, _ in often) <= 16
    assert cut.retention.counts.prefilled == whole.retention.counts.prefilled
    mine, wanted = state(cut), state(whole)
    assert mine.keys() == wanted.keys()
    for request, own in mine.items():
        for a, b in zip(own, wanted[request], strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


@pytest.mark.parametrize("system", slow_but(["bebop_history"], SYSTEMS))
def test_completions_do_not_depend_on_how_prompts_are_read(system: str) -> None:
    policy = policy_of(system, seed=3, dtype=torch.float64)
    wanted = generate(engine(policy, system, slots=8), asked())
    found = generate(engine(policy, system, slots=8, prefill_tokens=16), asked())
    assert tokens(found) == tokens(wanted)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=0, atol=1e-6)


def test_equal_contexts_are_read_once_wherever_they_stand_in_the_queue() -> None:
    one, seen = admitted("bebop", 8192)
    assert len(one.active) == 7 and [len(starts) for _, starts in seen] == [6]


def test_weights_that_change_are_read_in_pieces_too() -> None:
    """With on_update=recompute; the fourth context is 60 tokens long then."""
    policy = tiny_policy(seed=3, dtype=torch.float64, with_parts=False)
    new = {name: 1.01 * value for name, value in policy.weights().items()}
    done = []
    for budget in (8192, 16):
        own = tiny_policy(seed=3, dtype=torch.float64, with_parts=False)
        one = started(engine(own, slots=8, prefill_tokens=budget, on_update="recompute"), asked(), 2)
        one.load_weights(new, 1)
        rest = {}
        while one.unfinished:
            rest |= {f.id: f.completion.token_ids.tolist() for f in one.step()}
        done.append(rest)
    assert done[0] == done[1]
