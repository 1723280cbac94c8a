"""Trees of drafts on the engine: attention, caches after the accepted path, penalties, statistics by depth."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.kernels.trees import ancestry
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.emit import seen_at
from bebop.rollout.decoding.head import HeadDrafter
from bebop.rollout.decoding.lengths.fixed import FixedLength
from bebop.rollout.decoding.rules.tree_walk import TreeWalk
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion
from tests.builders import requests, tiny_policy
from tests.rollout.test_exactness import LEVEL, smallest_p

PROMPTS = [[1, 2, 3], [3], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2]]
FIVE = [[0], [1], [0, 0], [0, 1], [1, 0]]
CHAIN = [[0], [0, 0], [0, 0, 0]]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(5, seed=11, sharp=16.0, dtype=torch.float64)


def config(shape: list[list[int]], **settings: Any) -> DecodingConfig:
    return DecodingConfig(system="bebop_tree", draft_tokens=len(shape), options={"shape": shape}, **settings)


def engine(policy: Policy, decoding: DecodingConfig, slots: int = 3) -> TorchEngine:
    return TorchEngine(policy, decoding, slots=slots, max_length=64)


def decoder_of(one: TorchEngine) -> DraftVerify:
    assert isinstance(one.decoder, DraftVerify)
    return one.decoder


def answers(policy: Policy, decoding: DecodingConfig, slots: int = 3, **params: Any) -> list[Completion]:
    return generate(engine(policy, decoding, slots), requests(PROMPTS, max_new_tokens=20, **params))


# ---- a chain is a tree

SAMPLINGS: list[dict[str, float]] = [
    {},
    {"temperature": 0.7, "repetition_penalty": 1.3},
    {"temperature": 0.0},
    {"temperature": 1.3, "top_p": 0.9, "top_k": 4},
]


def told(answer: Completion) -> list[Any]:
    """Everything that is known of an answer."""
    stats = answer.stats
    sums = (stats.reached, stats.accepted, stats.overlap, stats.target_only, stats.draft_entropy, stats.target_entropy)
    work = [stats.cycles, stats.tokens, stats.target_forwards, stats.draft_forwards]
    return [answer.token_ids.tolist(), answer.logprobs.tolist(), work, *(values.tolist() for values in sums)]


@pytest.mark.parametrize("params", SAMPLINGS)
def test_a_chain_as_a_tree_is_the_chain_to_the_bit(params: dict[str, float]) -> None:
    policy = tiny_policy(5, seed=11, sharp=16.0)
    chain = answers(policy, DecodingConfig(draft_tokens=3), **params)
    assert [told(a) for a in answers(policy, config(CHAIN), **params)] == [told(a) for a in chain]
    assert [told(a) for a in answers(policy, config([[0], [0, 0], [1]]), **params)] != [told(a) for a in chain]


# ---- temperature 0, penalties


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("draft_temperature", [None, 0.0, 1.0])
def test_greedy_answers_are_those_of_plain_decoding(
    policy: Policy, penalty: float, draft_temperature: float | None
) -> None:
    params = {"temperature": 0.0, "repetition_penalty": penalty}
    plain = answers(policy, DecodingConfig(system="autoregressive"), **params)
    tree = answers(policy, config(FIVE, draft_temperature=draft_temperature), **params)
    assert [a.token_ids.tolist() for a in tree] == [a.token_ids.tolist() for a in plain]
    for a, b in zip(tree, plain, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-6)
    assert sum(a.stats.accepted.sum() for a in tree) > 5


def test_penalties_see_the_way_to_a_node_and_no_other(policy: Policy) -> None:
    one = TorchEngine(policy, DecodingConfig(draft_tokens=7), slots=1, max_length=64)
    [asked] = requests([[0]], max_new_tokens=20, repetition_penalty=1.5)
    one.slots.start(0, [asked.params], [[0]])
    parents = torch.tensor([[-1, -1, 0, 1]])
    draft = Draft(tokens=torch.tensor([[1, 2, 3, 4]]), probs=None, parents=parents, depth=2)
    seen = seen_at(Rows(one.slots, 1, 0), draft, ancestry(parents))
    assert seen is not None
    marked = [set(row.nonzero()[:, 0].tolist()) for row in seen[0]]
    assert marked == [{0}, {0, 1}, {0, 2}, {0, 1, 3}, {0, 2, 4}]


# ---- rows of a batch


class ByRequest(FixedLength):
    """The first seed % 6 nodes of the tree."""

    def start(self, rows: Rows) -> Tensor:
        return rows.slots.seed[: rows.batch] % 6


def test_rows_with_trees_of_their_own_are_themselves_alone(policy: Policy) -> None:
    def run(slots: int, only: int | None = None) -> list[Completion]:
        one = engine(policy, config(FIVE), slots)
        decoder_of(one).length = ByRequest(policy, one.slots, one.decoding)
        asked = requests([*PROMPTS, [2, 2]], max_new_tokens=20, seed=6)
        return generate(one, asked if only is None else asked[only : only + 1])

    together = run(6)
    for i, answer in enumerate(together):
        [alone] = run(1, i)
        assert answer.token_ids.tolist() == alone.token_ids.tolist()
        assert answer.stats.reached.tolist() == alone.stats.reached.tolist()
    assert not together[0].stats.reached.any() and together[1].stats.reached[0] == together[1].stats.cycles
    assert not together[2].stats.reached[1:].any() and sum(a.stats.reached[1] for a in together[3:]) > 0


# ---- statistics


def test_what_is_measured_is_the_first_child() -> None:
    """Two rows of one tree: the path of the first ends above a leaf's children, that of the second at a leaf."""
    parents = torch.tensor([[-1, -1, 0, 0, 1, 4]] * 2)
    draft = Draft(
        tokens=torch.tensor([[10, 11, 12, 13, 14, 15]] * 2), probs=torch.rand(2, 6, 3), parents=parents, depth=3
    )
    path = Accepted.path(draft, torch.tensor([[0, 2, 0, 0], [0, 1, 4, 0]]), torch.tensor([1, 2]), torch.tensor([7, 8]))
    assert path.tokens[0, :2].tolist() == [11, 7] and path.tokens[1, :3].tolist() == [10, 13, 8]
    chain = draft.along(path)
    assert chain.tokens[0, :2].tolist() == [10, 14] and chain.tokens[1, :2].tolist() == [10, 12]
    assert chain.lengths is not None and chain.lengths.tolist() == [2, 2], "the second path has no children left"
    assert chain.probs is not None and draft.probs is not None
    assert torch.equal(chain.probs[1, 1], draft.probs[1, 2]) and chain.parents is None
    fewer = dataclasses.replace(draft, lengths=torch.tensor([4, 2])).along(path)
    assert fewer.lengths is not None and int(fewer.lengths[0]) == 1, "the child does not count"


def test_statistics_go_by_depth(policy: Policy) -> None:
    one = engine(policy, config(FIVE), slots=5)
    for answer in generate(one, requests([p for p in PROMPTS for _ in range(2)], max_new_tokens=30)):
        stats = answer.stats
        assert stats.emitted - stats.cycles <= stats.accepted.sum() <= stats.emitted
        assert stats.reached[0] == stats.cycles and not stats.reached[2:].any()
        tried = stats.counts["siblings"]
        assert (tried >= stats.reached).all() and (tried <= 2 * stats.reached).all()
        assert (stats.overlap <= stats.reached + 1e-9).all() and stats.draft_forwards == 2 * stats.cycles
    assert tried[0] > stats.reached[0], "second children are tried"


# ---- exactness at other temperatures; the default tree is a row of the exactness test of all systems


class WrongParent(TreeWalk):
    """Takes the second node's child for one of the first."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        parents = draft.parents.clone()  # type: ignore[union-attr]
        parents[:, 4] = 0
        return super().accept(rows, dataclasses.replace(draft, parents=parents), out, uniforms)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_the_output_distribution_is_the_target(temperature: float) -> None:
    assert smallest_p(tiny_policy(5, seed=11, sharp=16.0), config(FIVE), temperature) > LEVEL
    assert smallest_p(tiny_policy(5, seed=11, sharp=16.0), config(FIVE, draft_temperature=0.0), temperature) > LEVEL


@pytest.mark.slow
def test_a_broken_tree_is_caught() -> None:
    """Entries that stay where they were written touch too few of three tokens to be seen here: see test_tree_caches."""
    assert smallest_p(tiny_policy(5, seed=11, sharp=16.0), config(FIVE), 1.0, WrongParent()) < LEVEL / 100


# ---- refusals


def test_a_rule_for_chains_refuses_a_tree(policy: Policy) -> None:
    one = engine(policy, config(FIVE))
    decoder = decoder_of(one)
    assert isinstance(decoder.drafter, HeadDrafter)
    decoder.rule = type(decoder_of(engine(policy, DecodingConfig())).rule)()
    one.add(requests([[1, 2]], max_new_tokens=4)[0])
    with pytest.raises(AssertionError, match="judges chains"):
        one.step()
