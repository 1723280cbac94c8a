"""Three tokens drawn in pairs have the pair network's own joint distribution, and no other's: faults must be seen."""

import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.model.pipo import PairModel, as_pairs
from bebop.options import PipoOptions
from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.pipo import Pair, PairDecoder, Second
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import requests, tiny_pairs, tiny_policy
from tests.cases import slow_but
from tests.goodness_of_fit import p_value
from tests.rollout.slow_pairs import drafted, network_of, states
from tests.rollout.test_exactness import exact_distribution as of_single_tokens

VOCAB, DRAWS, TOKENS, TEMPERATURE = 5, 5_000, 3, 0.8
PROMPTS = [[1, 2, 3], [3, 3, 1, 2]]  # odd and even
LEVEL = 1e-3
CONFIDENCE, RANDOM = PipoOptions(tau=0.5), PipoOptions(gate="random", keep=0.6)
Law = Callable[[Policy, Sequence[int]], np.ndarray]


def law_of(policy: Policy, state: Tensor) -> Tensor:
    """[V] of a state [d]."""
    return (network_of(policy).logits(policy, state).double() / TEMPERATURE).softmax(-1)


def chances(policy: Policy, options: PipoOptions, h: Tensor, u: Tensor) -> Tensor:
    """The chance [V] that each draft is kept."""
    if options.gate == "random":
        return torch.full((VOCAB,), options.keep, dtype=torch.float64)
    assert options.tau is not None
    network, tokens = network_of(policy), torch.arange(VOCAB)
    raw = network.logits(policy, u).log_softmax(-1)
    confidence = network.confidence(h.expand(VOCAB, -1), u.expand(VOCAB, -1), policy.embed(tokens), raw)
    return (confidence >= options.tau).double()


def joint(policy: Policy, pairs: list[Pair], tokens: int, options: PipoOptions) -> Tensor:
    """Distribution [V] * tokens of what follows some pairs, by enumeration."""
    h = states(policy, pairs)
    first = law_of(policy, h[-1])
    if tokens == 1:
        return first
    follows = torch.zeros((VOCAB,) * tokens, dtype=torch.float64)
    for token in range(1, VOCAB):
        u = drafted(policy, pairs, h, token)[-1]
        second, keep = law_of(policy, u), chances(policy, options, h[-1], u)
        kept = second * keep
        rejected = 1 - kept.sum()
        if rejected > 0:
            follows[token] += rejected * joint(policy, [*pairs, (token, 0)], tokens - 1, options)
        for draft in range(1, VOCAB):
            rest = joint(policy, [*pairs, (token, draft)], tokens - 2, options) if tokens > 2 else torch.tensor(1.0)
            follows[token, draft] += kept[draft] * rest
    return first.view(-1, *[1] * (tokens - 1)) * follows


@torch.no_grad()
def in_pairs(policy: Policy, prompt: Sequence[int], options: PipoOptions) -> np.ndarray:
    """Joint distribution [V, V, V] of the next three tokens."""
    found = joint(policy, as_pairs(tuple(prompt), 0), TOKENS, options)
    assert float(found.sum()) == pytest.approx(1)
    return found.numpy()


@functools.cache
def policy(sees_draft: bool = False) -> Policy:
    one = tiny_policy(VOCAB, seed=11, sharp=16.0)
    one.parts["pipo"] = tiny_pairs(one, sees_draft=sees_draft)
    return one


@functools.cache
def draw(
    number: int, options: PipoOptions, sees_draft: bool = False, fault: type[PairDecoder] | None = None
) -> np.ndarray:
    """Counts [V, V, V] of the first three tokens of DRAWS answers to a prompt."""
    given = {name: value for name, value in asdict(options).items() if value is not None}
    config = DecodingConfig(system="pipo", draft_tokens=1, options=given)
    engine = TorchEngine(policy(sees_draft), config, slots=1000, max_length=16)
    if fault is not None:
        engine.decoder.__class__ = fault
    asked = requests([PROMPTS[number]] * DRAWS, temperature=TEMPERATURE, max_new_tokens=TOKENS + 2)
    answers = generate(engine, asked)
    reached, kept = (sum(getattr(a.stats, name).sum() for a in answers) for name in ("reached", "accepted"))
    assert 0.1 * reached < kept < 0.9 * reached, "the gate is almost always open or shut: nothing is tested"
    table = np.zeros((VOCAB,) * TOKENS)
    for tokens, count in Counter(tuple(a.token_ids[:TOKENS].tolist()) for a in answers).items():
        table[tokens] = count
    return table


def smallest_p(counts: Callable[[int], np.ndarray], law: Callable[[int], np.ndarray]) -> float:
    """Over prompts, single tokens and the joint distribution, corrected for their number (Bonferroni)."""
    found = []
    for number in range(len(PROMPTS)):
        drawn, expected = counts(number), law(number)
        found.append(p_value(drawn, expected))
        for axis in range(TOKENS):
            others = tuple(a for a in range(TOKENS) if a != axis)
            found.append(p_value(drawn.sum(others), expected.sum(others)))
    return min(found) * len(found)


@pytest.mark.parametrize(
    ("options", "sees_draft"),
    [(CONFIDENCE, False), (RANDOM, False), (PipoOptions(tau=0.3), True)],
    ids=["confidence", "random", "confidence that sees the draft"],
)
def test_three_tokens_have_the_pair_networks_distribution(options: PipoOptions, sees_draft: bool) -> None:
    law = functools.partial(in_pairs, policy(sees_draft), options=options)
    assert smallest_p(lambda n: draw(n, options, sees_draft), lambda n: law(PROMPTS[n])) > LEVEL


def test_no_other_distribution_fits() -> None:
    """The policy's own, token by token; that of single tokens in pairs; that of a gate that is always open."""
    model, drawn = policy(), functools.partial(draw, options=CONFIDENCE)
    for law in (
        lambda prompt: of_single_tokens(model, prompt, TEMPERATURE),
        lambda prompt: in_pairs(model, prompt, PipoOptions(tau=2.0)),
        lambda prompt: in_pairs(model, prompt, PipoOptions(tau=-1.0)),
    ):
        assert smallest_p(drawn, lambda n, law=law: law(PROMPTS[n])) < LEVEL / 100  # type: ignore[misc]


class DraftsFromTheTokenBefore(PairDecoder):
    """The draft layer sees the newest token that was fed, not the one just drawn."""

    def draft(self, rows: Rows, states: Tensor, token: Tensor) -> Second:
        return super().draft(rows, states, self.pair[: rows.batch, 0])


class FeedsRejectedDrafts(PairDecoder):
    """A rejected draft is not emitted, but stands in the next pair all the same."""

    def draft(self, rows: Rows, states: Tensor, token: Tensor) -> Second:
        self.latest = super().draft(rows, states, token)
        return self.latest

    def cycle(self, batch: int, longest: int, version: int) -> Tensor:
        done = super().cycle(batch, longest, version)
        self.pair[:batch, 1] = self.latest.draft
        return done


class OneUniformForBoth(PairDecoder):
    """Both tokens of a pair are drawn with one random number."""

    def draft(self, rows: Rows, states: Tensor, token: Tensor) -> Second:
        rows.uniforms[:, 1] = rows.uniforms[:, 0]
        return super().draft(rows, states, token)


class KeepsLikelyDrafts(PairDecoder):
    """A gate that looks at the draft's own probability filters its distribution."""

    def draft(self, rows: Rows, states: Tensor, token: Tensor) -> Second:
        second = super().draft(rows, states, token)
        chance = second.probs[:, 0].gather(1, second.draft[:, None])[:, 0]
        return Second(probs=second.probs, draft=second.draft, confidence=chance, kept=chance > 0.6)


FAULTS = (DraftsFromTheTokenBefore, FeedsRejectedDrafts, OneUniformForBoth, KeepsLikelyDrafts)


@pytest.mark.parametrize("fault", slow_but(FAULTS[:2], FAULTS))
def test_faults_are_caught(fault: type[PairDecoder]) -> None:
    law = functools.partial(in_pairs, policy(), options=CONFIDENCE)
    assert smallest_p(lambda n: draw(n, CONFIDENCE, fault=fault), lambda n: law(PROMPTS[n])) < LEVEL / 100


class PadAllowed(PairModel):
    """Does not take PAD out of the second token's distribution, as one may who thinks of the first alone."""

    def logits(self, policy: Policy, states: Tensor) -> Tensor:
        first = super().logits(policy, states)
        return first if self.calls.__next__() % 2 == 0 else policy.logits(states)


@pytest.mark.slow
@pytest.mark.parametrize("allowed", [False, True])
def test_no_answer_holds_a_pad(allowed: bool) -> None:
    """12,000 of them, under every setting, by a model whose likeliest token PAD would often be."""
    one = tiny_policy(VOCAB + 7, seed=3)
    network = tiny_pairs(one)
    one.parts["pipo"] = network
    with torch.no_grad():
        one.backbone.lm_head.weight[0] = 2 * one.backbone.lm_head.weight[5]
    if allowed:
        network.__class__, network.calls = PadAllowed, itertools.count()  # type: ignore[assignment]
    seen = Counter[int]()
    settings = (
        {},
        {"temperature": 1.5},
        {"temperature": 0.0},
        {"top_k": 3},
        {"top_p": 0.7},
        {"repetition_penalty": 1.3},
    )
    for number, own in enumerate(settings):
        config = DecodingConfig(system="pipo", draft_tokens=1, options={"tau": 0.45})
        engine = TorchEngine(one, config, slots=500, max_length=32)
        prompts = [[1 + i % 11, *range(1, 1 + i % 6)] for i in range(2000)]
        for answer in generate(engine, requests(prompts, max_new_tokens=8, seed=number << 20, **own)):
            seen.update(answer.token_ids.tolist())
    assert seen.total() == 12_000 * 8 and len(seen) == VOCAB + 6 + allowed
    assert (seen[0] > 1000) == allowed
