"""The reference against the engine's own log-probs, against a slow way to process logits, and within itself."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bebop.certify import model_reference, served_reference
from bebop.certify.answers import Answer, Block
from bebop.certify.embedded import EmbeddedEngine
from bebop.certify.model_reference import ModelReference, claimed, processed
from bebop.certify.white_box import WhiteBox
from bebop.config.job import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.torch_engine import TorchEngine
from bebop.trajectory import SamplingParams
from tests.builders import requests, tiny_policy
from tests.cases import slow_but

VOCABULARY, STOP = 12, 11
TRUNCATED: dict[str, Any] = {"top_k": 8, "top_p": 0.9, "min_p": 0.05, "repetition_penalty": 1.3, "temperature": 1.4}
SETTINGS: list[dict[str, Any]] = [{}, {"temperature": 2.0}, *({k: v} for k, v in TRUNCATED.items()), TRUNCATED]


@pytest.fixture(scope="module")
def policy() -> Policy:
    return tiny_policy(VOCABULARY)


@pytest.fixture(scope="module")
def answers(policy: Policy) -> list[Answer]:
    """As sampled without any settings."""
    return sampled(policy)


def sampled(policy: Policy, box: WhiteBox | None = None, count: int = 6, **params: Any) -> list[Answer]:
    engine = TorchEngine(policy, DecodingConfig(), slots=count, max_length=64, measure=False)
    prompts = [(1 + i // 2, 2, 3)[: 1 + i // 2] for i in range(count)]
    asked = requests(prompts, seed=5, max_new_tokens=20, stop_token_ids=(STOP,), **params)
    return EmbeddedEngine(engine, white_box=box).sample(asked, lambda tokens: None)


def same(one: Block, other: Block) -> None:
    for field in dataclasses.fields(Block):
        a, b = getattr(one, field.name), getattr(other, field.name)
        assert (a is None) == (b is None), field.name
        if isinstance(a, Tensor):
            np.testing.assert_allclose(a.double(), b.double(), rtol=1e-5, atol=1e-7, err_msg=field.name)


# ---- against the engine


@pytest.mark.parametrize("params", slow_but([{}, TRUNCATED], SETTINGS), ids=str)
def test_log_probs_are_those_that_the_engine_reports(policy: Policy, params: dict[str, Any]) -> None:
    answers = sampled(policy, **params)
    reference = ModelReference(policy)
    block = reference.block(answers, SamplingParams(**params))
    assert block.reported is not None and len(block) == sum(len(a.token_ids) for a in answers)
    assert (block.logprobs - block.reported).abs().max() < 1e-4
    assert (block.probs.sum(1) - 1).abs().max() < 1e-12
    assert torch.equal(block.cells, block.tokens) and block.stops == (STOP,)
    assert (block.probs.gather(1, block.cells[:, None])[:, 0].log() - block.logprobs).abs().max() < 1e-12
    assert (block.raw is not None) == bool(params)
    for name, value in params.items():  # another claim is seen
        other = {**params, name: {"top_k": 2, "repetition_penalty": 2.0}.get(name, value * 0.5)}
        off = reference.block(answers, SamplingParams(**other))
        assert (off.logprobs - block.reported).abs().max() > 1e-2, name


def test_the_first_draft_and_the_row_before(policy: Policy) -> None:
    drawn: list[Tensor] = []

    class Seen(WhiteBox):
        def update(self, tokens: Tensor, q: Tensor | None, *rest: Any, **more: Any) -> None:
            assert q is not None
            drawn.append(q[0, 0])
            super().update(tokens, q, *rest, **more)

    answers = [sampled(policy, Seen(), count=1, temperature=1.5)[0]]
    prompt = dataclasses.replace(answers[0], prompt=(4, *answers[0].prompt))
    params = SamplingParams(temperature=1.5)
    block = ModelReference(policy).block(answers, params)
    assert block.draft is not None and block.before is not None and block.cycle is not None
    first = (block.cycle == 0) & (block.position > 0)
    own = torch.stack(drawn)[1:].double()
    assert (block.draft[first] - own).abs().max() < 1e-4 and len(own) >= 5
    assert (block.before[1:] - block.probs[:-1]).abs().max() < 1e-6
    # Before the first token of a text is nothing; of a longer prompt there is a row.
    assert torch.equal(block.before[0], block.probs[0]) and torch.equal(block.draft[0], block.probs[0])
    longer = ModelReference(policy).block([prompt], params)
    assert longer.before is not None and (longer.before[0] - longer.probs[0]).abs().max() > 1e-3


def test_fields_about_the_text(policy: Policy, answers: list[Answer]) -> None:
    block = ModelReference(policy).block(answers, SamplingParams())
    n = 0
    assert block.seen is not None and block.twin is not None
    for answer in answers:
        text = [*answer.prompt, *answer.token_ids.tolist()]
        for t in range(len(answer.token_ids)):
            end = len(answer.prompt) + t
            assert set(block.seen[n].nonzero()[:, 0].tolist()) == set(text[:end]) and block.last[n] == text[end - 1]
            n += 1
    assert n == len(block) and (block.twin >= 0).any()


def test_a_model_without_a_head_has_no_guess_at_drafts(policy: Policy, answers: list[Answer]) -> None:
    block = ModelReference(dataclasses.replace(policy, mtp=None)).block(answers, SamplingParams())
    assert block.draft is None
    same(dataclasses.replace(ModelReference(policy).block(answers, SamplingParams()), draft=None), block)


# ---- the processing, written a third time


def slowly(logits: list[float], params: SamplingParams, written: set[int]) -> list[float]:
    """Token by token."""
    z = list(logits)
    for v in written:
        z[v] = z[v] / params.repetition_penalty if z[v] > 0 else z[v] * params.repetition_penalty
    weights = [math.exp(x / params.temperature) for x in z]
    ranked = sorted(range(len(z)), key=lambda v: -weights[v])
    kept = ranked[: params.top_k or None]
    total, before, inside = sum(weights[v] for v in kept), 0.0, []
    for v in kept:
        if before < params.top_p:
            inside.append(v)
        before += weights[v] / total
    inside = [v for v in inside if weights[v] >= params.min_p * weights[ranked[0]]]
    total = sum(weights[v] for v in inside)
    return [weights[v] / total if v in inside else 0.0 for v in range(len(z))]


@pytest.mark.parametrize("seed", range(8))
def test_processing_is_what_it_says(seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(3, 20, generator=numbers, dtype=torch.float64)
    written = torch.rand(3, 20, generator=numbers) < 0.4
    params = SamplingParams(temperature=1.3, top_k=12, top_p=0.85, min_p=0.04, repetition_penalty=1.4)
    found = processed(logits, params, written)
    wanted = [slowly(z.tolist(), params, set(w.nonzero()[:, 0].tolist())) for z, w in zip(logits, written, strict=True)]
    assert (found - torch.tensor(wanted, dtype=torch.float64)).abs().max() < 1e-12
    other = processed(logits, dataclasses.replace(params, repetition_penalty=1.0), written)
    assert (other - found).abs().max() > 1e-3


def test_a_token_at_the_border_is_kept_and_log_probs_beside_it_are_not_compared() -> None:
    """A right engine may keep it or not, and reports log-probs of what it kept."""
    logits = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    cases = [(logits, SamplingParams(top_p=0.8 + apart), 3, True) for apart in (-1e-5, 1e-5)]
    cases += [(logits, SamplingParams(top_p=0.8 - 1e-3), 2, False)]
    cases += [(logits, SamplingParams(min_p=0.4 + apart), 3, True) for apart in (-1e-5, 1e-5)]
    cases += [(logits, SamplingParams(min_p=0.4 + 1e-3), 2, False)]
    for apart, kept in ((1e-5, 3), (1e-3, 2)):  # rounding may have swapped two tokens that are as likely
        near = torch.tensor([[2.0, 1.0, 1.0 - apart]], dtype=torch.float64)
        cases += [(near, cut, kept, kept == 3) for cut in (SamplingParams(top_k=2), SamplingParams(top_p=0.7))]
    for rows, params, kept, unsure in cases:
        found, near = claimed(rows, params)
        assert (found > 0).sum() == kept and near.tolist() == [unsure], params
        served, _, too = served_reference.processed(rows.log_softmax(-1), params, 3)
        assert (served > 0).sum() == kept and too.tolist() == [unsure], params


# ---- bounded memory


def test_pieces_and_passes_change_nothing(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, params = sampled(policy, **TRUNCATED), SamplingParams(**TRUNCATED)
    whole = ModelReference(policy).block(answers, params)
    monkeypatch.setattr(model_reference, "ELEMENTS", 3 * VOCABULARY)
    monkeypatch.setattr(model_reference, "TOKENS", 40)
    assert 1 < len(model_reference._passes(answers)) < len(answers)
    same(ModelReference(policy).block(answers, params), whole)


def test_of_a_large_vocabulary_the_likeliest_tokens_have_columns(policy: Policy) -> None:
    answers, params = sampled(policy, temperature=1.5), SamplingParams(temperature=1.5)
    whole = ModelReference(policy).block(answers, params)
    block = ModelReference(policy, columns=6).block(answers, params)
    assert block.ids is not None and block.ids.shape == block.probs.shape == (len(block), 6)
    assert (block.ids[:, -1] == -1).all() and (block.ids[:, :-1] >= 0).all()
    for name in ("probs", "before", "raw", "draft"):
        narrow, wide = getattr(block, name), getattr(whole, name)
        assert (narrow[:, :-1] - wide.gather(1, block.ids[:, :-1])).abs().max() < 1e-9
        assert (narrow.sum(1) - 1).abs().max() < 1e-9
    assert torch.equal(block.logprobs, whole.logprobs)
    own = block.ids.gather(1, block.cells[:, None])[:, 0]
    others = own == -1
    assert torch.equal(own[~others], block.tokens[~others]) and 0 < others.sum() < len(block)
    assert not (block.ids[others] == block.tokens[others, None]).any()
    assert block.seen is not None and not block.seen[:, -1].any()
    assert block.probs[:, :-1].sum(1).mean() > 0.8, "the likeliest"


# ---- what is refused, and what is not there


def test_greedy_answers_and_none_at_all(policy: Policy, answers: list[Answer]) -> None:
    with pytest.raises(ValueError, match="temperature above 0"):
        ModelReference(policy).block(answers, SamplingParams(temperature=0.0))
    nothing = dataclasses.replace(answers[0], token_ids=np.zeros(0, np.int64), logprobs=None, cycles=None)
    empty = ModelReference(policy).block([nothing], SamplingParams())
    assert len(empty) == 0 and empty.probs.shape == (0, VOCABULARY)
    some = answers
    same(
        ModelReference(policy).block([*some, nothing], SamplingParams()),
        ModelReference(policy).block(some, SamplingParams()),
    )


def test_what_it_says_of_itself_follows_the_weights() -> None:
    one, other = (ModelReference(tiny_policy(VOCABULARY, seed=seed)).describe() for seed in (0, 1))
    assert one["target"] != other["target"] and one["dtype"] == "float32" and one["columns"] == VOCABULARY
