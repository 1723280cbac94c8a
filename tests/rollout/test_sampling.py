"""Sampling distributions against Hugging Face's logits processors, and on the engine against enumeration."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from bebop.config.job import DecodingConfig
from bebop.kernels.truncation import truncate_
from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.draft_verify import DraftVerify
from bebop.rollout.decoding.rules import Rejection
from bebop.rollout.decoding.sampling import BatchSampling, entropy
from bebop.rollout.slots import NEUTRAL, Slots, SlotSizes
from bebop.rollout.torch_engine import TorchEngine, generate
from bebop.trajectory import SamplingParams
from tests.builders import bare_policy, requests, tiny_draft
from tests.cases import slow_but
from tests.goodness_of_fit import p_value
from tests.rollout.driving import decoder_of

SETTINGS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 500},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 0.5},
    {"top_k": 8, "top_p": 0.8},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.1},
    {"repetition_penalty": 1.3, "temperature": 0.8, "top_k": 12, "top_p": 0.95, "min_p": 0.02},
]


def hugging_face(logits: Tensor, context: Tensor, sampling: SamplingParams) -> Tensor:
    """Probabilities [B, V] as transformers' generate makes them from logits [B, V] and the context [B, T]."""
    steps = LogitsProcessorList([RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)])
    steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        steps.append(MinPLogitsWarper(sampling.min_p))
    return steps(context, logits.clone()).softmax(-1)


def distributions_of(rows: Sequence[SamplingParams]) -> BatchSampling:
    """BatchSampling with every column present."""

    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(row, name) for row in rows], dtype=dtype)

    return BatchSampling(
        temperature=column("temperature"),
        top_k=column("top_k", torch.long),
        top_p=column("top_p"),
        min_p=column("min_p"),
        penalty=column("repetition_penalty"),
    )


def inputs(rows: int, vocab: int = 40, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [B, V], context [B, 6] and what it marks as seen [B, V]."""
    torch.manual_seed(seed)
    logits, context = 3 * torch.randn(rows, vocab), torch.randint(0, vocab, (rows, 6))
    return logits, context, torch.zeros(rows, vocab, dtype=torch.bool).scatter(1, context, True)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_distributions_are_those_of_hugging_face(setting: dict[str, Any]) -> None:
    sampling = SamplingParams(**setting)
    logits, context, seen = inputs(50)
    expected = hugging_face(logits, context, sampling)
    got = distributions_of([sampling] * 50).probs(logits[:, None], seen[:, None])[:, 0]
    assert (got - expected).abs().max() < 1e-6
    assert ((got > 0) == (expected > 0)).all() and (got.sum(-1) - 1).abs().max() < 1e-6
    if setting and setting.get("top_k") != 500:  # and the setting does something
        assert (got - logits.softmax(-1)).abs().max() > 0.01


def test_columns_left_out_are_neutral() -> None:
    logits, _, seen = inputs(20)
    neutral = distributions_of([SamplingParams()] * 20).probs(logits[:, None], seen[:, None])
    assert torch.equal(BatchSampling().probs(logits[:, None], seen[:, None]), neutral)


def test_mixed_rows_do_not_touch_one_another() -> None:
    rows = [SamplingParams(**setting) for setting in SETTINGS] + [SamplingParams(temperature=0.0, top_p=0.5)]
    logits, context, seen = inputs(len(rows), seed=1)
    got = distributions_of(rows).probs(logits[:, None], seen[:, None])[:, 0]
    for i, sampling in enumerate(rows[:-1]):
        alone = distributions_of([sampling]).probs(logits[i, None, None], seen[i, None, None])[0, 0]
        assert torch.equal(got[i], BatchSampling().probs(logits[i, None, None])[0, 0] if not SETTINGS[i] else alone)
        assert (got[i] - hugging_face(logits[i : i + 1], context[i : i + 1], sampling)[0]).abs().max() < 1e-6
    assert got[-1].max() == 1 and got[-1].argmax() == logits[-1].argmax()


@pytest.mark.parametrize(
    ("probs", "setting", "kept"),
    [
        ([0.5, 0.3, 0.1, 0.1], {"top_p": 0.8}, 2),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.7}, 2),
        ([0.4, 0.3, 0.2, 0.1], {"top_p": 0.9}, 3),
        ([0.6, 0.2, 0.1, 0.1], {"top_p": 0.8}, 2),
        ([0.7, 0.1, 0.1, 0.1], {"top_p": 0.9}, 3),
        ([0.5, 0.3, 0.1, 0.1], {"top_p": 0.81}, 3),
        ([0.5, 0.3, 0.1, 0.1], {"top_p": 1e-7}, 1),
        ([0.5, 0.3, 0.1, 0.1], {"top_k": 3, "top_p": 0.8 / 0.9}, 2),
        ([0.6, 0.3, 0.05, 0.05], {"min_p": 0.5}, 2),
        ([0.7, 0.21, 0.05, 0.04], {"min_p": 0.3}, 2),
    ],
)
def test_mass_that_reaches_p_up_to_rounding_is_enough(probs: list[float], setting: dict[str, Any], kept: int) -> None:
    """By hand, in every order of the tokens, and in the losses too; rounding of softmax and sums goes either way."""
    for turn in range(4):
        logits = torch.tensor([*probs[turn:], *probs[:turn]], dtype=torch.float64).log().float()[None]
        for shift in (0.0, 3.3, -17.1):
            got = distributions_of([SamplingParams(**setting)]).probs(logits[:, None] + shift)
            assert (got > 0).sum() == kept
            if "min_p" not in setting:
                assert (truncate_(logits + shift, 1.0, setting["top_p"], setting.get("top_k", 0)) > -9e9).sum() == kept


def test_top_p_of_one_keeps_the_whole_tail_beside_a_truncated_row() -> None:
    """Rounding takes the running sum to 1 before the tail; a neutral row must not feel that."""
    logits = 4 * torch.randn(2, 1, 50_000, generator=torch.Generator().manual_seed(0))
    got = BatchSampling(top_p=torch.tensor([1.0, 0.9])).probs(logits)
    assert (got[0] > 0).all() and (got[1] == 0).any()


def test_settings_move_with_their_request() -> None:
    """What is known without asking the device says of each row what the device's own table does."""
    asked = [{"temperature": 0.5}, {}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.1}, {"repetition_penalty": 2.0}]
    slots = Slots(SlotSizes(slots=6, length=8, drafts=2, vocab=5), torch.device("cpu"))
    assert slots.sampling(6) == BatchSampling()
    slots.start(0, [SamplingParams(**one) for one in asked], [[1, 2]] * 5)

    def told(batch: int) -> None:
        for (name, neutral), column in zip(NEUTRAL.items(), slots.settings[:batch].T, strict=True):
            own = getattr(slots.sampling(batch), name)
            assert own is None if bool((column == neutral).all()) else torch.equal(own, column.to(own.dtype))

    for batch in (1, 2, 3, 5, 6):
        told(batch)
    slots.move([4, 3], [0, 2], [2, 2])
    for batch in (1, 2, 3):
        told(batch)
    slots.start(1, [SamplingParams(temperature=0.0)], [[3]])
    told(3)


@pytest.mark.parametrize("setting", [{}, *SETTINGS[1:3], {"top_k": 3, "top_p": 0.4, "min_p": 0.2}], ids=str)
def test_temperature_zero_is_one_hot_on_the_best(setting: dict[str, Any]) -> None:
    sampling = SamplingParams(temperature=0.0, **setting)
    logits, context, seen = inputs(30, seed=2)
    best = RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty)(context, logits.clone()).argmax(-1)
    got = distributions_of([sampling] * 30).probs(logits[:, None], seen[:, None])[:, 0]
    assert torch.equal(got, torch.nn.functional.one_hot(best, 40).float())


def test_entropy_of_known_distributions() -> None:
    distributions = torch.tensor([[1.0, 0, 0, 0], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.25, 0.25]])
    assert entropy(distributions).tolist() == pytest.approx([0.0, np.log(2), np.log(4)])


# On the engine: the joint distribution of the first two tokens, with every transform at work.

VOCAB, DRAWS, LEVEL = 5, 4000, 1e-3
PROMPT = [1, 1]  # one token, so that a penalty changes the distribution of whatever comes next
ENGINE_SETTINGS: list[dict[str, Any]] = [
    {"top_k": 3},
    {"top_p": 0.8},
    {"min_p": 0.25},
    {"repetition_penalty": 2.5},
    {"temperature": 1.2, "top_k": 4, "top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.5},
]


@pytest.fixture(scope="module")
def policy() -> Policy:
    policy = bare_policy(VOCAB, seed=3, sharp=16.0)
    policy.draft = tiny_draft(VOCAB, sharp=16.0)
    return policy


def next_distribution(
    policy: Policy, context: Sequence[int], sampling: SamplingParams, seen: int | None = None
) -> np.ndarray:
    """The exact distribution [V] of the token after ``context``: one plain forward, then transformers' processors.

    ``seen``: how many of the context's tokens a penalty sees; None: all.
    """
    ids = torch.tensor([list(context)])
    with torch.no_grad():
        hidden = policy.hidden(ids, torch.arange(ids.shape[1])[None], PackedContext(torch.tensor([ids.shape[1]])))
        logits = policy.logits(hidden)[:, -1]
    return hugging_face(logits, ids[:, :seen], sampling)[0].double().numpy()


def joint_distribution(policy: Policy, sampling: SamplingParams, remember: bool = True) -> np.ndarray:
    """The exact joint distribution [V, V] of the next two tokens; ``remember``: penalties see the first of them."""
    first, seen = next_distribution(policy, PROMPT, sampling), None if remember else len(PROMPT)
    return np.stack([first[a] * next_distribution(policy, [*PROMPT, a], sampling, seen) for a in range(VOCAB)])


def smallest_p(
    policy: Policy,
    system: DecodingConfig,
    setting: dict[str, Any],
    fault: Callable[[DraftVerify], None] | None = None,
    expected: np.ndarray | None = None,
) -> float:
    """The smallest p-value of the joint distribution and of either token, times three (Bonferroni)."""
    engine = TorchEngine(policy, system, slots=1000, max_length=16)
    if fault is not None:
        fault(decoder_of(engine))
    asked = requests([PROMPT] * DRAWS, max_new_tokens=3, **setting)
    counts = np.zeros((VOCAB, VOCAB))
    for tokens, count in Counter(tuple(a.token_ids[:2].tolist()) for a in generate(engine, asked)).items():
        counts[tokens] = count
    if expected is None:
        expected = joint_distribution(policy, asked[0].params)
    return 3 * min(
        p_value(counts, expected), p_value(counts.sum(0), expected.sum(0)), p_value(counts.sum(1), expected.sum(1))
    )


@pytest.mark.parametrize("setting", slow_but(ENGINE_SETTINGS[-1:], ENGINE_SETTINGS), ids=str)
@pytest.mark.parametrize("name", slow_but(["bebop"], ["autoregressive", "target_only", "bebop", "draft_model"]))
def test_the_engine_samples_the_truncated_distribution(policy: Policy, name: str, setting: dict[str, Any]) -> None:
    assert smallest_p(policy, DecodingConfig(system=name, draft_tokens=2), setting) > LEVEL


def drafts_from_the_whole_distribution(decoder: DraftVerify) -> None:
    """Drafts come from the distribution without truncation, and the truncated q is what is verified."""
    assert decoder.drafter is not None
    propose = decoder.drafter.propose

    def broken(rows: Rows, length: DraftLength) -> Draft:
        own = rows.sampling
        rows.sampling = dataclasses.replace(own, top_k=None, top_p=None)
        whole = propose(rows, length)
        rows.sampling = own
        assert whole.probs is not None
        cut = BatchSampling(top_k=own.top_k, top_p=own.top_p).probs(whole.probs.log())
        return dataclasses.replace(whole, probs=cut)

    decoder.drafter.propose = broken  # type: ignore[method-assign]


class VerifiesUntruncated(Rejection):
    """Drafts are cut, but the target's mass outside top-k is kept."""

    def accept(self, rows: Rows, draft: Draft, out: TargetOutput, uniforms: Tensor) -> Accepted:
        return super().accept(rows, draft, dataclasses.replace(out, probs=0.9 * out.probs + 0.1 / VOCAB), uniforms)


def verifies_untruncated(decoder: DraftVerify) -> None:
    decoder.rule = VerifiesUntruncated()


def forgets_drafts(decoder: DraftVerify) -> None:
    """Penalties see what the context held at the start of the completion, never what was drafted since."""
    decode = decoder._verify

    def broken(rows: Rows, draft: Draft) -> TargetOutput:
        assert decoder.slots.seen is not None
        decoder.slots.seen[:] = False
        decoder.slots.seen[:, sorted(set(PROMPT))] = True
        return decode(rows, draft)

    decoder._verify = broken  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "fault", slow_but([drafts_from_the_whole_distribution], [drafts_from_the_whole_distribution, verifies_untruncated])
)
@pytest.mark.parametrize("setting", slow_but([{"top_k": 2}], [{"top_k": 2}, {"top_p": 0.6}]), ids=str)
@pytest.mark.slow
def test_distributions_that_do_not_match_are_caught(
    policy: Policy, fault: Callable[[DraftVerify], None], setting: dict[str, Any]
) -> None:
    assert smallest_p(policy, DecodingConfig(draft_tokens=2), setting, fault) < LEVEL / 100


@pytest.mark.slow
def test_a_penalty_that_forgets_the_block_would_be_caught(policy: Policy) -> None:
    """Drafts count for the tokens after them in the same block: without that the distribution is far from what is
    drawn."""
    sampling = SamplingParams(repetition_penalty=2.5)
    forgetful = joint_distribution(policy, sampling, remember=False)
    system = DecodingConfig(system="bebop", draft_tokens=2)
    assert smallest_p(policy, system, {"repetition_penalty": 2.5}, expected=forgetful) < LEVEL / 100


@pytest.mark.slow
def test_a_penalty_that_forgets_the_completion_is_caught(policy: Policy) -> None:
    system = DecodingConfig(system="autoregressive")
    assert smallest_p(policy, system, {"repetition_penalty": 2.5}, forgets_drafts) < LEVEL / 100


@pytest.mark.parametrize("name", slow_but(["bebop"], ["autoregressive", "target_only", "bebop", "bebop_adaptive"]))
def test_logprobs_are_those_of_the_truncated_distribution(policy: Policy, name: str) -> None:
    """Rows with different distributions side by side; each token's log-prob against a plain forward and
    transformers."""
    engine = TorchEngine(policy, DecodingConfig(system=name, draft_tokens=3), slots=3, max_length=32)
    prompts = [[3, 3, 1, 0], [0, 1], [2, 4, 4], [1], [0, 2, 1]]
    distributions = [SamplingParams(seed=i, max_new_tokens=12, **s) for i, s in enumerate(ENGINE_SETTINGS)]
    asked = [dataclasses.replace(r, params=p) for r, p in zip(requests(prompts), distributions, strict=True)]
    for request, answer in zip(asked, generate(engine, asked), strict=True):
        for t, token in enumerate(answer.token_ids.tolist()):
            sampling = next_distribution(policy, [*request.token_ids, *answer.token_ids[:t].tolist()], request.params)
            assert answer.logprobs[t] == pytest.approx(np.log(sampling[token]), abs=2e-5)
