"""The probe's accept lengths are unbiased: averaged over all texts of a distribution they are what decoding gives,
exactly."""

import dataclasses
import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.adaptation.evaluation import change, estimated, measured
from bebop.adaptation.probe import Array, Probe, probe
from bebop.config.job import DecodingConfig
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import chain
from bebop.report.adapted import rows
from bebop.rollout.decoding.sampling import BatchSampling
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling
from bebop.trajectory import Completion, DecodeStats
from tests.adaptation import builders
from tests.builders import bare_policy, requests

VOCAB, DEPTH = 5, 2
PROMPT = (0, 3, 1)
DISTRIBUTIONS = [
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(target_top_p=0.8),
    Sampling(temperature=1.2, target_top_k=3),
]


def probs_of(policy: Policy, hidden: Tensor, sampling: Sampling) -> Tensor:
    """BatchSampling [..., V] as the engine samples them."""
    logits = policy.logits(hidden)
    rows = torch.ones(1)
    options = BatchSampling(
        temperature=rows * sampling.temperature,
        top_p=rows * sampling.target_top_p,
        top_k=rows.long() * sampling.target_top_k,
    )
    return options.probs(logits.reshape(1, -1, VOCAB)).view(logits.shape)


@torch.no_grad()
def distributions(policy: Policy, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """p and q [V] of the first answer token, and [V, V] of the second after each first, by hand."""
    assert policy.mtp is not None
    ids = torch.tensor([[*PROMPT, first] for first in range(VOCAB)])
    hidden = policy.hidden(ids, torch.arange(4).expand_as(ids), CausalContext())
    p = probs_of(policy, hidden, sampling)
    one, two = chain(policy.mtp, policy.embed(ids), hidden, 2)
    anchor = len(PROMPT) - 2
    return p[0, 2], probs_of(policy, one[0, anchor], sampling), p[:, 3], probs_of(policy, two[:, anchor], sampling)


@torch.no_grad()
def decoded(policy: Policy, sampling: Sampling, greedy: bool) -> float:
    """Expected accepted drafts + 1 of the first cycle: a draft reaches step 2 if it was accepted at step 1."""
    p1, q1, p2, q2 = distributions(policy, sampling)
    if greedy:
        first = int(q1.argmax())
        return float(1 + p1[first] * (1 + p2[first, q2[first].argmax()]))
    accepted = torch.minimum(p1, q1)
    return float(1 + accepted.sum() + (accepted * torch.minimum(p2, q2).sum(-1)).sum())


@torch.no_grad()
def probed(policy: Policy, sampling: Sampling, number: Callable[[Probe], Array]) -> float:
    """A number of the first anchor, averaged over all texts of two tokens with their probabilities."""
    pairs = list(itertools.product(range(VOCAB), repeat=2))
    found = probe(policy, [TokenRow(prompt=PROMPT, answer=pair) for pair in pairs], DEPTH, sampling)
    p1, _, p2, _ = distributions(policy, sampling)
    weights = np.array([float(p1[a] * p2[a, b]) for a, b in pairs])
    values = number(found)[found.place == 0]
    return float((weights * values)[weights > 0].sum())


def product(found: Probe) -> Array:
    """The biased variant: products of overlaps, as accepted prefixes are not distributed like the text."""
    overlap = found.numbers["overlap"]
    return np.asarray(1 + overlap[:, 0] + overlap[:, 0] * np.nan_to_num(overlap[:, 1]))


@pytest.mark.parametrize("sampling", DISTRIBUTIONS)
@pytest.mark.parametrize("seed", [0, 1])
def test_accept_lengths_are_unbiased(sampling: Sampling, seed: int) -> None:
    policy = bare_policy(VOCAB, seed=seed)
    assert probed(policy, sampling, lambda f: f.accept) == pytest.approx(decoded(policy, sampling, False), abs=1e-5)
    assert probed(policy, sampling, lambda f: f.accept_greedy) == pytest.approx(
        decoded(policy, sampling, True), abs=1e-5
    )


@pytest.mark.slow  # the same passes once more
@pytest.mark.parametrize("sampling", DISTRIBUTIONS)
def test_steps_are_reached_as_often_as_in_decoding(sampling: Sampling) -> None:
    policy = bare_policy(VOCAB, seed=1)

    def length(found: Probe, greedy: bool) -> Array:
        """Accept lengths of all places, by what ``estimated`` makes of one text each."""
        own = np.arange(len(found.row))
        texts = [TokenRow(prompt=PROMPT, answer=(0,))] * len(own)
        sums = estimated(dataclasses.replace(found, row=own), texts, greedy)
        assert (sums.cycles == 1).all() and sums.reached[:, 0].all()
        return np.asarray(sums.tokens)

    for greedy in (False, True):
        found = probed(policy, sampling, partial(length, greedy=greedy))
        assert found == pytest.approx(decoded(policy, sampling, greedy), abs=1e-5)


def test_a_product_of_overlaps_is_caught() -> None:
    gaps = [
        abs(probed(policy, sampling, product) - decoded(policy, sampling, False))
        for sampling in DISTRIBUTIONS
        for policy in (bare_policy(VOCAB, seed=0), bare_policy(VOCAB, seed=1))
    ]
    assert max(gaps) > 0.02


def test_the_engine_decodes_as_enumerated() -> None:
    """First cycles of the engine: two drafts fit into answers of two tokens, all of them in one cycle or in two."""
    policy, sampling = bare_policy(VOCAB, seed=0), Sampling()
    system = DecodingConfig(system="bebop", draft_tokens=DEPTH)
    engine = TorchEngine(policy, system, slots=500, max_length=16)
    answers = generate(engine, requests([PROMPT] * 3000, max_new_tokens=2))
    # Of a first cycle both drafts fit: accepted[1] is counted in it alone, reached[1] = accepted[0] of first cycles.
    first = np.array([a.stats.reached[1] for a in answers])
    both = np.array([a.stats.accepted[1] for a in answers])
    length = 1 + first + both
    spread = length.std() / len(length) ** 0.5
    assert abs(length.mean() - decoded(policy, sampling, False)) < 4 * spread < 0.07


def test_steps_beyond_the_answer_are_not_there() -> None:
    found = probe(bare_policy(VOCAB), [TokenRow(prompt=PROMPT, answer=(1, 2, 0))], DEPTH, Sampling())
    assert found.place.tolist() == [0, 1, 2]
    assert np.isfinite(found.numbers["overlap"]).tolist() == [[True, True], [True, True], [True, False]]
    assert found.accept[2] == pytest.approx(1 + found.numbers["overlap"][2, 0])


def test_batches_and_padding_change_nothing() -> None:
    rng = np.random.default_rng(0)
    texts = [
        TokenRow(prompt=tuple(rng.integers(0, 5, 3)), answer=tuple(rng.integers(0, 5, n)), task=f"t{n % 2}")
        for n in (4, 9, 1, 0, 6)
    ]
    run = partial(probe, bare_policy(VOCAB), texts, 3, Sampling())
    one, all_ = run(batch=1), run(batch=64)
    assert one.row.tolist() == all_.row.tolist() and set(one.row) == {0, 1, 2, 4}
    assert one.task.tolist() == all_.task.tolist()
    assert np.allclose(one.accept, all_.accept, atol=1e-5)
    assert np.allclose(one.numbers["overlap"], all_.numbers["overlap"], atol=1e-5, equal_nan=True)


def test_every_third_anchor_has_the_numbers_that_it_has_among_all() -> None:
    rng = np.random.default_rng(2)
    texts = [TokenRow(prompt=PROMPT, answer=tuple(rng.integers(0, 4, n))) for n in (12, 5, 9, 20)]
    run = partial(probe, bare_policy(VOCAB), texts, 3, Sampling())
    whole, some, again = run(), run(every=3), run(every=3, batch=1)
    places = {place: i for i, place in enumerate(zip(whole.row.tolist(), whole.place.tolist(), strict=True))}
    chosen = [places[place] for place in zip(some.row.tolist(), some.place.tolist(), strict=True)]
    assert len(some.row) == pytest.approx(len(whole.row) / 3, abs=4) and again.place.tolist() == some.place.tolist()
    assert np.allclose(some.accept, whole.accept[chosen], atol=1e-5)
    assert np.allclose(some.numbers["overlap"], whole.numbers["overlap"][chosen], atol=1e-5, equal_nan=True)
    assert not np.allclose(some.accept, whole.accept[: len(chosen)], atol=1e-5), "or nothing was compared"


def test_means_are_bootstrapped_over_texts() -> None:
    rng = np.random.default_rng(1)
    texts = [TokenRow(prompt=PROMPT, answer=tuple(rng.integers(0, 4, 30))) for _ in range(8)]
    found = probe(bare_policy(VOCAB), texts, DEPTH, Sampling())
    constant_in_text = found.row.astype(float)
    interval = found.mean(constant_in_text)
    assert interval.value == pytest.approx(3.5)
    assert interval.high - interval.low > 2, "eight texts, whatever their 240 tokens"
    half = np.where(found.row < 4, constant_in_text, np.nan)
    assert found.mean(half).value == pytest.approx(1.5)


# ---- Sums of decoded answers become rates with intervals


def answer(reached: list[float], accepted: list[float], cycles: int) -> Completion:
    """An answer whose statistics are given."""
    sums = {name: np.array(reached) / 2 for name in ("overlap", "target_only", "draft_entropy", "target_entropy")}
    stats = DecodeStats(
        cycles=cycles,
        tokens=cycles + int(sum(accepted)),
        reached=np.array(reached),
        accepted=np.array(accepted),
        **sums,
    )
    empty = np.zeros(0, dtype=np.int64)
    return Completion(token_ids=empty, logprobs=np.zeros(0, dtype=np.float32), versions=empty, stats=stats)


def test_rates_by_hand() -> None:
    answers = [answer([4.0, 2.0], [2.0, 1.0], 4), answer([1.0], [1.0], 1)]  # the second reached one position alone
    found = measured(["a", "b"], answers, 2)
    assert found.interval("accept_length").value == (5 + 4) / 5
    assert found.interval("accepted", 1).value == 3 / 5 and found.interval("accepted", 2).value == 1 / 2
    assert found.interval("accepted").value == 4 / 7 and found.interval("overlap", 1).value == 0.5
    only = found.of("b")
    assert (
        only.tasks == ("b",)
        and only.interval("accept_length").value == 2
        and np.isnan(only.interval("accepted", 2).low)
    )
    assert list(found.summary())[:4] == ["accept_length", "accept_rate", "accept_rate/1", "accept_rate/2"]


def test_a_change_is_taken_prompt_by_prompt() -> None:
    worse, better = builders.measured(0.5), builders.measured(0.7)
    same = change(worse, worse, "accept_length")
    assert (same.value, same.low, same.high) == (0, 0, 0)
    found = change(better, worse, "accept_length")
    gap = better.interval("accept_length").value - worse.interval("accept_length").value
    assert found.value == pytest.approx(gap) and found.low > 0


def test_the_table_has_every_number_once() -> None:
    found = list(rows(builders.results()))
    names = [(row.system, row.label) for row in found]
    assert len(set(names)) == len(names) == (1 + 2 + 1 + 3 + 4) + (1 + 2 + 1 + 3)
    assert all(row.change.value == pytest.approx(row.after.value - row.before.value, abs=1e-9) for row in found)
    by_name = dict(zip(names, found, strict=True))
    assert by_name["sampled drafts", "overlap Σ min(p, q)"].after.value == pytest.approx(0.75)
    assert (
        by_name["sampled drafts", "acceptance, draft 1"].after.value
        > by_name["greedy drafts", "acceptance, draft 1"].after.value
    )
