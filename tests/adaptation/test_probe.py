"""The probe's accept lengths are unbiased: averaged over all texts of a law they are what decoding gives, exactly."""

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.adaptation.probe import Array, Probe, probe
from bebop.config import DecodingConfig
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import chain
from bebop.rollout.decoding.laws import Laws
from bebop.rollout.decoding.systems import make_system
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Law
from tests.builders import requests, tiny_policy

VOCAB, DEPTH = 5, 2
PROMPT = (0, 3, 1)
LAWS = [Law(), Law(temperature=0.6), Law(target_top_p=0.8), Law(temperature=1.2, target_top_k=3)]


def law_of(policy: Policy, hidden: Tensor, law: Law) -> Tensor:
    """Laws [..., V] as the engine samples them."""
    logits = policy.logits(hidden)
    rows = torch.ones(1)
    options = Laws(
        temperature=rows * law.temperature, top_p=rows * law.target_top_p, top_k=rows.long() * law.target_top_k
    )
    return options.probs(logits.reshape(1, -1, VOCAB)).view(logits.shape)


@torch.no_grad()
def laws(policy: Policy, law: Law) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p and q [V] of the first answer token, and [V, V] of the second after each first, by hand."""
    assert policy.mtp is not None
    ids = torch.tensor([[*PROMPT, first] for first in range(VOCAB)])
    hidden = policy.hidden(ids, torch.arange(4).expand_as(ids), CausalContext())
    p = law_of(policy, hidden, law)
    one, two = chain(policy.mtp, policy.embed(ids), hidden, 2)
    anchor = len(PROMPT) - 2
    return p[0, 2], law_of(policy, one[0, anchor], law), p[:, 3], law_of(policy, two[:, anchor], law)


@torch.no_grad()
def decoded(policy: Policy, law: Law, greedy: bool) -> float:
    """Expected accepted drafts + 1 of the first cycle: a draft reaches step 2 if it was accepted at step 1."""
    p1, q1, p2, q2 = laws(policy, law)
    if greedy:
        first = int(q1.argmax())
        return float(1 + p1[first] * (1 + p2[first, q2[first].argmax()]))
    accepted = torch.minimum(p1, q1)
    return float(1 + accepted.sum() + (accepted * torch.minimum(p2, q2).sum(-1)).sum())


@torch.no_grad()
def probed(policy: Policy, law: Law, number: Callable[[Probe], Array]) -> float:
    """A number of the first anchor, averaged over all texts of two tokens with their probabilities."""
    pairs = list(itertools.product(range(VOCAB), repeat=2))
    found = probe(policy, [TokenRow(prompt=PROMPT, answer=pair) for pair in pairs], DEPTH, law)
    p1, _, p2, _ = laws(policy, law)
    weights = np.array([float(p1[a] * p2[a, b]) for a, b in pairs])
    values = number(found)[found.place == 0]
    return float((weights * values)[weights > 0].sum())


def product(found: Probe) -> Array:
    """The biased variant: products of overlaps, as accepted prefixes are not distributed like the text."""
    overlap = found.numbers["overlap"]
    return np.asarray(1 + overlap[:, 0] + overlap[:, 0] * np.nan_to_num(overlap[:, 1]))


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("seed", [0, 1])
def test_accept_lengths_are_unbiased(law: Law, seed: int) -> None:
    policy = tiny_policy(VOCAB, seed=seed)
    assert probed(policy, law, lambda f: f.accept) == pytest.approx(decoded(policy, law, False), abs=1e-5)
    assert probed(policy, law, lambda f: f.accept_greedy) == pytest.approx(decoded(policy, law, True), abs=1e-5)


def test_a_product_of_overlaps_is_caught() -> None:
    gaps = [
        abs(probed(policy, law, product) - decoded(policy, law, False))
        for law in LAWS
        for policy in (tiny_policy(VOCAB, seed=0), tiny_policy(VOCAB, seed=1))
    ]
    assert max(gaps) > 0.02


def test_the_engine_decodes_as_enumerated() -> None:
    """First cycles of the engine: two drafts fit into answers of two tokens, all of them in one cycle or in two."""
    policy, law = tiny_policy(VOCAB, seed=0), Law()
    system = make_system(DecodingConfig(system="bebop", draft_tokens=DEPTH))
    engine = TorchEngine(policy, system, slots=500, max_length=16)
    answers = generate(engine, requests([PROMPT] * 3000, max_new_tokens=2))
    # Of a first cycle both drafts fit: accepted[1] is counted in it alone, reached[1] = accepted[0] of first cycles.
    first = np.array([a.stats.reached[1] for a in answers])
    both = np.array([a.stats.accepted[1] for a in answers])
    length = 1 + first + both
    spread = length.std() / len(length) ** 0.5
    assert abs(length.mean() - decoded(policy, law, False)) < 4 * spread < 0.07


def test_steps_beyond_the_answer_are_not_there() -> None:
    found = probe(tiny_policy(VOCAB), [TokenRow(prompt=PROMPT, answer=(1, 2, 0))], DEPTH, Law())
    assert found.place.tolist() == [0, 1, 2]
    assert np.isfinite(found.numbers["overlap"]).tolist() == [[True, True], [True, True], [True, False]]
    assert found.accept[2] == pytest.approx(1 + found.numbers["overlap"][2, 0])


def test_batches_and_padding_change_nothing() -> None:
    rng = np.random.default_rng(0)
    texts = [
        TokenRow(prompt=tuple(rng.integers(0, 5, 3)), answer=tuple(rng.integers(0, 5, n)), task=f"t{n % 2}")
        for n in (4, 9, 1, 0, 6)
    ]
    run = partial(probe, tiny_policy(VOCAB), texts, 3, Law())
    one, all_ = run(batch=1), run(batch=64)
    assert one.row.tolist() == all_.row.tolist() and set(one.row) == {0, 1, 2, 4}
    assert one.task.tolist() == all_.task.tolist()
    assert np.allclose(one.accept, all_.accept, atol=1e-5)
    assert np.allclose(one.numbers["overlap"], all_.numbers["overlap"], atol=1e-5, equal_nan=True)


def test_means_are_bootstrapped_over_texts() -> None:
    rng = np.random.default_rng(1)
    texts = [TokenRow(prompt=PROMPT, answer=tuple(rng.integers(0, 4, 30))) for _ in range(8)]
    found = probe(tiny_policy(VOCAB), texts, DEPTH, Law())
    constant_in_text = found.row.astype(float)
    interval = found.mean(constant_in_text)
    assert interval.value == pytest.approx(3.5)
    assert interval.high - interval.low > 2, "eight texts, whatever their 240 tokens"
    half = np.where(found.row < 4, constant_in_text, np.nan)
    assert found.mean(half).value == pytest.approx(1.5)
