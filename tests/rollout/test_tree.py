"""Trees of drafts: shapes, attention down their ways, what is drafted, and the caches that an accepted path leaves."""

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.config.tree_shape import TreeOptions
from bebop.kernels.tree_verify import ancestry
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows
from bebop.rollout.decoding.draft_verify import seen_at
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.firp.decoding import FirpDrafter
from bebop.systems.firp.network import PseudoStates
from bebop.systems.tree.decoding import MTPTreeDrafter
from bebop.trajectory import Completion
from tests.builders import bare_policy, requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.driving import cache_error, decoder_of, drafter_of, read_at_once, started
from tests.rollout.trees import CHAIN, FIVE, PARENTS, SAMPLINGS, ByRequest, everything, fed, firp_tree, head_tree

PROMPTS = [[1, 2, 3], [3], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2]]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return bare_policy(5, seed=11, sharp=16.0, dtype=torch.float64)


def engine(policy: Policy, decoding: DecodingConfig, slots: int = 3, **settings: Any) -> TorchEngine:
    return TorchEngine(policy, decoding, slots=slots, max_length=64, **settings)


def answers(policy: Policy, decoding: DecodingConfig, slots: int = 3, **params: Any) -> list[Completion]:
    return generate(engine(policy, decoding, slots), requests(PROMPTS, max_new_tokens=20, **params))


# ---- a chain is a tree


WAYS = {  # a chain, and trees, of each drafter
    "head": (DecodingConfig(draft_tokens=3), head_tree),
    "firp": (DecodingConfig(system="firp_chain", draft_tokens=3), firp_tree),
}
QUICK = [("head", SAMPLINGS[1]), ("head", SAMPLINGS[2]), ("firp", SAMPLINGS[1])]


@pytest.mark.usefixtures("in_slots")
@pytest.mark.parametrize(
    ("name", "params"), slow_but(QUICK, [(name, params) for name in WAYS for params in SAMPLINGS], several=True)
)
@pytest.mark.slow
def test_a_chain_as_a_tree_is_the_chain_to_the_bit(name: str, params: dict[str, float]) -> None:
    policy, (config, tree) = tiny_policy(5, seed=11, layers=3, sharp=16.0, with_parts=name == "firp"), WAYS[name]
    chain = [everything(a) for a in answers(policy, config, **params)]
    assert [everything(a) for a in answers(policy, tree(CHAIN), **params)] == chain
    assert [everything(a) for a in answers(policy, tree([[0], [1], [0, 0]]), **params)] != chain


# ---- penalties


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


@pytest.mark.slow
def test_rows_with_trees_of_their_own_are_themselves_alone(policy: Policy) -> None:
    def run(slots: int, only: int | None = None) -> list[Completion]:
        one = engine(policy, head_tree(FIVE), slots)
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
    chain = draft.to_chain(path)
    assert chain.tokens[0, :2].tolist() == [10, 14] and chain.tokens[1, :2].tolist() == [10, 12]
    assert chain.lengths is not None and chain.lengths.tolist() == [2, 2], "the second path has no children left"
    assert chain.probs is not None and draft.probs is not None
    assert torch.equal(chain.probs[1, 1], draft.probs[1, 2]) and chain.parents is None
    fewer = dataclasses.replace(draft, lengths=torch.tensor([4, 2])).to_chain(path)
    assert fewer.lengths is not None and int(fewer.lengths[0]) == 1, "the child does not count"


def test_statistics_go_by_depth(policy: Policy) -> None:
    one = engine(policy, head_tree(FIVE), slots=5)
    for answer in generate(one, requests([p for p in PROMPTS for _ in range(2)], max_new_tokens=30)):
        stats = answer.stats
        assert stats.emitted - stats.cycles <= stats.accepted.sum() <= stats.emitted
        assert stats.reached[0] == stats.cycles and not stats.reached[2:].any()
        tried = stats.counts["siblings"]
        assert (tried >= stats.reached).all() and (tried <= 2 * stats.reached).all()
        assert (stats.overlap <= stats.reached + 1e-9).all() and stats.draft_forwards == 2 * stats.cycles
    assert tried[0] > stats.reached[0], "second children are tried"


# ---- refusals


def test_a_rule_for_chains_refuses_a_tree(policy: Policy) -> None:
    one = engine(policy, head_tree(FIVE))
    decoder_of(one).rule = type(decoder_of(engine(policy, DecodingConfig())).rule)()
    one.add(requests([[1, 2]], max_new_tokens=4)[0])
    with pytest.raises(AssertionError, match="judges chains"):
        one.step()


# ---- attention


def path_error(policy: Policy, decoding: DecodingConfig, ways: Tensor) -> float:
    """Return how far real and pseudo states at a tree's nodes are from those of each way down it, fed as a chain."""
    one, rows = fed(policy, decoding)
    decoder = decoder_of(one)
    beside = decoder.drafter.target_pass if isinstance(decoder.drafter, FirpDrafter) else None
    tokens, right, worst = torch.arange(8).expand(2, 8) % 5, ancestry(PARENTS), 0.0  # siblings differ
    with torch.inference_mode():
        states, layers, extra = decoder.target.verify(rows, tokens, [0], ways, beside)
        for row, node in itertools.product(range(2), range(7)):
            way = [0, *(1 + right[row, node].nonzero()[:, 0])]
            alone, under, own = decoder.target.verify(rows, tokens[:, way], [0], None, beside)
            pairs = [(alone, states), (under[0], layers[0])]
            if beside is not None:
                assert own is not None and extra is not None
                pairs.append((own, extra))
            worst = max(worst, *(float((a[row, -1] - b[row, node + 1]).abs().max()) for a, b in pairs))
    return worst


@pytest.mark.parametrize("name", ["head", "firp", "firp, masked"])
def test_tree_attention_is_every_path_by_itself(policy: Policy, name: str) -> None:
    """Of pseudo states, too, where there are some."""
    decoding = DecodingConfig(draft_tokens=7)
    if name != "head":
        decoding, policy = firp_tree(FIVE), tiny_policy(5, seed=11, layers=3, sharp=16.0, dtype=torch.float64)
        network = policy.parts["firp"]
        assert isinstance(network, PseudoStates)
        network.masked = name == "firp, masked"
    ways = ancestry(PARENTS)
    assert path_error(policy, decoding, ways) < 1e-10
    other = ways.clone()
    other[0, 4, 1], other[0, 4, 0] = False, True  # a node that sees its parent's sibling instead
    assert path_error(policy, decoding, other) > 1e-3
    assert path_error(policy, decoding, torch.ones(2, 7, 7).tril().bool()) > 1e-3


# ---- what is drafted


def drafted(policy: Policy, shape: list[list[int]], params: dict[str, float]) -> tuple[MTPTreeDrafter, Rows, Draft]:
    """The draft of two rows after some cycles."""
    one = started(engine(policy, head_tree(shape)), requests(PROMPTS[:2], max_new_tokens=40, **params), 3)
    rows, drafter = Rows(one.slots, 2, max(one.fed)), drafter_of(one, MTPTreeDrafter)
    with torch.inference_mode():
        return drafter, rows, drafter.propose(rows, decoder_of(one).length)


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


def errors(policy: Policy, compacted: bool = True) -> tuple[float, float]:
    """Return how far the caches of target and head, and the head's state, are from those of contexts read at once."""
    one = engine(policy, head_tree(FIVE), slots=5)
    if not compacted:  # accepted nodes stay where they were written
        decoder_of(one).target.cache.compact = lambda first, kept: None  # type: ignore[method-assign]
    started(one, requests(PROMPTS, max_new_tokens=40), 6)
    other = read_at_once(one, engine(policy, head_tree(FIVE), slots=5))
    states = [e.slots.columns["mtp/hidden"][: len(one.active)] for e in (one, other)]
    return cache_error(one, other), max(cache_error(one, other, "mtp"), float((states[0] - states[1]).abs().max()))


def test_after_a_path_the_caches_are_those_of_the_context(policy: Policy, paged: bool) -> None:
    assert max(errors(policy)) < 1e-10
    assert max(errors(bare_policy(5, seed=11, sharp=16.0))) < 1e-4
    assert errors(policy, compacted=False)[0] > 1e-3


# ---- shapes


def test_the_likeliest_nodes_by_rank() -> None:
    """0.5 0.3: 0 .5, 1 .3, 00 .25, 01 .15, 10 .15, 000 .125."""
    options = TreeOptions(ranks=(0.5, 0.3))
    assert options.paths(3) == ((0,), (1,), (0, 0)) and set(options.paths(5)) == {*options.paths(3), (0, 1), (1, 0)}
    assert options.paths(6)[-1] == (0, 0, 0)
    assert TreeOptions(ranks=(0.9,)).paths(3) == ((0,), (0, 0), (0, 0, 0))
