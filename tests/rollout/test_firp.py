"""Pseudo states on the engine: those of a pass over the whole text, beside a chain of drafts and beside a tree."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.kernels.trees import ancestry
from bebop.model.attention import SlotContext
from bebop.model.backbone import Policy
from bebop.monitor.estimators import decode_metrics
from bebop.rollout.decoding.base import Draft, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.lengths import FixedLength
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.firp.decoding import FirpDrafter, PseudoPass, Shape
from bebop.systems.firp.network import PseudoContext, PseudoSlots, PseudoStates, hidden_with_pseudo
from bebop.trajectory import Completion, DecodeStats
from bebop.tree_shape import Path, likeliest, reached
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.broken import NotCompacted
from tests.rollout.trees import (
    CHAIN,
    CHANCES,
    FIRP_TREES,
    FIVE,
    PARENTS,
    SAMPLINGS,
    everything,
    firp_tree,
    likely_firp_tree,
)

CHAIN_OF_THREE = DecodingConfig(system="firp_chain", draft_tokens=3)
PROMPTS = [[1, 2, 3], [3, 1], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2], [2]]


@pytest.fixture
def policy() -> Policy:
    return tiny_policy(5, seed=11, layers=3, sharp=16.0, dtype=torch.float64)


def drafter(one: TorchEngine) -> FirpDrafter:
    assert isinstance(one.decoder, DraftVerify) and isinstance(one.decoder.drafter, FirpDrafter)
    return one.decoder.drafter


def started(
    policy: Policy, decoding: DecodingConfig, cycles: int, kind: type[FirpDrafter] = FirpDrafter, slots: int = 6
) -> TorchEngine:
    """Return an engine so many cycles after its start."""
    one = TorchEngine(policy, decoding, slots=slots, max_length=64)
    drafter(one).__class__ = kind
    for request in requests(PROMPTS, max_new_tokens=40):
        one.add(request)
    for _ in range(cycles):
        one.step()
    return one


def states_error(one: TorchEngine) -> float:
    """How far the kept pseudo states are from those of a pass over the text that each row has fed."""
    own, errors = drafter(one), []
    for slot, fed in enumerate(one.fed):
        ids, anchors = torch.tensor([one._context(slot)[:fed]]), torch.tensor([[fed - 1]])
        context = PseudoContext.training(anchors, fed, own.network.masked)
        with torch.inference_mode():
            _, wanted = hidden_with_pseudo(one.policy, own.network, ids, torch.arange(fed)[None], anchors, context)
        errors.append(float((own.states[slot] - wanted[0, 0]).abs().max()))
    return max(errors)


class TakesTheNextRow(FirpDrafter):
    """Keeps the pseudo states of the first draft that was rejected."""

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        super().commit(rows, out, tokens, (emitted + 1).clamp_max(tokens.shape[1]))


class SeesTheDrafts(PseudoSlots):
    """An anchor sees all that the pass feeds."""

    def __init__(self, cache: SlotContext, anchors: Tensor, masked: bool = False) -> None:
        super().__init__(cache, torch.full_like(anchors, int(anchors.max())), masked)


def test_kept_states_are_those_of_a_pass_over_the_text(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    for masked in (False, True):
        network = policy.parts["firp"]
        assert isinstance(network, PseudoStates)
        network.masked = masked
        assert states_error(started(policy, CHAIN_OF_THREE, 8, slots=4)) < 1e-6
        assert states_error(started(policy, CHAIN_OF_THREE, 8, TakesTheNextRow, slots=4)) > 1e-3
    monkeypatch.setattr("bebop.systems.firp.decoding.PseudoSlots", SeesTheDrafts)
    assert states_error(started(policy, CHAIN_OF_THREE, 8, slots=4)) > 1e-3


def test_drafts_cost_no_pass_of_their_own(policy: Policy) -> None:
    one = TorchEngine(policy, DecodingConfig(system="firp_chain", draft_tokens=3), slots=6, max_length=64)
    for answer in generate(one, requests(PROMPTS, max_new_tokens=20)):
        assert answer.stats.draft_forwards == 0 and answer.stats.reached[0] == answer.stats.cycles


def test_more_drafts_than_the_part_predicts_are_refused(policy: Policy) -> None:
    with pytest.raises(UserError, match=r"decoding\.draft_tokens=6 is not possible: the part firp predicts 5"):
        TorchEngine(policy, DecodingConfig(system="firp_chain", draft_tokens=6), slots=1, max_length=64)


STEPS = 5  # of the small policy's part


def decoder_of(one: TorchEngine) -> DraftVerify:
    assert isinstance(one.decoder, DraftVerify)
    return one.decoder


# ---- attention beside a tree


def fed(policy: Policy) -> tuple[DraftVerify, Rows, PseudoPass]:
    """Two contexts of a length each, read by the target."""
    one = TorchEngine(policy, firp_tree(FIVE), slots=2, max_length=64, room=7)
    asked = requests([[1, 2, 3, 4], [2, 0, 1]], max_new_tokens=20)
    one.slots.start(0, [r.params for r in asked], [[*r.token_ids] for r in asked])
    with torch.inference_mode():
        one.decoder.prefill(0, [[*r.token_ids] for r in asked])
    decoder = decoder_of(one)
    assert isinstance(decoder.drafter, FirpDrafter)
    return decoder, Rows(one.slots, 2, 3), decoder.drafter.target_pass


def path_error(policy: Policy, ways: Tensor) -> float:
    """How far real and pseudo states at a tree's nodes are from those of each way down it, fed as a chain."""
    decoder, rows, beside = fed(policy)
    tokens, right, worst = torch.arange(8).expand(2, 8) % 5, ancestry(PARENTS), 0.0
    with torch.inference_mode():
        states, _, extra = decoder.target.verify(rows, tokens, (), ways, beside)
        for row in range(2):
            for node in range(7):
                way = [0, *(1 + right[row, node].nonzero()[:, 0])]
                alone, _, own = decoder.target.verify(rows, tokens[:, way], (), None, beside)
                assert extra is not None and own is not None
                pairs = ((alone[row, -1], states[row, node + 1]), (own[row, -1], extra[row, node + 1]))
                worst = max(worst, *(float((a - b).abs().max()) for a, b in pairs))
    return worst


@pytest.mark.parametrize("masked", [False, True])
def test_a_node_and_its_pseudo_states_see_their_own_way(policy: Policy, masked: bool) -> None:
    network = policy.parts["firp"]
    assert isinstance(network, PseudoStates)
    network.masked = masked
    ways = ancestry(PARENTS)
    assert path_error(policy, ways) < 1e-10
    other = ways.clone()
    other[0, 4, 1], other[0, 4, 0] = False, True  # a node that sees its parent's sibling instead
    assert path_error(policy, other) > 1e-3


class Writes(PseudoPass):
    """Feeds pseudo states' tokens as if they were the text's."""

    def __call__(self, tokens: Tensor, positions: Tensor, cache: SlotContext, anchors: Tensor) -> tuple[Tensor, Tensor]:
        found = super().__call__(tokens, positions, cache, anchors)
        cache.keys[:, :, :, 40] += 1.0
        return found


def beside_or_not(policy: Policy, kind: type[PseudoPass]) -> tuple[float, float]:
    """What pseudo states change in real logits, and anywhere in the cache."""
    found = []
    for present in (True, False):
        decoder, rows, beside = fed(policy)
        beside.__class__ = kind
        with torch.inference_mode():
            tokens = torch.arange(8).expand(2, 8) % 5
            states, *_ = decoder.target.verify(rows, tokens, (), ancestry(PARENTS), beside if present else None)
            cache = decoder.target.cache
            found.append((policy.logits(states), torch.stack([cache.keys, cache.values])))
    (logits, cache), (plain, held) = found
    return float((logits - plain).abs().max()), float((cache - held).abs().max())


def test_real_logits_and_the_cache_do_not_know_of_pseudo_states(policy: Policy) -> None:
    assert max(beside_or_not(policy, PseudoPass)) < 1e-10
    assert beside_or_not(policy, Writes)[1] > 0.5


# ---- what is kept after a cycle


def errors(one: TorchEngine) -> tuple[float, float, int]:
    """Of kept pseudo states against a pass over the text, of the target's cache, and rows without pseudo states."""
    drafter = decoder_of(one).drafter
    assert isinstance(drafter, FirpDrafter)
    states, plain = [], 0
    for slot, count in enumerate(one.fed):
        if not bool(drafter.states[slot].any()):
            plain += 1
            continue
        ids, anchors = torch.tensor([one._context(slot)[:count]]), torch.tensor([[count - 1]])
        context = PseudoContext.training(anchors, count, drafter.network.masked)
        with torch.inference_mode():
            _, wanted = hidden_with_pseudo(
                one.policy, drafter.network, ids, torch.arange(count)[None], anchors, context
            )
        states.append(float((drafter.states[slot] - wanted[0, 0]).abs().max()))
    other = TorchEngine(one.policy, DecodingConfig(system="autoregressive"), slots=6, max_length=64)
    with torch.inference_mode():
        other.decoder.prefill(0, [one._context(slot) for slot in range(len(one.active))])
    mine, fresh = (decoder_of(e).target.cache for e in (one, other))
    pairs = ((mine.keys, fresh.keys), (mine.values, fresh.values))
    cache = [float((a[:, s, :, :n] - b[:, s, :, :n]).abs().max()) for s, n in enumerate(one.fed) for a, b in pairs]
    return max(states), max(cache), plain


class TakesTheNextNode(FirpDrafter):
    """Keeps the states of the node that was rejected."""

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        super().commit(rows, out, tokens, (emitted % tokens.shape[1]) + 1)


def test_kept_states_and_cache_are_those_of_a_pass_over_the_text(policy: Policy) -> None:
    states, cache, plain = errors(started(policy, firp_tree(FIVE), 8))
    assert max(states, cache) < 1e-6 and plain == 0
    assert errors(started(policy, firp_tree(FIVE), 4, TakesTheNextNode))[0] > 1e-3
    one = started(policy, firp_tree(FIVE), 0)
    decoder_of(one).target.cache.__class__ = NotCompacted
    for _ in range(6):
        one.step()
    assert errors(one)[1] > 1e-3


def test_weights_that_change_in_flight_are_read_anew(policy: Policy) -> None:
    weights = {name: 1.1 * tensor for name, tensor in policy.weights().items()}
    one = TorchEngine(policy, firp_tree(FIVE), slots=6, max_length=64, on_update="recompute")
    for request in requests(PROMPTS, max_new_tokens=40):
        one.add(request)
    for _ in range(3):
        one.step()
    one.load_weights(weights, 1)
    assert max(errors(one)[:2]) < 1e-6
    one.step()
    assert max(errors(one)[:2]) < 1e-6
    one.on_update = "keep"
    one.load_weights({name: 1.1 * tensor for name, tensor in weights.items()}, 2)
    assert max(errors(one)[:2]) > 1e-3, "old keys and values, and old pseudo states"


@pytest.mark.slow
def test_nodes_off_the_likeliest_paths_have_no_pseudo_states(policy: Policy) -> None:
    seen = 0
    for cycles in range(1, 9):
        one = started(policy, firp_tree(FIVE, pseudo_paths=1), cycles)
        states, cache, plain = errors(one)
        assert max(states, cache) < 1e-6
        waiting = one.slots.columns["firp/plain"][: len(one.active)]
        assert int(waiting.sum()) == plain and not one.slots.columns["firp/states"][: len(one.active)][waiting].any()
        seen += plain
    assert seen > 3


def test_the_likeliest_paths_are_kept(policy: Policy) -> None:
    def chosen(paths: int) -> list[int] | None:
        one = TorchEngine(policy, firp_tree(FIVE, pseudo_paths=paths, ranks=[0.5, 0.2]), slots=1, max_length=64)
        drafter = decoder_of(one).drafter
        assert isinstance(drafter, FirpDrafter) and isinstance(drafter.shape, Shape)
        return None if drafter.shape.chosen is None else drafter.shape.chosen.tolist()

    # Nodes are 0, 1, 00, 01, 10, after the newest token.
    assert chosen(1) == [0, 1, 3] and chosen(2) == [0, 1, 3, 4] and chosen(3) is None


# ---- counts


class ByRequest(FixedLength):
    """The first seed % 6 nodes of the tree."""

    def start(self, rows: Rows) -> Tensor:
        return rows.slots.seed[: rows.batch] % 6


def counts(policy: Policy, decoding: DecodingConfig, own: bool = False) -> Mapping[int, DecodeStats]:
    one = TorchEngine(policy, decoding, slots=6, max_length=64)
    if own:
        decoder_of(one).length = ByRequest(policy, one.slots, one.decoding)
    done = generate(one, requests(PROMPTS, max_new_tokens=20, seed=6))
    return {i: answer.stats for i, answer in enumerate(done)}


@pytest.mark.slow
def test_extra_positions_are_those_beside_tokens_and_drafts_that_count(policy: Policy) -> None:
    for stats in counts(policy, firp_tree(FIVE)).values():
        assert stats.extra_positions == STEPS * 6 * stats.cycles
    for row, stats in counts(policy, firp_tree(FIVE), own=True).items():
        assert stats.extra_positions == STEPS * (1 + row) * stats.cycles
    for stats in counts(policy, firp_tree(FIVE, pseudo_paths=1)).values():
        drafted = int(stats.reached[0])
        assert drafted < stats.cycles and stats.extra_positions == STEPS * (2 * drafted + stats.cycles)
    for stats in counts(policy, DecodingConfig(system="firp_chain", draft_tokens=2)).values():
        assert stats.extra_positions == STEPS * 3 * stats.cycles
    for stats in counts(policy, DecodingConfig(draft_tokens=2)).values():
        assert stats.extra_positions == 0 and "rollout/extra_positions" not in decode_metrics(stats)


def test_they_are_logged_by_pass(policy: Policy) -> None:
    both = DecodeStats(cycles=4, tokens=6, target_forwards=4, extra_positions=20)
    both = both + DecodeStats(cycles=1, tokens=1, target_forwards=1)
    assert decode_metrics(both)["rollout/extra_positions"].total == 20
    assert decode_metrics(both)["rollout/extra_positions"].count == 5


def test_drafts_that_do_not_count_are_padding(policy: Policy) -> None:
    one = TorchEngine(policy, firp_tree(FIVE), slots=2, max_length=64)
    asked = requests([[1, 2], [2, 1]], max_new_tokens=8)
    one.slots.start(0, [r.params for r in asked], [[*r.token_ids] for r in asked])
    rows = Rows(one.slots, 2, 1)
    draft = Draft(tokens=torch.zeros(2, 5, dtype=torch.long), probs=None, lengths=torch.tensor([0, 3]))
    found = decoder_of(one)._extra_positions(rows, draft)
    assert isinstance(found, Tensor) and found.tolist() == [STEPS, 4 * STEPS]


# ---- trees


def answers(policy: Policy, decoding: DecodingConfig, slots: int = 4, **params: Any) -> list[Completion]:
    one = TorchEngine(policy, decoding, slots=slots, max_length=64)
    return generate(one, requests(PROMPTS, max_new_tokens=20, **params))


def tokens(completions: list[Completion]) -> list[list[int]]:
    return [answer.token_ids.tolist() for answer in completions]


@pytest.mark.parametrize("params", slow_but(SAMPLINGS[1:2], SAMPLINGS))
def test_a_chain_as_a_tree_is_the_chain_to_the_bit(params: dict[str, float]) -> None:
    policy = tiny_policy(5, seed=11, layers=3, sharp=16.0)
    chain = answers(policy, DecodingConfig(system="firp_chain", draft_tokens=3), **params)
    assert [everything(a) for a in answers(policy, firp_tree(CHAIN), **params)] == [everything(a) for a in chain]
    assert [everything(a) for a in answers(policy, firp_tree([[0], [1], [0, 0]]), **params)] != [
        everything(a) for a in chain
    ]


@pytest.mark.parametrize("params", [{"temperature": 0.7, "repetition_penalty": 1.5}, {"temperature": 0.0}])
@torch.inference_mode()
def test_siblings_differ_and_are_of_the_state_of_their_depth(policy: Policy, params: dict[str, float]) -> None:
    """A node's distribution is that of its step without the siblings before it, normalised, whatever its parent."""
    one = TorchEngine(policy, firp_tree(FIVE), slots=2, max_length=64)
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


@pytest.mark.parametrize("name", slow_but(["five"], ["five", "sixteen"]))
def test_cycles_are_those_that_ranks_foretell(policy: Policy, name: str) -> None:
    """What studies compute of any tree from one greedy answer."""
    prompts = PROMPTS[:5]  # the last has no state before its newest token
    asked = requests(prompts, max_new_tokens=24, temperature=0.0)
    done = generate(TorchEngine(policy, FIRP_TREES[name], slots=3, max_length=64), asked)
    shape = tuple(map(tuple, FIVE)) if name == "five" else likeliest(CHANCES, 16, 5)
    foretold = [simulated(policy, shape, p, a.token_ids.tolist()) for p, a in zip(prompts, done, strict=True)]
    assert [a.stats.cycles for a in done] == foretold
    other = [simulated(policy, shape[:2], p, a.token_ids.tolist()) for p, a in zip(prompts, done, strict=True)]
    assert foretold != other


# ---- refusals


@pytest.mark.parametrize(
    ("decoding", "words"),
    [
        (firp_tree([[0] * n for n in range(1, 7)]), r"options\.shape goes 6 deep, .* the part firp predicts 5 tokens$"),
        (DecodingConfig(system="firp", draft_tokens=9, options={"ranks": [0.5]}), r"draft_tokens=9 .* make 5 nodes$"),
        (firp_tree([[rank] for rank in range(6)]), "6 children need as many tokens, and there are 5$"),
    ],
)
def test_trees_that_cannot_be_drafted_are_refused(policy: Policy, decoding: DecodingConfig, words: str) -> None:
    with pytest.raises(UserError, match=words):
        TorchEngine(policy, decoding, slots=1, max_length=64)


@pytest.mark.slow
def test_a_part_may_bring_its_own_chances(policy: Policy) -> None:
    network = policy.parts["firp"]
    object.__setattr__(network, "chances", CHANCES)
    bare = DecodingConfig(system="firp", draft_tokens=16)
    assert tokens(answers(policy, bare)) == tokens(answers(policy, likely_firp_tree(16)))
    own = DecodingConfig(system="firp", draft_tokens=5, options={"chances": [[0.5], [0.5], [0.5], [0.5], [0.5]]})
    assert tokens(answers(policy, own)) == tokens(answers(policy, firp_tree([[0] * n for n in range(1, 6)])))
