"""Sampled drafts and rejection sampling: log-probs, statistics, aborts, weights. One engine for all."""

import dataclasses
from pathlib import Path

import numpy as np
import torch

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import chain
from bebop.rollout.engine import Request
from bebop.rollout.served_engine import ServedEngine
from bebop.trajectory import Completion, DecodeStats, SamplingParams
from tests.integration.vllm.builders import RUNNER, core, fewer, held, verified_cycles
from tests.served_models import (
    DRAFTS,
    PROMPT,
    answers,
    ask,
    collect,
    embedded,
    greedy_test,
    logprobs,
    logprobs_test,
    reload,
)

# Whose acceptance by place has standard errors of .002 and .004; with the second runner of .012 and .025.
ANSWERS, TOKENS = fewer(2048, 64), fewer(40, 30)
WIDER = fewer(1, 4)


def stats(found: list[Completion]) -> DecodeStats:
    return DecodeStats.total(c.stats for c in found)


def test_greedy_answers_are_those_of_plain_decoding(vllm: ServedEngine, folder: Path) -> None:
    greedy_test(vllm, folder)


def test_logprobs_are_those_of_the_distribution(vllm: ServedEngine, folder: Path) -> None:
    logprobs_test(vllm, folder)


def test_truncated_logprobs_are_those_of_what_is_left(vllm: ServedEngine, folder: Path) -> None:
    """Beside drafts, with requests of other settings in the same step."""
    params = [SamplingParams(max_new_tokens=12), SamplingParams(max_new_tokens=12, top_k=3)]
    params.append(SamplingParams(max_new_tokens=12, top_p=0.6, temperature=0.8))
    requests = [Request(id=i, token_ids=PROMPT, params=params[i % 3]) for i in range(12)]
    one = embedded(folder)
    for request, found in zip(requests, answers(vllm, requests), strict=True):
        for place in (0, 5, 11):
            context = (*request.token_ids, *found.token_ids[:place].tolist())
            seen = {}
            again = [dataclasses.replace(request, id=i, token_ids=context, params=_one(request, i)) for i in range(64)]
            for c in answers(one, again):
                seen[int(c.token_ids[0])] = float(c.logprobs[0])
            token = int(found.token_ids[place])
            if token in seen:
                assert abs(seen[token] - found.logprobs[place]) < 1e-4


def _one(request: Request, seed: int) -> SamplingParams:
    return dataclasses.replace(request.params, max_new_tokens=1, seed=seed)


def test_acceptance_is_the_embedded_engines(vllm: ServedEngine, folder: Path) -> None:
    """By place, and its mean overlap says the same."""
    ours = stats(answers(embedded(folder), ask(2048, TOKENS)))
    theirs = stats(answers(vllm, ask(ANSWERS, TOKENS)))
    rates = [one.accepted / one.reached for one in (ours, theirs)]
    assert np.abs(rates[0] - rates[1]).max() < 0.03 * WIDER
    assert np.abs(theirs.overlap / theirs.reached - rates[1]).max() < 0.02 * WIDER
    for name in ("draft_entropy", "target_entropy", "target_only"):
        assert (
            np.abs(getattr(ours, name) / ours.reached - getattr(theirs, name) / theirs.reached).max() < 0.06 * WIDER
        ), name
    assert theirs.tokens == ANSWERS * TOKENS and theirs.prefilled == ANSWERS
    assert theirs.draft_forwards == DRAFTS * theirs.cycles
    assert 0 <= theirs.cycles + theirs.accepted.sum() - theirs.emitted <= ANSWERS  # an answer's last cycle may be cut


def test_measures_are_those_of_the_request_and_its_cycle(vllm: ServedEngine, folder: Path) -> None:
    """Recomputed from the text: requests of other temperatures and lengths beside one another."""
    params = [SamplingParams(max_new_tokens=20 + i, temperature=(1.0, 0.6)[i % 2]) for i in range(16)]
    requests = [Request(id=i, token_ids=(*PROMPT, *range(i % 4)), params=p) for i, p in enumerate(params)]
    seen, own = verified_cycles(vllm, requests), reload(folder)
    assert len(seen) > 100
    for request, written, verified in seen:
        measured = cycle(own, request, written)
        assert verified.weight == 1 and abs(verified.measured["overlap"][0] - measured["overlap"]) < 1e-4
        for name, value in measured.items():
            assert abs(verified.measured[name][0] - value) < 1e-3, name


def cycle(own: Policy, request: Request, written: list[int]) -> dict[str, float]:
    """Measures of the first place of the cycle behind a text, as the head and the backbone compute it at once."""
    text = torch.tensor([[*request.token_ids, *written]])
    anchor = torch.tensor([[text.shape[1] - 2]])
    with torch.no_grad():
        hidden = own.hidden(text, torch.arange(text.shape[1])[None], CausalContext())
        embeddings = own.backbone.get_decoder().embed_tokens(text)
        (drafted,) = chain(own.mtp, embeddings, hidden, 1, anchor)
        logits = [own.backbone.lm_head(one) for one in (drafted[0, 0], hidden[0, -1])]
        q, p = ((one / request.params.temperature).softmax(-1) for one in logits)
    return {
        "overlap": float(torch.minimum(q, p).sum()),
        "target_entropy": float(-(p * p.log()).sum()),
        "draft_entropy": float(-(q * q.log()).sum()),
        "target_only": float(p[q.argmax()]),
    }


def test_an_end_cuts_off_what_was_accepted_behind_it(vllm: ServedEngine) -> None:
    count = fewer(200, 48)
    params = [SamplingParams(max_new_tokens=40, stop_token_ids=(2, 5), seed=i) for i in range(count)]
    found = answers(vllm, [Request(id=i, token_ids=PROMPT, params=p) for i, p in enumerate(params)])
    ended = [c for c in found if c.finish_reason == "stop"]
    assert len(ended) > 0.75 * count and all(
        c.token_ids[-1] in (2, 5) and not set(c.token_ids[:-1]) & {2, 5} for c in ended
    )
    whole = stats(found)
    assert whole.tokens == sum(len(c.token_ids) for c in found)
    cut = whole.cycles + whole.accepted.sum() - whole.emitted
    assert cut > 0 and all(c.stats.emitted >= c.stats.accepted.sum() for c in found)


def test_partial_answers_come_back_whole_and_go_on(vllm: ServedEngine, folder: Path) -> None:
    """vLLM's own ``abort_request`` gives nothing back."""
    for request in ask(4, 60):
        vllm.add(request)
    with held(vllm, 20):
        partial = {one.id: one.completion for one in vllm.abort()}
    assert sorted(partial) == [0, 1, 2, 3]
    assert vllm.unfinished == 0 and not core(vllm).engine.has_unfinished_requests()
    assert all(c.finish_reason == "abort" and 0 < len(c.token_ids) < 60 for c in partial.values())
    for request in ask(4, 60):
        vllm.add(dataclasses.replace(request, partial=partial[request.id]))
    for i, found in enumerate(collect(vllm, 4)):
        before = partial[i].token_ids
        assert len(found.token_ids) == 60 and np.array_equal(found.token_ids[: len(before)], before)
        np.testing.assert_allclose(found.logprobs, logprobs(folder, PROMPT, found.token_ids.tolist()), atol=1e-4)


def test_steps_follow_one_another_without_a_wait(vllm: ServedEngine) -> None:
    """The second runner launches a step before the tokens of the one before are out, and only a plain one waits."""
    scheduled = core(vllm).engine.vllm_config.scheduler_config.async_scheduling
    runner = type(core(vllm).engine.model_executor.driver_worker.worker.model_runner).__module__
    assert scheduled is (RUNNER == "v2") and ("v1.worker.cpu.model_runner" in runner) is (RUNNER == "v2")
