"""Pseudo states beside a tree: what each sees, what they leave in the cache, which nodes have them, and how many."""

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.kernels.trees import ancestry
from bebop.model.attention import SlotContext
from bebop.model.backbone import Policy
from bebop.model.firp import PseudoContext, PseudoStates, hidden_with_pseudo
from bebop.monitor.estimators import decode_metrics
from bebop.rollout.decoding.base import Draft, Rows
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.drafters.firp import FirpDrafter, PseudoPass, Shape
from bebop.rollout.decoding.lengths.fixed import FixedLength
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import DecodeStats
from tests.builders import requests, tiny_policy
from tests.rollout.test_firp import PROMPTS
from tests.rollout.test_firp_tree import shaped
from tests.rollout.test_tree import FIVE
from tests.rollout.test_tree_caches import PARENTS, NotCompacted

STEPS = 5  # of the small policy's part


@pytest.fixture
def policy() -> Policy:
    return tiny_policy(5, seed=11, layers=3, sharp=16.0, dtype=torch.float64)


def decoder_of(one: TorchEngine) -> DraftVerify:
    assert isinstance(one.decoder, DraftVerify)
    return one.decoder


# ---- attention


def fed(policy: Policy) -> tuple[DraftVerify, Rows, PseudoPass]:
    """Two contexts of a length each, read by the target."""
    one = TorchEngine(policy, shaped(FIVE), slots=2, max_length=64, room=7)
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


def started(policy: Policy, decoding: DecodingConfig, cycles: int) -> TorchEngine:
    one = TorchEngine(policy, decoding, slots=6, max_length=64)
    for request in requests(PROMPTS, max_new_tokens=40):
        one.add(request)
    for _ in range(cycles):
        one.step()
    return one


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


class TakesTheNextRow(FirpDrafter):
    """Keeps the states of the node that was rejected."""

    def commit(self, rows, out, tokens, emitted) -> None:  # type: ignore[no-untyped-def]
        super().commit(rows, out, tokens, (emitted % tokens.shape[1]) + 1)


def test_kept_states_and_cache_are_those_of_a_pass_over_the_text(policy: Policy) -> None:
    states, cache, plain = errors(started(policy, shaped(FIVE), 8))
    assert max(states, cache) < 1e-6 and plain == 0
    one = started(policy, shaped(FIVE), 0)
    drafter = decoder_of(one).drafter
    assert drafter is not None
    drafter.__class__ = TakesTheNextRow
    for _ in range(4):
        one.step()
    assert errors(one)[0] > 1e-3
    one = started(policy, shaped(FIVE), 0)
    decoder_of(one).target.cache.__class__ = NotCompacted
    for _ in range(6):
        one.step()
    assert errors(one)[1] > 1e-3


def test_weights_that_change_in_flight_are_read_anew(policy: Policy) -> None:
    weights = {name: 1.1 * tensor for name, tensor in policy.weights().items()}
    one = TorchEngine(policy, shaped(FIVE), slots=6, max_length=64, on_update="recompute")
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


def test_nodes_off_the_likeliest_paths_have_no_pseudo_states(policy: Policy) -> None:
    seen = 0
    for cycles in range(1, 9):
        states, cache, plain = errors(started(policy, shaped(FIVE, pseudo_paths=1), cycles))
        assert max(states, cache) < 1e-6
        seen += plain
    assert seen > 3


def test_the_likeliest_paths_are_kept(policy: Policy) -> None:
    def chosen(paths: int) -> list[int] | None:
        one = TorchEngine(policy, shaped(FIVE, pseudo_paths=paths, ranks=[0.5, 0.2]), slots=1, max_length=64)
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


def test_extra_positions_are_those_beside_tokens_and_drafts_that_count(policy: Policy) -> None:
    for stats in counts(policy, shaped(FIVE)).values():
        assert stats.extra_positions == STEPS * 6 * stats.cycles
    for row, stats in counts(policy, shaped(FIVE), own=True).items():
        assert stats.extra_positions == STEPS * (1 + row) * stats.cycles
    for stats in counts(policy, shaped(FIVE, pseudo_paths=1)).values():
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
    one = TorchEngine(policy, shaped(FIVE), slots=2, max_length=64)
    asked = requests([[1, 2], [2, 1]], max_new_tokens=8)
    one.slots.start(0, [r.params for r in asked], [[*r.token_ids] for r in asked])
    rows = Rows(one.slots, 2, 1)
    draft = Draft(tokens=torch.zeros(2, 5, dtype=torch.long), probs=None, lengths=torch.tensor([0, 3]))
    found = decoder_of(one)._extra_positions(rows, draft)
    assert isinstance(found, Tensor) and found.tolist() == [STEPS, 4 * STEPS]
