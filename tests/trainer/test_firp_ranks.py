"""Ranks of coming tokens, and cycles that follow from them, against drafts that are made and checked one by one."""

import pytest
import torch

from bebop.config.job import DecodingConfig
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.firp.losses import BEYOND, cycles, drafts_of, token_ranks
from bebop.systems.firp.network import PseudoContext, PseudoStates, hidden_with_pseudo, read_text
from bebop.trainer.chains import TokenRow
from tests.builders import requests, tiny_policy

LAYERS = (1, 2, 2)
PROMPTS = ((1, 2, 3), (3, 2), (5, 1, 1, 2))
SHAPE = {(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0)}


@pytest.fixture(scope="module")
def policy() -> Policy:
    one = tiny_policy(6, seed=3, layers=4, dtype=torch.float64)
    one.backbone.requires_grad_(False)
    return one


@pytest.fixture(scope="module")
def rows(policy: Policy) -> list[TokenRow]:
    """Greedy answers of several lengths."""
    listed = []
    for prompt, count in zip(PROMPTS, (9, 1, 14), strict=True):
        ids = list(prompt)
        while len(ids) < len(prompt) + count:
            text = torch.tensor([ids])
            hidden = policy.hidden(text, torch.arange(len(ids))[None], CausalContext())
            ids.append(int(policy.logits(hidden[0, -1]).argmax()))
        listed.append(TokenRow(prompt=prompt, answer=tuple(ids[len(prompt) :])))
    return listed


def network() -> PseudoStates:
    return PseudoStates(hidden_size=32, layers=LAYERS).double()


def ranks_of(policy: Policy, rows: list[TokenRow]) -> list[list[list[int]]]:
    read = read_text(policy, LAYERS, [row.token_ids for row in rows])
    return token_ranks(drafts_of(policy, network()), rows, read, batch=2)


def best_drafts(policy: Policy, known: list[int]) -> list[list[int]]:
    """Tokens of each step, the likeliest first, from the token before the newest of what is known."""
    ids, anchor = torch.tensor([known[:-1]]), torch.tensor([[len(known) - 2]])
    context = PseudoContext.training(anchor, ids.shape[1])
    _, states = hidden_with_pseudo(policy, network(), ids, torch.arange(ids.shape[1])[None], anchor, context)
    ordered: list[list[int]] = policy.logits(states)[0, 0].argsort(-1, descending=True).tolist()
    return ordered


def decoded(policy: Policy, row: TokenRow, shape: set[tuple[int, ...]]) -> int:
    """Cycles of a decoder that drafts a tree and keeps the longest path that comes."""
    known, whole, count = list(row.prompt), row.token_ids, 0
    while len(known) < len(whole):
        drafts = best_drafts(policy, known)
        coming = list(whole[len(known) :])
        fits = [p for p in shape if [drafts[k][r] for k, r in enumerate(p)] == coming[: len(p)]]
        accepted = max((len(p) for p in fits), default=0)
        known, count = list(whole[: len(known) + accepted + 1]), count + 1
    return count


@pytest.mark.slow  # those of the engine are quick
def test_cycles_are_those_of_a_decoder(policy: Policy, rows: list[TokenRow]) -> None:
    for shape in (SHAPE, {(0,), (0, 0), (0, 0, 0)}, {(3,)}):
        ranks = ranks_of(policy, rows)
        assert [cycles(own, shape) for own in ranks] == [decoded(policy, row, shape) for row in rows]
    late = [own[1:] + own[-1:] for own in ranks]
    shape = {(0,), (1,), (2,)}
    assert [cycles(own, shape) for own in late] != [decoded(policy, row, shape) for row in rows]


def test_cycles_are_those_of_the_engine() -> None:
    """Which ends an answer in the middle of a cycle too, and drafts with other code."""
    model = tiny_policy(5, seed=11, layers=3, sharp=16.0, dtype=torch.float64)
    prompts = [[1, 2, 3], [3, 1], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2]]
    asked = {"temperature": 0.0, "max_new_tokens": 23}
    alone = DecodingConfig(system="autoregressive", draft_tokens=0)
    plain = generate(TorchEngine(model, alone, slots=4, max_length=64), requests(prompts, **asked))
    rows = [TokenRow(prompt=tuple(p), answer=tuple(a.token_ids.tolist())) for p, a in zip(prompts, plain, strict=True)]
    own = model.parts["firp"]
    assert isinstance(own, PseudoStates)
    read = read_text(model, own.layers, [row.token_ids for row in rows])
    ranks = token_ranks(drafts_of(model, own), rows, read)
    shape = ((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0))
    decoding = DecodingConfig(system="firp", draft_tokens=len(shape), options={"shape": shape})
    drafted = generate(TorchEngine(model, decoding, slots=4, max_length=64), requests(prompts, **asked))
    assert [a.token_ids.tolist() for a in drafted] == [list(row.answer) for row in rows]
    counted = [a.stats.cycles for a in drafted]
    assert [cycles(one, {*shape}) for one in ranks] == counted and min(counted) < 23
    assert [cycles(one, {(0,), (0, 0)}) for one in ranks] != counted


def test_ranks_end_with_the_text(policy: Policy, rows: list[TokenRow]) -> None:
    ranks = ranks_of(policy, rows)
    assert [len(own) for own in ranks] == [9, 1, 14]
    assert [place.count(BEYOND) for place in ranks[0]] == [0] * 7 + [1, 2]
    assert ranks[1][0][0] >= 0 and ranks[1][0][1:] == [BEYOND] * 2
    assert all(0 <= rank < 6 for place in ranks[2][:-2] for rank in place)


def test_a_tree_that_is_always_right_and_one_that_never_is() -> None:
    ranks = [[0, 0], [0, 0], [0, 0], [0, 0], [0, BEYOND], [BEYOND, BEYOND]]
    assert cycles(ranks, {(0,), (0, 0)}) == 2 and cycles(ranks, {(0,)}) == 3 and cycles(ranks, {(1,)}) == 6
