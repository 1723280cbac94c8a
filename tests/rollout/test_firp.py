"""Pseudo states on the engine: those of a pass over the whole text, beside a chain of drafts and beside a tree."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.config.job import DecodingConfig, ModelConfig, TaskConfig
from bebop.config.tree_shape import Path, likeliest, reached
from bebop.errors import UserError
from bebop.kernels.tree_verify import ancestry
from bebop.model.attention import SlotContext
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy
from bebop.model.parts import has_part
from bebop.monitor.estimators import decode_metrics
from bebop.rollout.decoding.base import Draft, Rows, TargetOutput
from bebop.rollout.engine import Request
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.systems.firp.decoding import FirpDrafter, PseudoPass, Shape
from bebop.systems.firp.network import PseudoContext, PseudoSlots, PseudoStates, hidden_with_pseudo, middle_layers
from bebop.tasks.source import PromptSource, chat_encoder
from bebop.trajectory import Completion, DecodeStats, SamplingParams
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.rollout.broken import NotCompacted
from tests.rollout.driving import cache_error, decoder_of, drafter_of, read_at_once, started, tokens
from tests.rollout.trees import (
    CHANCES,
    FIRP_TREES,
    FIVE,
    PARENTS,
    ByRequest,
    fed,
    firp_tree,
    likely_firp_tree,
)

STEPS = 5  # of the small policy's part
CHAIN_OF_THREE = DecodingConfig(system="firp_chain", draft_tokens=3)
PROMPTS = [[1, 2, 3], [3, 1], [2, 1, 0, 3, 1], [0, 0], [1, 3, 2, 2], [2]]


@pytest.fixture
def policy() -> Policy:
    return tiny_policy(5, seed=11, layers=3, sharp=16.0, dtype=torch.float64)


def engine(policy: Policy, decoding: DecodingConfig, slots: int = 6, **settings: Any) -> TorchEngine:
    return TorchEngine(policy, decoding, slots=slots, max_length=64, **settings)


def running(
    policy: Policy, decoding: DecodingConfig, cycles: int, kind: type[FirpDrafter] = FirpDrafter, **settings: Any
) -> TorchEngine:
    """Return an engine so many cycles after its start."""
    one = engine(policy, decoding, **settings)
    drafter_of(one, FirpDrafter).__class__ = kind
    return started(one, requests(PROMPTS, max_new_tokens=40), cycles)


def part(policy: Policy) -> PseudoStates:
    network = policy.parts["firp"]
    assert isinstance(network, PseudoStates)
    return network


def errors(one: TorchEngine) -> tuple[float, float, int]:
    """Return how far kept pseudo states and the target's cache are from those of a pass over the text, and how many
    rows have no pseudo states."""
    drafter, states, plain = drafter_of(one, FirpDrafter), [], 0
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
    other = read_at_once(one, engine(one.policy, DecodingConfig(system="autoregressive")))
    return max(states), cache_error(one, other), plain


# ---- what is kept after a cycle


class TakesTheNextRow(FirpDrafter):
    """Keeps the pseudo states of the first draft that was rejected."""

    def commit(self, rows: Rows, out: TargetOutput, tokens: Tensor, emitted: Tensor) -> None:
        super().commit(rows, out, tokens, emitted % tokens.shape[1] + 1)


class SeesTheDrafts(PseudoSlots):
    """An anchor sees all that the pass feeds."""

    def __init__(self, cache: SlotContext, anchors: Tensor, masked: bool = False) -> None:
        super().__init__(cache, torch.full_like(anchors, int(anchors.max())), masked)


@pytest.mark.usefixtures("in_slots")
@pytest.mark.parametrize("masked", [False, True])
def test_kept_states_and_cache_are_those_of_a_pass_over_the_text(
    policy: Policy, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part(policy).masked = masked
    for decoding in (CHAIN_OF_THREE, firp_tree(FIVE)):
        states, cache, plain = errors(running(policy, decoding, 8))
        assert max(states, cache) < 1e-6 and plain == 0
        assert errors(running(policy, decoding, 4, TakesTheNextRow))[0] > 1e-3
    one = running(policy, firp_tree(FIVE), 0)
    decoder_of(one).target.cache.__class__ = NotCompacted
    assert errors(started(one, (), 6))[1] > 1e-3
    monkeypatch.setattr("bebop.systems.firp.decoding.PseudoSlots", SeesTheDrafts)
    assert errors(running(policy, CHAIN_OF_THREE, 8))[0] > 1e-3


def test_weights_that_change_in_flight_are_read_anew(policy: Policy) -> None:
    weights = {name: 1.1 * tensor for name, tensor in policy.weights().items()}
    one = running(policy, firp_tree(FIVE), 3, on_update="recompute")
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
        one = running(policy, firp_tree(FIVE, pseudo_paths=1), cycles)
        states, cache, plain = errors(one)
        assert max(states, cache) < 1e-6
        waiting = one.slots.columns["firp/plain"][: len(one.active)]
        assert int(waiting.sum()) == plain and not one.slots.columns["firp/states"][: len(one.active)][waiting].any()
        seen += plain
    assert seen > 3


def test_the_likeliest_paths_are_kept(policy: Policy) -> None:
    def chosen(paths: int) -> list[int] | None:
        shape = drafter_of(engine(policy, firp_tree(FIVE, pseudo_paths=paths, ranks=[0.5, 0.2])), FirpDrafter).shape
        assert isinstance(shape, Shape)
        return None if shape.chosen is None else shape.chosen.tolist()

    # Nodes are 0, 1, 00, 01, 10, after the newest token.
    assert chosen(1) == [0, 1, 3] and chosen(2) == [0, 1, 3, 4] and chosen(3) is None


# ---- beside real tokens


class Writes(PseudoPass):
    """Feeds pseudo states' tokens as if they were the text's."""

    def __call__(self, tokens: Tensor, positions: Tensor, cache: SlotContext, anchors: Tensor) -> tuple[Tensor, Tensor]:
        found = super().__call__(tokens, positions, cache, anchors)
        cache.keys[:, :, :, 40] += 1.0
        return found


def beside_or_not(policy: Policy, kind: type[PseudoPass]) -> tuple[float, float]:
    """Return what pseudo states change in real logits, and anywhere in the cache."""
    found = []
    for present in (True, False):
        one, rows = fed(policy, firp_tree(FIVE))
        target, beside = decoder_of(one).target, drafter_of(one, FirpDrafter).target_pass
        beside.__class__ = kind
        with torch.inference_mode():
            tokens = torch.arange(8).expand(2, 8) % 5
            states, *_ = target.verify(rows, tokens, (), ancestry(PARENTS), beside if present else None)
            cache = target.cache
            found.append((policy.logits(states), torch.stack([cache.keys, cache.values])))
    (logits, cache), (plain, held) = found
    return float((logits - plain).abs().max()), float((cache - held).abs().max())


@pytest.mark.usefixtures("in_slots")
def test_real_logits_and_the_cache_do_not_know_of_pseudo_states(policy: Policy) -> None:
    assert max(beside_or_not(policy, PseudoPass)) < 1e-10
    assert beside_or_not(policy, Writes)[1] > 0.5


# ---- counts and costs


def test_drafts_cost_no_pass_of_their_own(policy: Policy) -> None:
    for answer in generate(engine(policy, CHAIN_OF_THREE), requests(PROMPTS, max_new_tokens=20)):
        assert answer.stats.draft_forwards == 0 and answer.stats.reached[0] == answer.stats.cycles


def counts(policy: Policy, decoding: DecodingConfig, own: bool = False) -> Mapping[int, DecodeStats]:
    one = engine(policy, decoding)
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


def test_extra_positions_are_logged_by_pass() -> None:
    both = DecodeStats(cycles=4, tokens=6, target_forwards=4, extra_positions=20)
    both = both + DecodeStats(cycles=1, tokens=1, target_forwards=1)
    logged = decode_metrics(both)["rollout/extra_positions"]
    assert (logged.total, logged.count) == (20, 5)


def test_drafts_that_do_not_count_are_padding(policy: Policy) -> None:
    one, rows = fed(policy, firp_tree(FIVE))
    draft = Draft(tokens=torch.zeros(2, 5, dtype=torch.long), probs=None, lengths=torch.tensor([0, 3]))
    found = decoder_of(one)._extra_positions(rows, draft)
    assert isinstance(found, Tensor) and found.tolist() == [STEPS, 4 * STEPS]


# ---- trees


def answers(policy: Policy, decoding: DecodingConfig, slots: int = 4, **params: Any) -> list[Completion]:
    return generate(engine(policy, decoding, slots), requests(PROMPTS, max_new_tokens=20, **params))


@pytest.mark.parametrize("params", [{"temperature": 0.7, "repetition_penalty": 1.5}, {"temperature": 0.0}])
@torch.inference_mode()
def test_siblings_differ_and_are_of_the_state_of_their_depth(policy: Policy, params: dict[str, float]) -> None:
    """A node's distribution is that of its step without the siblings before it, normalised, whatever its parent."""
    one = started(engine(policy, firp_tree(FIVE), 2), requests(PROMPTS[:2], max_new_tokens=40, **params), 3)
    rows, drafter = Rows(one.slots, 2, max(one.fed)), drafter_of(one, FirpDrafter)
    draft = drafter.propose(rows, decoder_of(one).length)
    assert draft.probs is not None and draft.depth == 2 and draft.parents is not None
    assert draft.parents[0].tolist() == [-1, -1, 0, 0, 1]
    for node, path in enumerate(FIVE):
        seen = None if rows.seen is None else rows.seen[:, None]
        wanted = rows.probs(policy.logits(drafter.states[:2, len(path) - 1])[:, None], seen)[:, 0]
        for sibling in range(path[-1]):
            wanted = wanted.scatter(1, draft.tokens[:, FIVE.index([*path[:-1], sibling]), None], 0.0)
        if params["temperature"]:
            assert torch.allclose(draft.probs[:, node], wanted / wanted.sum(-1, keepdim=True), atol=1e-6)
        assert (draft.probs[:, node].gather(1, draft.tokens[:, node, None]) > 0).all()
    assert (draft.tokens[:, 0] != draft.tokens[:, 1]).all() and (draft.tokens[:, 2] != draft.tokens[:, 3]).all()


def simulated(policy: Policy, shape: tuple[Path, ...], prompt: list[int], answer: list[int]) -> int:
    """Cycles that a tree takes for a greedy completion, from the ranks of its tokens in the drafts of every anchor."""
    network, text = part(policy), [*prompt, *answer]
    steps = len(network.layers)
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
    """What studies compute of any tree from one greedy completion."""
    prompts = PROMPTS[:5]  # the last has no state before its newest token
    asked = requests(prompts, max_new_tokens=24, temperature=0.0)
    done = generate(engine(policy, FIRP_TREES[name], 3), asked)
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
        (
            DecodingConfig(system="firp_chain", draft_tokens=6),
            "draft_tokens=6 is not possible: the part firp predicts 5",
        ),
    ],
)
def test_more_than_the_part_can_draft_is_refused(policy: Policy, decoding: DecodingConfig, words: str) -> None:
    with pytest.raises(UserError, match=words):
        engine(policy, decoding, 1)


@pytest.mark.slow
def test_a_part_may_bring_its_own_chances(policy: Policy) -> None:
    object.__setattr__(part(policy), "chances", CHANCES)
    bare = DecodingConfig(system="firp", draft_tokens=16)
    assert tokens(answers(policy, bare)) == tokens(answers(policy, likely_firp_tree(16)))
    own = DecodingConfig(system="firp", draft_tokens=5, options={"chances": [[0.5], [0.5], [0.5], [0.5], [0.5]]})
    assert tokens(answers(policy, own)) == tokens(answers(policy, firp_tree([[0] * n for n in range(1, 6)])))


# ---- the built-in model

SHIPPED = has_part(ModelConfig(), "firp")


def built_in(trained: bool) -> Policy:
    """In double precision, so that a tie is one; with the shipped part, or with matrices near the identity."""
    policy = load_policy(ModelConfig(path="tiny", device="cpu"), needs=["firp"] if trained else [])
    config = policy.backbone.config
    policy.backbone.double()
    if not trained:
        torch.manual_seed(3)
        network = PseudoStates(hidden_size=config.hidden_size, layers=middle_layers(config.num_hidden_layers))
        for matrix in network.requires_grad_(False).parameters():
            matrix.add_(0.02 * torch.randn_like(matrix))
        policy.parts["firp"] = network
    return policy


def greedy(policy: Policy, decoding: DecodingConfig, prompts: int = 300) -> tuple[list[list[int]], float]:
    """Return completions of 12 tokens, and accepted drafts in all."""
    source = PromptSource(TaskConfig(name="chain_sum"), chat_encoder(policy.tokenizer), 256)
    params = SamplingParams(temperature=0.0, max_new_tokens=12, stop_token_ids=policy.eos_token_ids)
    asked = [Request(id=i, token_ids=source.prompt(i).token_ids, params=params) for i in range(prompts)]
    done = generate(TorchEngine(policy, decoding, slots=50, max_length=320), asked)
    return tokens(done), float(sum(a.stats.accepted.sum() for a in done))


@pytest.mark.exhaustive("300 prompts; test_conformance.py has tiny ones")
@pytest.mark.parametrize(
    "trained", [False, pytest.param(True, marks=pytest.mark.skipif(not SHIPPED, reason="no part"))]
)
def test_greedy_completions_of_the_built_in_model_are_those_of_plain_decoding(trained: bool) -> None:
    policy = built_in(trained)
    plain, _ = greedy(policy, DecodingConfig(system="autoregressive", draft_tokens=0))
    found, accepted = greedy(policy, DecodingConfig(system="firp", draft_tokens=16))
    assert found == plain and accepted > 0
    for decoding in (
        DecodingConfig(system="firp", draft_tokens=16, options={"pseudo_paths": 2}),
        DecodingConfig(system="firp_chain", draft_tokens=3),
    ):
        found, accepted = greedy(policy, decoding, 50)
        assert found == plain[:50] and accepted > 0
    assert len({tuple(answer) for answer in plain}) > 100
