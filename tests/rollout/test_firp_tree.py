"""Trees of drafts from pseudo states: greedy answers, exactness, changes in flight, and the part's limits."""

import dataclasses
from typing import Any

import pytest
import torch

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.firp import PseudoContext, PseudoStates, hidden_with_pseudo
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.drafters.firp import FirpDrafter
from bebop.rollout.decoding.rules.tree_walk import TreeWalk
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import Completion
from bebop.tree_shape import Path, likeliest, reached
from tests.builders import requests, tiny_policy
from tests.rollout.test_exactness import LEVEL, smallest_p
from tests.rollout.test_tree import CHAIN, FIVE, SAMPLINGS, told

PROMPTS = [[1, 2, 3], [3, 1], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2], [2]]
CHANCES = ((0.4, 0.2, 0.15, 0.1), (0.35, 0.2, 0.1, 0.1), (0.3, 0.2, 0.1), (0.3, 0.2), (0.3,))


def shaped(shape: list[list[int]] | tuple[Path, ...], **options: Any) -> DecodingConfig:
    return DecodingConfig(system="firp", draft_tokens=len(shape), options={"shape": shape, **options})


def grown(nodes: int, **options: Any) -> DecodingConfig:
    return DecodingConfig(system="firp", draft_tokens=nodes, options={"chances": CHANCES, **options})


TREES = {
    "five": shaped(FIVE), "sixteen": grown(16), "likeliest": shaped(FIVE, pseudo_paths=1),
    "two paths": grown(16, pseudo_paths=2), "greedy": dataclasses.replace(grown(16), draft_temperature=0.0),
}  # fmt: skip


@pytest.fixture
def policy() -> Policy:
    return tiny_policy(5, seed=11, layers=3, sharp=16.0, dtype=torch.float64)


def zeroed(policy: Policy) -> Policy:
    """The same with matrices of zeros."""
    for matrix in policy.parts["firp"].parameters():
        matrix.zero_()
    return policy


def answers(policy: Policy, decoding: DecodingConfig, slots: int = 4, **params: Any) -> list[Completion]:
    one = TorchEngine(policy, decoding, slots=slots, max_length=64)
    return generate(one, requests(PROMPTS, max_new_tokens=20, **params))


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in completions]


@pytest.mark.parametrize("params", SAMPLINGS)
def test_a_chain_as_a_tree_is_the_chain_to_the_bit(params: dict[str, float]) -> None:
    policy = tiny_policy(5, seed=11, layers=3, sharp=16.0)
    chain = answers(policy, DecodingConfig(system="firp_chain", draft_tokens=3), **params)
    assert [told(a) for a in answers(policy, shaped(CHAIN), **params)] == [told(a) for a in chain]
    assert [told(a) for a in answers(policy, shaped([[0], [1], [0, 0]]), **params)] != [told(a) for a in chain]


@pytest.mark.parametrize("params", [{"temperature": 0.7, "repetition_penalty": 1.5}, {"temperature": 0.0}])
@torch.inference_mode()
def test_siblings_differ_and_are_of_the_state_of_their_depth(policy: Policy, params: dict[str, float]) -> None:
    """A node's distribution is that of its step without the siblings before it, normalised, whatever its parent."""
    one = TorchEngine(policy, shaped(FIVE), slots=2, max_length=64)
    for request in requests(PROMPTS[:2], max_new_tokens=40, **params):
        one.add(request)
    for _ in range(3):
        one.step()
    rows, decoder = Rows(one.slots, 2, max(one.fed)), one.decoder
    assert isinstance(decoder, DraftVerify) and isinstance(decoder.drafter, FirpDrafter)
    draft = decoder.drafter.propose(rows, decoder.length)
    assert draft.probs is not None and draft.depth == 2 and draft.parents is not None
    assert draft.parents[0].tolist() == [-1, -1, 0, 0, 1]
    for node, path in enumerate(FIVE):
        seen = None if rows.seen is None else rows.seen[:, None]
        wanted = rows.probs(policy.logits(decoder.drafter.states[:2, len(path) - 1])[:, None], seen)[:, 0]
        for sibling in range(path[-1]):
            wanted = wanted.scatter(1, draft.tokens[:, FIVE.index([*path[:-1], sibling]), None], 0.0)
        if params["temperature"]:
            assert torch.allclose(draft.probs[:, node], wanted / wanted.sum(-1, keepdim=True), atol=1e-6)
        assert (draft.probs[:, node].gather(1, draft.tokens[:, node, None]) > 0).all()
    assert (draft.tokens[:, 0] != draft.tokens[:, 1]).all() and (draft.tokens[:, 2] != draft.tokens[:, 3]).all()


# ---- temperature 0


class RowOfTheParent(TreeWalk):
    """Takes the target's distribution before a node for the one after it."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: torch.Tensor) -> Accepted:
        assert draft.parents is not None
        late = torch.cat([out.probs[:, :1], out.probs[:, 1 + draft.parents[0]]], 1)
        return super().accept(rows, draft, dataclasses.replace(out, probs=late), uniforms)


def broken(policy: Policy) -> list[Completion]:
    one = TorchEngine(policy, shaped(FIVE), slots=4, max_length=64)
    assert isinstance(one.decoder, DraftVerify)
    one.decoder.rule = RowOfTheParent()
    return generate(one, requests(PROMPTS, max_new_tokens=20, temperature=0.0))


@pytest.mark.parametrize("penalty", [1.0, 1.5])
@pytest.mark.parametrize("name", TREES)
def test_greedy_answers_are_those_of_plain_decoding(policy: Policy, name: str, penalty: float) -> None:
    params = {"temperature": 0.0, "repetition_penalty": penalty}
    plain = tokens(answers(policy, DecodingConfig(system="autoregressive"), **params))
    tree = answers(policy, TREES[name], **params)
    assert tokens(tree) == plain and sum(a.stats.accepted.sum() for a in tree) > 5
    assert penalty > 1 or tokens(broken(policy)) != plain
    assert tokens(answers(zeroed(policy), TREES[name], **params)) == plain


def simulated(policy: Policy, shape: tuple[Path, ...], prompt: list[int], answer: list[int]) -> int:
    """Cycles that a tree takes for a greedy answer, from the ranks of its tokens in the drafts of every anchor."""
    network = policy.parts["firp"]
    assert isinstance(network, PseudoStates)
    text, steps = [*prompt, *answer], len(network.layers)
    anchors = torch.arange(len(text))[None]
    with torch.inference_mode():
        context = PseudoContext.training(anchors, len(text), network.masked)
        _, made = hidden_with_pseudo(policy, network, torch.tensor([text]), anchors, anchors, context)
        order = policy.logits(made[0]).argsort(-1, descending=True)  # [n, K, V]
    cycles, fed = 0, len(prompt) - 1
    while fed < len(text) - 1:
        coming = text[fed + 1 : fed + 1 + steps]
        ranks = [order[fed - 1, k].tolist().index(token) for k, token in enumerate(coming)]
        cycles, fed = cycles + 1, fed + 1 + reached(shape, ranks)
    return cycles


@pytest.mark.parametrize("name", ["five", "sixteen"])
def test_cycles_are_those_that_ranks_foretell(policy: Policy, name: str) -> None:
    """What studies compute of any tree from one greedy answer."""
    prompts = PROMPTS[:5]  # the last has no state before its newest token
    asked = requests(prompts, max_new_tokens=24, temperature=0.0)
    done = generate(TorchEngine(policy, TREES[name], slots=3, max_length=64), asked)
    shape = tuple(map(tuple, FIVE)) if name == "five" else likeliest(CHANCES, 16, 5)
    foretold = [simulated(policy, shape, p, a.token_ids.tolist()) for p, a in zip(prompts, done, strict=True)]
    assert [a.stats.cycles for a in done] == foretold
    other = [simulated(policy, shape[:2], p, a.token_ids.tolist()) for p, a in zip(prompts, done, strict=True)]
    assert foretold != other


# ---- the output distribution; T = 0 is above, and the default of 4 nodes in the test of all systems


class DrawnAgain(TreeWalk):
    """Verifies second children as if the first had not been taken out."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: torch.Tensor) -> Accepted:
        assert draft.probs is not None
        first = draft.probs[:, [0, 0, 2, 2, 2]]
        return super().accept(rows, dataclasses.replace(draft, probs=first), out, uniforms)


CASES = [
    *((name, temperature) for name in ("five", "sixteen") for temperature in (0.7, 1.0, 1.3)),
    *(("likeliest", 1.0), ("two paths", 0.7), ("greedy", 1.3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "temperature"), CASES)
def test_the_output_distribution_is_the_target(name: str, temperature: float) -> None:
    assert smallest_p(tiny_policy(5, seed=11, sharp=16.0), TREES[name], temperature) > LEVEL


@pytest.mark.slow
def test_so_it_is_with_a_tree_of_63_nodes_and_with_matrices_of_zeros() -> None:
    assert smallest_p(tiny_policy(5, seed=11, sharp=16.0), grown(63), 1.0) > LEVEL
    assert smallest_p(zeroed(tiny_policy(5, seed=11, sharp=16.0)), TREES["five"], 0.7) > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize("rule", [RowOfTheParent, DrawnAgain])
def test_broken_trees_are_caught(rule: type[TreeWalk]) -> None:
    assert smallest_p(tiny_policy(5, seed=11, sharp=16.0), TREES["five"], 1.0, rule()) < LEVEL / 100


# ---- changes in flight


def test_systems_take_turns_between_cycles(policy: Policy) -> None:
    """One pass of the target has room for one drafter: chain and tree are the same one."""
    turns = [shaped(FIVE), DecodingConfig(system="firp_chain"), shaped(FIVE, pseudo_paths=1), DecodingConfig()]
    one, done = TorchEngine(policy, turns[0], slots=4, max_length=64), {}
    for request in requests(PROMPTS, temperature=0.0, max_new_tokens=20):
        one.add(request)
    for cycle in range(60):
        one.configure(turns[cycle % 4])
        done |= {f.id: f.completion for f in one.step()}
    plain = answers(policy, DecodingConfig(system="autoregressive"), temperature=0.0)
    assert [done[i].token_ids.tolist() for i in range(len(PROMPTS))] == tokens(plain)


@pytest.mark.parametrize("name", TREES)
def test_an_answer_is_the_same_alone_in_a_group_and_after_an_abort(policy: Policy, name: str) -> None:
    asked = requests([PROMPTS[2]] * 3 + PROMPTS, max_new_tokens=20, temperature=1.2)
    together = generate(TorchEngine(policy, TREES[name], slots=9, max_length=64), asked)
    other = TorchEngine(policy, TREES[name], slots=2, max_length=64)
    for request in asked[1:4]:
        other.add(request)
    done = {f.id: f.completion for _ in range(3) for f in other.step()}
    stopped = {f.id: f.completion for f in other.abort()}
    for request in asked[1:4]:
        if request.id not in done:
            other.add(dataclasses.replace(request, partial=stopped[request.id]))
    while other.unfinished:
        done |= {f.id: f.completion for f in other.step()}
    assert [done[i].token_ids.tolist() for i in (1, 2, 3)] == tokens(together[1:4])
    assert len({tuple(ids) for ids in tokens(together)}) > 5


# ---- refusals


@pytest.mark.parametrize(
    ("decoding", "words"),
    [
        (shaped([[0] * n for n in range(1, 7)]), r"options\.shape goes 6 deep, .* the part firp predicts 5 tokens$"),
        (DecodingConfig(system="firp", draft_tokens=9, options={"ranks": [0.5]}), r"draft_tokens=9 .* make 5 nodes$"),
        (shaped([[rank] for rank in range(6)]), "6 children need as many tokens, and there are 5$"),
    ],
)
def test_trees_that_cannot_be_drafted_are_refused(policy: Policy, decoding: DecodingConfig, words: str) -> None:
    with pytest.raises(UserError, match=words):
        TorchEngine(policy, decoding, slots=1, max_length=64)


def test_a_part_may_bring_its_own_chances(policy: Policy) -> None:
    network = policy.parts["firp"]
    object.__setattr__(network, "chances", CHANCES)
    bare = DecodingConfig(system="firp", draft_tokens=16)
    assert tokens(answers(policy, bare)) == tokens(answers(policy, grown(16)))
    own = DecodingConfig(system="firp", draft_tokens=5, options={"chances": [[0.5], [0.5], [0.5], [0.5], [0.5]]})
    assert tokens(answers(policy, own)) == tokens(answers(policy, shaped([[0] * n for n in range(1, 6)])))
