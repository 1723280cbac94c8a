"""Attention of rows end to end in groups of neighbours: the numbers of padded rows, and the cheapest groups."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import combinations, pairwise

import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.model import ragged_attention
from bebop.model.attention import SlotContext
from bebop.model.lean import as_modules
from bebop.model.ragged_attention import CALL, MAX_ROWS, READING, Ragged, RaggedAttention, RowGroup, row_groups
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import requests, tiny_policy

SLOTS, ROOM, SIZE, LAYERS = 9, 48, 8, 2
LENGTHS = [[3, 3, 3, 3], [1, 1, 12, 1, 1, 2], [5], [1], [7, 1, 4, 4, 16, 2, 2, 9]]


def filled(kv_heads: int) -> SlotContext:
    """A cache in use: what lies beyond a row's entries is there, and finite."""
    cache = SlotContext(LAYERS, SLOTS, ROOM, kv_heads, SIZE, torch.zeros(1))
    for store in (cache.keys, cache.values):
        store.normal_()
    return cache


def passed(
    lengths: Sequence[int], heads: int, kv_heads: int, seed: int, slot: int = 0
) -> tuple[list[Tensor], list[SlotContext]]:
    """What rows get in two layers [N, H, D], end to end and then padded, and the caches afterwards."""
    torch.manual_seed(seed)
    many, width = torch.tensor(lengths), max(lengths)
    ragged, fed = Ragged.of(many, width), torch.randint(0, ROOM - width, (len(lengths),))
    entries, used = fed[:, None] + torch.arange(width), min(ROOM, int((fed + many).max()) + 3)
    query, key, value = (torch.randn(LAYERS, sum(lengths), n, SIZE) for n in (heads, kv_heads, kv_heads))
    ours, theirs = filled(kv_heads), filled(kv_heads)
    theirs.keys.copy_(ours.keys)
    theirs.values.copy_(ours.values)
    out, wanted = [], []
    with torch.inference_mode(), ours.at(slot), theirs.at(slot):
        ours.place(entries, used, ragged=ragged)
        theirs.place(entries, used)
        for layer in range(LAYERS):
            three = [x[layer].transpose(0, 1)[None] for x in (query, key, value)]
            out.append(ours.attend(layer, *three, 0.3)[0])
            padded = [ragged.padded(x[layer][None]).transpose(1, 2) for x in (query, key, value)]
            wanted.append(ragged.packed(theirs.attend(layer, *padded, 0.3))[0])
    for row, (first, length) in enumerate(zip(fed.tolist(), lengths, strict=True), start=slot):
        for store in (theirs.keys, theirs.values):  # padding of the padded: nobody sees it
            store[:, row, :, first + length : first + width] = 0
        for store in (ours.keys, ours.values):
            store[:, row, :, first + length : first + width] = 0
    return [torch.stack(out), torch.stack(wanted)], [ours, theirs]


@pytest.mark.parametrize("call", [0, CALL, 2**40])  # a row a call, as it is, and one call
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (2, 1)])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_groups_give_what_padded_rows_give(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int], heads: int, kv_heads: int, call: int
) -> None:
    """All that comes out, and all that is in the caches."""
    monkeypatch.setattr(ragged_attention, "CALL", call)
    for slot in (0, 1):
        (out, wanted), (ours, theirs) = passed(lengths, heads, kv_heads, len(lengths), slot)
        assert out.shape == (LAYERS, sum(lengths), heads, SIZE) and torch.allclose(out, wanted, atol=1e-5)
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


def test_random_lengths_in_groups_of_several_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes at which the cheapest groups are neither all rows nor one row each."""
    monkeypatch.setattr(ragged_attention, "CALL", 2**12)
    chosen: list[int] = []

    def watched(*given: object) -> list[RowGroup]:
        chosen.append(len(groups := row_groups(*given)))  # type: ignore[arg-type]
        return groups

    monkeypatch.setattr(ragged_attention, "row_groups", watched)
    for seed in range(20):
        torch.manual_seed(seed)
        lengths = torch.randint(1, 17, (8,)).tolist()
        (out, wanted), _ = passed(lengths, 4, 2, seed)
        assert torch.allclose(out, wanted, atol=1e-5)
    assert len(chosen) == 20 and sum(1 < count < 8 for count in chosen) > 10


def cost(widths: Sequence[int], used: Sequence[int], edges: Sequence[int], work: int, threads: int) -> float:
    """Of groups from edge to edge, by the definition."""
    areas = [(b - a) * (max(widths[a:b]) + READING) * max(used[a:b]) for a, b in pairwise(edges)]
    return sum(areas) * work + CALL * threads * len(areas)


def test_no_other_groups_of_neighbours_cost_less() -> None:
    several = 0
    for seed in range(30):
        torch.manual_seed(seed)
        widths, used = torch.randint(1, 17, (7,)).tolist(), torch.randint(20, 200, (7,)).tolist()
        work, threads = 256 * (1 + seed % 5), 1 + seed % 2
        groups = row_groups(widths, used, work, threads)
        edges = [group.first for group in groups] + [7]
        assert [(g.first, g.end) for g in groups] == [*pairwise(edges)]
        assert [(g.width, g.used) for g in groups] == [(max(widths[g.rows]), max(used[g.rows])) for g in groups]
        all_edges = [[0, *cut, 7] for n in range(7) for cut in combinations(range(1, 7), n)]
        least = min(cost(widths, used, one, work, threads) for one in all_edges)
        assert cost(widths, used, edges, work, threads) == pytest.approx(least)
        several += 1 < len(groups) < 7
    assert several > 10


def test_rows_alike_attend_in_one_call_as_far_as_groups_go() -> None:
    assert row_groups([4] * 8, [90] * 8, 256) == [RowGroup(0, 8, 4, 90)]
    assert row_groups([4], [90], 256) == [RowGroup(0, 1, 4, 90)]
    many = row_groups([4] * 3 * MAX_ROWS, [90] * 3 * MAX_ROWS, 256)
    assert [group.end - group.first for group in many] == [MAX_ROWS] * 3


def test_no_device_is_asked_what_rows_need() -> None:
    """Tensors without values stand for those of another device: nothing can be read from them."""
    stores = [torch.zeros(LAYERS, SLOTS, 2, ROOM, SIZE, device="meta") for _ in range(2)]
    lengths, places, numbers = (torch.zeros(n, dtype=torch.long, device="meta") for n in ((3,), (8,), (3, 5)))
    ragged, entries = Ragged(lengths=lengths, places=places, numbers=numbers), torch.zeros_like(numbers)
    one = RaggedAttention.of(*stores, entries, 32, ragged, 4)
    assert [call.bias.shape for call in one.calls] == [(3, 1, 10, 32)]
    turned, value = (torch.zeros(8, heads, SIZE, device="meta") for heads in (6, 2))
    assert one(0, turned, value, 0.3).shape == (8, 4, SIZE)


# ---- Rows end to end: where they lie, and passes of the target and the head over them, against passes over padded rows

PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8, 1], [9, 3]]
THREE = torch.tensor([2, 5, 1])


def test_rows_go_end_to_end_and_back() -> None:
    ragged, values = Ragged.of(THREE, 5), torch.arange(15).reshape(3, 5)
    assert ragged.packed(values).tolist() == [[0, 1, 5, 6, 7, 8, 9, 10]] and ragged.rows.tolist() == [0, 0, *[1] * 5, 2]
    back = [[0, 1, 0, 0, 0], [5, 6, 7, 8, 9], [10] * 5]
    assert ragged.padded(ragged.packed(values)).tolist() == back, "padding is its row's first"


def engine(system: str = "bebop") -> TorchEngine:
    """One whose rows have run some cycles."""
    config = DecodingConfig(system=system, draft_tokens=5)
    one = TorchEngine(tiny_policy(seed=3, dtype=torch.float64), config, slots=3, max_length=64)
    for request in requests(PROMPTS, max_new_tokens=40):
        one.add(request)
    for _ in range(3):
        one.step()
    assert len(one.active) == 3
    return one


@pytest.mark.parametrize("lean", [True, False])
def test_verification_end_to_end_is_that_of_padded_rows(lean: bool) -> None:
    """Its states, and what it leaves in the cache; through the lean pass and through the modules."""
    one = engine()
    assert isinstance(one.decoder, DraftVerify)
    target, tokens, ragged = one.decoder.target, torch.arange(15).reshape(3, 5) % 11, Ragged.of(THREE, 5)
    with torch.inference_mode():
        rows, before = Rows(one.slots, 3, max(one.fed)), target.cache.keys.clone()
        wanted = target.verify(rows, tokens)[0]
        keys, values = target.cache.keys.clone(), target.cache.values.clone()
        target.cache.keys.copy_(before)
        with nullcontext() if lean else as_modules():
            states = target.verify(rows, tokens, ragged=ragged)[0]
    assert states.shape == (1, 8, wanted.shape[-1]) and torch.allclose(states, ragged.packed(wanted))
    for row, (fed, length) in enumerate(zip(one.fed, THREE.tolist(), strict=True)):
        assert torch.allclose(target.cache.keys[:, row, :, : fed + length], keys[:, row, :, : fed + length])
        assert torch.allclose(target.cache.values[:, row, :, : fed + length], values[:, row, :, : fed + length])


@pytest.mark.slow
def test_each_row_keeps_its_own_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows end to end are sampled as they would be side by side, with a temperature and a penalty each."""
    asked = [
        *requests(PROMPTS, max_new_tokens=30, temperature=0.6),
        *requests(PROMPTS, max_new_tokens=30, top_k=3, repetition_penalty=1.3),
    ]
    answers = []
    for share in (0.0, 1.0):  # never, and whenever anything is saved
        monkeypatch.setattr("bebop.rollout.decoding.draft_verify.WORTH_PACKING", share)
        config = DecodingConfig(system="history", draft_tokens=5, verify_ratio=0.0)
        one = TorchEngine(tiny_policy(seed=3, dtype=torch.float64), config, slots=6, max_length=64)
        answers.append([(a.token_ids.tolist(), a.stats.cycles) for a in generate(one, asked)])
    assert answers[0] == answers[1]
