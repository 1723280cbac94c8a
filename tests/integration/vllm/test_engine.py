"""Sampled drafts and rejection sampling: log-probs, statistics, aborts, weights. One engine for all."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest
import torch

from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import chain
from bebop.rollout.engine import EngineDied, Request
from bebop.rollout.served_engine import Part, ServedEngine
from bebop.rollout.vllm.core import _Answer
from bebop.rollout.vllm.plugin import Verified
from bebop.trajectory import Completion, DecodeStats, SamplingParams
from tests.integration.vllm.builders import core, engine, with_update
from tests.served_models import (
    DRAFTS,
    PROMPT,
    answers,
    ask,
    checkpoint,
    collect,
    embedded,
    job,
    logprobs,
    policy,
    reload,
)

WORDS = (4, 5, 6, 7) * 26  # four blocks of keys and values, the last of which a head's cache never shares
ANSWERS = 2048  # whose acceptance by place has standard errors of .002 and .004


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy's checkpoint."""
    return checkpoint(tmp_path_factory.mktemp("other"), seed=1)


@pytest.fixture(scope="module")
def vllm(folder: Path) -> Iterator[ServedEngine]:
    with engine(job(folder)) as found:
        yield found


@pytest.fixture
def fresh(vllm: ServedEngine, folder: Path) -> Iterator[ServedEngine]:
    """The engine with the weights that it started with, before and after."""
    yield vllm
    vllm.abort()
    with_update(vllm, recompute=False)
    vllm.load_weights(reload(folder).weights(mtp=True), 0)


def stats(found: list[Completion]) -> DecodeStats:
    return sum((c.stats for c in found), DecodeStats())


@pytest.mark.smoke("engine", "drafts")
def test_greedy_answers_are_those_of_plain_decoding(vllm: ServedEngine, folder: Path) -> None:
    plain = answers(embedded(folder, "autoregressive"), ask(2, 24, temperature=0.0))
    drafted = answers(vllm, ask(2, 24, temperature=0.0))
    assert [c.token_ids.tolist() for c in drafted] == [c.token_ids.tolist() for c in plain]
    assert all(not c.logprobs.any() and c.finish_reason == "length" for c in drafted)


@pytest.mark.smoke("engine", "drafts")
def test_logprobs_are_those_of_the_distribution(vllm: ServedEngine, folder: Path) -> None:
    for temperature in (1.0, 0.7):
        for found in answers(vllm, ask(4, 20, temperature)):
            wanted = logprobs(folder, PROMPT, found.token_ids.tolist(), temperature)
            np.testing.assert_allclose(found.logprobs, wanted, atol=1e-4)
            assert found.versions.tolist() == [0] * 20 and found.exact
    hotter = logprobs(folder, PROMPT, found.token_ids.tolist(), 1.0)
    assert np.abs(found.logprobs - hotter).max() > 1e-2  # the test would notice another temperature


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


@pytest.mark.smoke("engine", "drafts")
def test_acceptance_is_the_embedded_engines(vllm: ServedEngine, folder: Path) -> None:
    """By place, and its mean overlap says the same."""
    ours = stats(answers(embedded(folder), ask(ANSWERS, 40)))
    theirs = stats(answers(vllm, ask(ANSWERS, 40)))
    rates = [one.accepted / one.reached for one in (ours, theirs)]
    assert np.abs(rates[0] - rates[1]).max() < 0.03
    assert np.abs(theirs.overlap / theirs.reached - rates[1]).max() < 0.02
    for name in ("draft_entropy", "target_entropy", "target_only"):
        assert np.abs(getattr(ours, name) / ours.reached - getattr(theirs, name) / theirs.reached).max() < 0.06, name
    assert theirs.tokens == ANSWERS * 40 and theirs.prefilled == ANSWERS
    assert theirs.draft_forwards == DRAFTS * theirs.cycles
    assert 0 <= theirs.cycles + theirs.accepted.sum() - theirs.emitted <= ANSWERS  # an answer's last cycle may be cut


@pytest.mark.smoke("drafts")
def test_measures_are_those_of_the_request_and_its_cycle(vllm: ServedEngine, folder: Path) -> None:
    """Recomputed from the text: requests of other temperatures and lengths beside one another."""
    one, seen = core(vllm), list[tuple[_Answer, int, Verified]]()
    take = one._take

    def recording(answer: _Answer, given: Any, verified: Verified | None) -> None:
        if verified is not None:
            seen.append((answer, len(answer.token_ids), verified))
        take(answer, given, verified)

    params = [SamplingParams(max_new_tokens=20 + i, temperature=(1.0, 0.6)[i % 2]) for i in range(16)]
    requests = [Request(id=i, token_ids=(*PROMPT, *range(i % 4)), params=p) for i, p in enumerate(params)]
    one._take = recording  # type: ignore[method-assign]
    try:
        found = answers(vllm, requests)
    finally:
        one._take = take  # type: ignore[method-assign]
    by_text = {tuple(c.token_ids.tolist()): request for c, request in zip(found, requests, strict=True)}
    assert len(seen) > 100 and len(by_text) == len(found)
    own = reload(folder)
    for answer, before, verified in seen:
        request = by_text[tuple(answer.token_ids)]
        measured = cycle(own, request, answer.token_ids[:before])
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
    params = [SamplingParams(max_new_tokens=40, stop_token_ids=(2, 5), seed=i) for i in range(200)]
    found = answers(vllm, [Request(id=i, token_ids=PROMPT, params=p) for i, p in enumerate(params)])
    ended = [c for c in found if c.finish_reason == "stop"]
    assert len(ended) > 150 and all(c.token_ids[-1] in (2, 5) and not set(c.token_ids[:-1]) & {2, 5} for c in ended)
    whole = stats(found)
    assert whole.tokens == sum(len(c.token_ids) for c in found)
    cut = whole.cycles + whole.accepted.sum() - whole.emitted
    assert cut > 0 and all(c.stats.emitted >= c.stats.accepted.sum() for c in found)


@pytest.mark.smoke("engine", "update")
def test_partial_answers_come_back_whole_and_go_on(fresh: ServedEngine, folder: Path) -> None:
    """vLLM's own ``abort_request`` gives nothing back."""
    for request in ask(4, 60):
        fresh.add(request)
    with held(fresh, 20):
        partial = {one.id: one.completion for one in fresh.abort()}
    assert sorted(partial) == [0, 1, 2, 3]
    assert fresh.unfinished == 0 and not core(fresh).engine.has_unfinished_requests()
    assert all(c.finish_reason == "abort" and 0 < len(c.token_ids) < 60 for c in partial.values())
    for request in ask(4, 60):
        fresh.add(dataclasses.replace(request, partial=partial[request.id]))
    for i, found in enumerate(collect(fresh, 4)):
        before = partial[i].token_ids
        assert len(found.token_ids) == 60 and np.array_equal(found.token_ids[: len(before)], before)
        np.testing.assert_allclose(found.logprobs, logprobs(folder, PROMPT, found.token_ids.tolist()), atol=1e-4)


@contextmanager
def held(engine: ServedEngine, tokens: int) -> Iterator[None]:
    """Once an answer has so many tokens, or more, nothing is decoded until the block ends."""
    one, reached = core(engine), Event()
    step = one.step

    def hold() -> list[tuple[str, Part]]:
        longest = max((len(answer.token_ids) for answer in one._open.values()), default=0)
        if longest < tokens and not reached.is_set():
            return step()
        reached.set()
        time.sleep(0.005)
        return []

    one.step = hold  # type: ignore[method-assign]
    try:
        assert reached.wait(60)
        yield
    finally:
        one.step = step  # type: ignore[method-assign]


@pytest.mark.smoke("update")
@pytest.mark.parametrize("recompute", [False, True])
def test_weights_change_in_flight(recompute: bool, fresh: ServedEngine, folder: Path, other: Path) -> None:
    """Each token has the log-prob of its own version: exactly so where keys and values are computed again, and of the
    first tokens in any case."""
    with_update(fresh, recompute)
    for request in ask(6, 60):
        fresh.add(request)
    with held(fresh, 15):
        fresh.load_weights(reload(other).weights(mtp=True), 7)
    for found in collect(fresh, 6):
        ids, versions = found.token_ids.tolist(), found.versions
        new = versions == 7
        assert set(versions.tolist()) == {0, 7} and (np.diff(versions) >= 0).all()
        old, changed = logprobs(folder, PROMPT, ids), logprobs(other, PROMPT, ids)
        np.testing.assert_allclose(found.logprobs[~new], old[~new], atol=1e-4)
        assert np.abs(found.logprobs[new] - old[new]).max() > 0.1
        if recompute:
            np.testing.assert_allclose(found.logprobs[new], changed[new], atol=1e-4)
            assert np.array_equal(found.oldest, versions)
        else:
            assert not found.oldest.any() and np.abs(found.logprobs[new] - changed[new]).max() > 1e-4


def test_keys_and_values_of_old_weights_are_not_found_again(fresh: ServedEngine, folder: Path, other: Path) -> None:
    """vLLM's prefix cache does not know of weights; where its salt stays, this test fails."""
    long = Request(id=0, token_ids=WORDS, params=SamplingParams(max_new_tokens=8))
    answers(fresh, [long])
    fresh.load_weights(reload(other).weights(mtp=True), 1)
    (found,) = answers(fresh, [long])
    np.testing.assert_allclose(found.logprobs, logprobs(other, WORDS, found.token_ids.tolist()), atol=1e-4)
    fresh.load_weights(reload(folder).weights(mtp=True), 2)
    core(fresh)._salt = "the same"
    answers(fresh, [long])
    fresh.load_weights(reload(other).weights(mtp=True), 3)
    core(fresh)._salt = "the same"
    (stale,) = answers(fresh, [long])
    assert np.abs(stale.logprobs - logprobs(other, WORDS, stale.token_ids.tolist())).max() > 1e-2


def test_what_was_not_sent_must_not_change_and_what_was_must(fresh: ServedEngine, folder: Path, other: Path) -> None:
    """Broken carriers: one that loads the draft's weights beside the target's, one that loads nothing."""
    server = core(fresh)
    own, load = reload(other).weights(mtp=True), server.load
    target = {n: t for n, t in own.items() if n.startswith("backbone.")}

    def meddling(role: str, place: object) -> None:
        load(role, place)  # type: ignore[arg-type]
        worker = server.engine.model_executor.driver_worker.worker
        with torch.no_grad():
            next(p for n, p in worker.model_runner.get_draft_model().named_parameters() if "norm" in n).add_(1)

    server.load = meddling  # type: ignore[method-assign]
    with pytest.raises(EngineDied, match="not for the draft"):
        fresh.load_weights(target, 1)
    server.load = load  # type: ignore[method-assign]
    fresh.server._why = None  # type: ignore[attr-defined]
    fresh.server._watch.begin(server.checksums(), {})  # type: ignore[attr-defined]
    fresh.load_weights(own, 2)
    server.load = lambda role, place: None  # type: ignore[method-assign]
    with pytest.raises(EngineDied, match="target was sent and did not arrive"):
        fresh.load_weights(reload(folder).weights(mtp=True), 3)
    server.load = load  # type: ignore[method-assign]


def test_part_of_a_model_is_refused(fresh: ServedEngine, folder: Path) -> None:
    own = reload(folder).weights()
    own.pop("backbone.model.layers.0.mlp.up_proj.weight")
    with pytest.raises(UserError, match=r"version 5 has .* lacks 'model.layers.0.mlp.up_proj.weight': vLLM takes"):
        fresh.load_weights(own, 5)
    assert answers(fresh, ask(1, 4))[0].versions.tolist() != [5] * 4


def test_policies_differ(folder: Path, other: Path) -> None:
    assert not torch.equal(
        policy(0).weights()["backbone.lm_head.weight"], policy(1).weights()["backbone.lm_head.weight"]
    )
