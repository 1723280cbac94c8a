"""The output distribution of every exact system is the target's: tested on the engine itself, with faults that must be
seen."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.decoding import SYSTEMS
from bebop.kernels.verify import chain_verify, sample
from bebop.model.attention import CausalContext, PackedContext, SlotContext
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import AcceptanceRule, Accepted, Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.drafters.mtp import MTPDrafter
from bebop.rollout.decoding.lengths.cost import CostLength
from bebop.rollout.decoding.temperature import GRID
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import requests, tiny_policy
from tests.cases import slow_but
from tests.goodness_of_fit import p_value

VOCAB, DRAWS, TOKENS = 5, 5_000, 3  # at 4,000 the fault that is hardest to see has p = 7e-18
PROMPTS = [[0, 1, 2], [3, 3, 1, 0]]
LEVEL = 1e-3
Fault = AcceptanceRule | type[SlotContext] | type[MTPDrafter] | None


def exact_distribution(policy: Policy, prompt: Sequence[int], temperature: float) -> np.ndarray:
    """Joint distribution [V, V, V] of the next three tokens, by enumeration."""
    pairs = torch.tensor(list(itertools.product(range(VOCAB), repeat=2)))
    ids = torch.cat([torch.tensor(prompt).expand(len(pairs), -1), pairs], 1)
    lengths = torch.full((len(ids),), ids.shape[1])
    positions = torch.arange(ids.shape[1]).repeat(len(ids))
    with torch.no_grad():
        hidden = policy.hidden(ids.reshape(1, -1), positions[None], PackedContext(lengths))
        logits = policy.logits(hidden).view(*ids.shape, VOCAB)[:, len(prompt) - 1 :]
    p = (logits.double() / temperature).softmax(-1).view(VOCAB, VOCAB, 3, VOCAB)
    first, second, third = p[0, 0, 0], p[:, 0, 1], p[:, :, 2]
    return (first[:, None, None] * second[:, :, None] * third).numpy()


def draw(
    policy: Policy, system: DecodingConfig, prompt: list[int], temperature: float, fault: Fault = None
) -> np.ndarray:
    """Counts [V, V, V] of the first three tokens in DRAWS answers of the engine, with a part of one's own."""
    numbers = np.random.default_rng(0)
    seconds = numbers.lognormal(size=100_000).cumsum().tolist()  # by which as many drafts as pay are made
    engine = TorchEngine(policy, system, slots=1000, max_length=16, clock=iter(seconds).__next__)
    assert isinstance(engine.decoder, DraftVerify)
    if isinstance(engine.decoder.length, CostLength):
        pace, paying = engine.decoder.length.pace, engine.decoder.length.pace.choose
        pace.choose = lambda rows: (paying(rows) + int(numbers.integers(3))) % 3  # type: ignore[method-assign]
    if isinstance(fault, type):
        replaced = engine.decoder.drafter if issubclass(fault, MTPDrafter) else engine.decoder.target.cache
        replaced.__class__ = fault  # type: ignore[assignment]
    elif fault is not None:
        engine.decoder.rule = fault
    drafts = engine.decoder.drafter is not None
    asked = requests([prompt] * DRAWS, temperature=temperature, max_new_tokens=TOKENS + 2)
    answers = generate(engine, asked)
    reached, accepted = (sum(getattr(a.stats, name).sum() for a in answers) for name in ("reached", "accepted"))
    assert not drafts or accepted > 0.1 * reached > 0, "less than 10 % of the drafts are accepted: nothing is tested"
    counts = Counter(tuple(a.token_ids[:TOKENS].tolist()) for a in answers)
    table = np.zeros((VOCAB,) * TOKENS)
    for tokens, count in counts.items():
        table[tokens] = count
    return table


def smallest_p(policy: Policy, system: DecodingConfig, temperature: float, fault: Fault = None) -> float:
    """The smallest p-value over prompts, single tokens and the joint distribution, corrected for their number
    (Bonferroni)."""
    values = []
    for prompt in PROMPTS:
        expected = exact_distribution(policy, prompt, temperature)
        counts = draw(policy, system, prompt, temperature, fault)
        values.append(p_value(counts, expected))
        for axis in range(TOKENS):
            others = tuple(a for a in range(TOKENS) if a != axis)
            values.append(p_value(counts.sum(others), expected.sum(others)))
    return min(values) * len(values)


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(VOCAB, seed=11, sharp=16.0)


KINDS = ["target_only", "bebop", "bebop_block", "bebop_tree", "block", "firp"]  # others draft or verify as one of these


@pytest.mark.parametrize("temperature", slow_but([0.7], [1.0, 0.7]))
@pytest.mark.parametrize("name", slow_but(KINDS, [name for name, system in SYSTEMS.items() if system.exact]))
def test_the_output_distribution_is_the_target(policy: Policy, name: str, temperature: float) -> None:
    drafts = 4 if SYSTEMS[name].tree else 2  # two nodes would have no siblings
    assert smallest_p(policy, DecodingConfig(system=name, draft_tokens=drafts), temperature) > LEVEL


@pytest.mark.parametrize(
    "name", slow_but(["bebop"], [name for name, system in SYSTEMS.items() if system.exact and system.self_tempered])
)
def test_the_output_distribution_is_the_target_at_draft_temperatures_that_are_chosen(policy: Policy, name: str) -> None:
    system = DecodingConfig(system=name, draft_tokens=2, draft_temperature="auto")
    assert smallest_p(policy, system, 0.7) > LEVEL


FREE = [name for name, system in SYSTEMS.items() if system.exact and system.free_length]


@pytest.mark.parametrize("name", slow_but(["bebop"], FREE))
def test_the_output_distribution_is_the_target_with_as_many_drafts_as_pay(policy: Policy, name: str) -> None:
    """The number changes from cycle to cycle, in some of them to a chosen one and in others to any, 0 among them."""
    assert smallest_p(policy, DecodingConfig(system=name, draft_tokens="auto", most_drafts=2), 1.0) > LEVEL


class BonusFromTheLastDraftRow:
    """The bonus as the paper's Algorithms 3 and 4 print it: from p_K instead of p_{K+1}."""

    exact, layers = True, ()

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        shifted = torch.cat([out.probs[:, :-1], out.probs[:, -2:-1]], 1)
        accepted, token = chain_verify(draft.tokens, draft.probs, shifted, uniforms, draft.lengths)
        return Accepted.chain(draft, accepted, token)


class ResidualIsTheTarget:
    """After a rejection draws from p instead of max(0, p - q)."""

    exact, layers = True, ()

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        accepted, _ = chain_verify(draft.tokens, draft.probs, out.probs, uniforms, draft.lengths)
        index = torch.arange(len(accepted))
        return Accepted.chain(draft, accepted, sample(out.probs[index, accepted], uniforms[:, -1]))


class UnprocessedDraft:
    """Verifies with the draft's distribution before temperature, not the one that the draft was sampled from."""

    exact, layers = True, ()

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        assert draft.probs is not None
        raw = draft.probs**0.7
        raw = raw / raw.sum(-1, keepdim=True)
        accepted, token = chain_verify(draft.tokens, raw, out.probs, uniforms, draft.lengths)
        return Accepted.chain(draft, accepted, token)


BROKEN = [BonusFromTheLastDraftRow(), ResidualIsTheTarget(), UnprocessedDraft()]


@pytest.mark.parametrize("rule", slow_but(BROKEN[:1], BROKEN))
def test_broken_rules_are_caught(policy: Policy, rule: AcceptanceRule) -> None:
    assert smallest_p(policy, DecodingConfig(draft_tokens=2), 0.7, rule) < LEVEL / 100


class StaleRow(SlotContext):
    """Leaves the first row of each verification as the last cycle's draft wrote it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        if query.shape[2] > 1 and self.first_slot == 0 and self.bias.shape[-1] == self.keys.shape[3]:
            at = self.index[:, :, :1]
            batch = len(key)
            key, value = key.clone(), value.clone()
            key[:, :, :1] = self.keys[layer, :batch].gather(2, at)
            value[:, :, :1] = self.values[layer, :batch].gather(2, at)
        return super().attend(layer, query, key, value, scaling)


def test_a_stale_cache_row_is_caught(policy: Policy) -> None:
    system = DecodingConfig(system="bebop", draft_tokens=2)
    assert smallest_p(policy, system, 1.0, StaleRow) < LEVEL / 100


def test_a_draft_dropped_for_being_unlikely_is_caught(policy: Policy) -> None:
    """The illegal length rule of SPEC 1.7: it filters the draft distribution, and the test sees the bias."""

    class DropUnlikely:
        exact, layers = True, ()

        def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
            assert draft.probs is not None
            q = draft.probs.gather(-1, draft.tokens[..., None])[..., 0]
            lengths = (q > 0.3).long().cumprod(1).sum(1)
            accepted, token = chain_verify(draft.tokens, draft.probs, out.probs, uniforms, lengths)
            return Accepted.chain(draft, accepted, token)

    assert smallest_p(policy, DecodingConfig(draft_tokens=2), 1.0, DropUnlikely()) < LEVEL / 100


class PeekingTemperature(MTPDrafter):
    """Draws the first draft at each temperature, and takes the one whose token the target accepts most readily."""

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        context, sizes = rows.context(), rows.sizes
        positions = torch.arange(context.shape[1]).expand_as(context)
        hidden = self.policy.hidden(context, positions, CausalContext())
        p = rows.probs(self.policy.logits(hidden[torch.arange(rows.batch), sizes - 1])[:, None])[:, 0]
        own, logits = rows.sampling.temperature, self.policy.logits(self.hidden[: rows.batch])[:, None]
        assert own is not None and self.tempered is not None
        q = torch.stack([rows.probs(logits, None, factor * own)[:, 0] for factor in GRID])  # [G, B, V]
        token = sample(q, rows.uniforms[:, 0].expand(len(GRID), -1))[..., None]
        best = (p.expand_as(q).gather(-1, token) / q.gather(-1, token))[..., 0].argmax(0)
        chosen = (torch.tensor(GRID)[best] * own)[:, None].expand(-1, length.limit)
        self.tempered.choose = lambda rows, drafts: chosen  # type: ignore[method-assign]
        return super().propose(rows, length)


class OtherTemperature(MTPDrafter):
    """Says that its drafts were drawn at the target's temperature, whatever they were drawn at."""

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        draft = super().propose(rows, length)
        assert self.drawn is not None
        return replace(draft, probs=rows.probs(torch.stack(self.drawn.logits, 1)))


@pytest.mark.parametrize("drafter", slow_but([OtherTemperature], [PeekingTemperature, OtherTemperature]))
def test_a_draft_temperature_that_peeks_or_is_not_told_is_caught(policy: Policy, drafter: type[MTPDrafter]) -> None:
    system = DecodingConfig(draft_tokens=2, draft_temperature="auto")
    assert smallest_p(policy, system, 0.7, drafter) < LEVEL / 100


class OnlyWhatWillStand:
    """Makes no more drafts than the target is going to accept, as if it had seen what comes of them."""

    exact, layers = True, ()

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        stand, _ = chain_verify(draft.tokens, draft.probs, out.probs, uniforms)
        accepted, token = chain_verify(draft.tokens, draft.probs, out.probs, uniforms, stand)
        return Accepted.chain(draft, accepted, token)


@pytest.mark.slow
def test_a_number_of_drafts_that_knows_their_fate_is_caught(policy: Policy) -> None:
    system = DecodingConfig(draft_tokens="auto", most_drafts=2)
    assert smallest_p(policy, system, 1.0, OnlyWhatWillStand()) < LEVEL / 100
