"""What a tree of drafts leaves behind and looks at: attention down its ways, the head's drafts, caches of the path."""

import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.kernels.trees import ancestry
from bebop.model.attention import SlotContext
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Draft, Rows
from bebop.rollout.decoding.head import HeadDrafter
from bebop.rollout.target import Target
from bebop.rollout.torch_engine import TorchEngine
from tests.builders import requests, tiny_policy
from tests.rollout.test_tree import CHAIN, FIVE, PROMPTS, answers, config, decoder_of, engine


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(5, seed=11, sharp=16.0, dtype=torch.float64)


# ---- attention

PARENTS = torch.tensor([[-1, -1, 0, 0, 1, 2, 2], [-1, 0, 1, 1, 0, 4, 3]])


def fed(policy: Policy) -> tuple[TorchEngine, Rows]:
    """Two contexts of a length each, read by the target."""
    one = TorchEngine(policy, DecodingConfig(draft_tokens=7), slots=2, max_length=64)
    asked = requests([[1, 2, 3, 4], [2, 0, 1]], max_new_tokens=20)
    one.slots.start(0, [r.params for r in asked], [[*r.token_ids] for r in asked])
    with torch.inference_mode():
        one.decoder.prefill(0, [[*r.token_ids] for r in asked])
    return one, Rows(one.slots, 2, 3)


def path_error(policy: Policy, ways: Tensor) -> float:
    """How far the states of a tree's nodes are from those of each way down it, fed as a chain."""
    one, rows = fed(policy)
    tokens = torch.arange(8).expand(2, 8) % 5  # siblings differ
    worst, right = 0.0, ancestry(PARENTS)
    with torch.inference_mode():
        target: Target = decoder_of(one).target
        states, layers, _ = target.verify(rows, tokens, [0], ways)
        for row in range(2):
            for node in range(7):
                way = [0, *(1 + right[row, node].nonzero()[:, 0])]
                alone, under, _ = target.verify(rows, tokens[:, way], [0])
                worst = max(worst, float((alone[row, -1] - states[row, node + 1]).abs().max()))
                worst = max(worst, float((under[0][row, -1] - layers[0][row, node + 1]).abs().max()))
    return worst


def test_tree_attention_is_every_path_by_itself(policy: Policy) -> None:
    ways = ancestry(PARENTS)
    assert path_error(policy, ways) < 1e-10
    other = ways.clone()
    other[0, 4, 1], other[0, 4, 0] = False, True  # a node that sees its parent's sibling instead
    assert path_error(policy, other) > 1e-3
    assert path_error(policy, torch.ones(2, 7, 7).tril().bool()) > 1e-3


# ---- what is drafted


def drafted(policy: Policy, shape: list[list[int]], params: dict[str, float]) -> tuple[HeadDrafter, Rows, Draft]:
    """The draft of two rows after some cycles."""
    one = engine(policy, config(shape))
    for request in requests(PROMPTS[:2], max_new_tokens=40, **params):
        one.add(request)
    for _ in range(3):
        one.step()
    rows, decoder = Rows(one.slots, 2, max(one.fed)), decoder_of(one)
    assert isinstance(decoder.drafter, HeadDrafter)
    with torch.inference_mode():
        return decoder.drafter, rows, decoder.drafter.propose(rows, decoder.length)  # type: ignore[attr-defined]


@pytest.mark.parametrize("params", [{}, {"temperature": 0.7, "repetition_penalty": 1.5}])
@torch.inference_mode()
def test_siblings_differ_and_the_draft_is_of_its_own_way(policy: Policy, params: dict[str, float]) -> None:
    """Each node's distribution is what a chain of its way would have, without the siblings before it, normalised."""
    shape = sorted([*FIVE, [0, 1, 0], [1, 0, 0]], key=lambda path: (len(path), path))
    drafter, rows, draft = drafted(policy, shape, params)
    assert draft.probs is not None and draft.depth == 3 == draft.forwards
    for node, path in enumerate(shape):
        hidden, seen = drafter.hidden[:2], rows.seen
        for depth in range(1, len(path)):
            token = draft.tokens[:, shape.index(path[:depth])]
            hidden = drafter._feed(rows, depth - 1, token[:, None], hidden[:, None])[:, 0]
            seen = None if seen is None else seen.scatter(1, token[:, None], True)
        logits = policy.logits(hidden)[:, None]
        wanted = rows.probs(logits, None if seen is None else seen[:, None])[:, 0]
        for sibling in range(path[-1]):
            wanted = wanted.scatter(1, draft.tokens[:, shape.index([*path[:-1], sibling]), None], 0.0)
        wanted = wanted / wanted.sum(-1, keepdim=True)
        assert torch.allclose(draft.probs[:, node], wanted, atol=1e-6)
        assert (wanted.gather(1, draft.tokens[:, node, None]) > 0).all()
    assert draft.parents is not None and draft.parents[0].tolist() == [-1, -1, 0, 0, 1, 3, 4]


# ---- caches


class NotCompacted(SlotContext):
    """Leaves the accepted nodes where they were written."""

    def compact(self, first: Tensor, kept: Tensor) -> None:
        """Nothing."""


def cache_error(policy: Policy, cache: type[SlotContext] | None = None, cycles: int = 6) -> tuple[float, float]:
    """How far the caches of target and head, and the head's state, are from those of contexts that are read at once."""
    one = engine(policy, config(FIVE), slots=5)
    if cache is not None:
        decoder_of(one).target.cache.__class__ = cache
    for request in requests(PROMPTS, max_new_tokens=40):
        one.add(request)
    for _ in range(cycles):
        one.step()
    other = engine(policy, config(FIVE), slots=5)
    with torch.inference_mode():
        other.decoder.prefill(0, [one._context(slot) for slot in range(len(one.active))])
    worst = []
    for name in ("target", "mtp"):
        mine, fresh = one.slots.caches[name], other.slots.caches[name]
        pairs = ((mine.keys, fresh.keys), (mine.values, fresh.values))
        errors = [float((a[:, s, :, :n] - b[:, s, :, :n]).abs().max()) for s, n in enumerate(one.fed) for a, b in pairs]
        worst.append(max(errors))
    states = [e.slots.columns["mtp/hidden"][: len(one.active)] for e in (one, other)]
    return worst[0], max(worst[1], float((states[0] - states[1]).abs().max()))


def test_after_a_path_the_caches_are_those_of_the_context(policy: Policy) -> None:
    assert max(cache_error(policy)) < 1e-10
    assert max(cache_error(tiny_policy(5, seed=11, sharp=16.0))) < 1e-4
    assert cache_error(policy, NotCompacted)[0] > 1e-3


def test_another_system_takes_over_between_two_cycles(policy: Policy) -> None:
    """Greedy answers remain those of plain decoding, and drafters that are not in charge read on."""
    one, done = TorchEngine(policy, DecodingConfig(draft_tokens=2), slots=5, max_length=64, room=5), {}
    turns = [config(FIVE), DecodingConfig(draft_tokens=3), DecodingConfig(system="ngram"), config(CHAIN)]
    for request in requests(PROMPTS, temperature=0.0, max_new_tokens=20):
        one.add(request)
    for cycle in range(40):
        if cycle % 2 == 0:
            one.configure(turns[cycle // 2 % 4])
        done |= {f.id: f.completion for f in one.step()}
    plain = answers(policy, DecodingConfig(system="autoregressive"), temperature=0.0)
    assert [done[i].token_ids.tolist() for i in range(len(PROMPTS))] == [a.token_ids.tolist() for a in plain]
