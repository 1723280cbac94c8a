"""Sampled drafts and rejection sampling: the distribution, log-probs, statistics, aborts, weights. One engine for
all."""

import dataclasses
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bebop.adaptation.probe import probe
from bebop.rollout.engine import EngineDied, Request
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.sglang.engine import SglangServer
from bebop.trainer.chains import TokenRow
from bebop.trainer.objectives import Sampling
from bebop.trajectory import VERDICTS, Completion, DecodeStats, SamplingParams
from tests.integration.sglang.builders import engine, raw, with_pause
from tests.served_models import (
    DRAFTS,
    PROMPT,
    VOCAB,
    answers,
    ask,
    ask_many,
    checkpoint,
    collect,
    distribution,
    embedded,
    greedy_test,
    job,
    logprobs,
    logprobs_test,
    policy,
    reload,
    tokens_distribution_test,
)


@pytest.fixture(scope="module")
def sglang(folder: Path) -> Iterator[ServedEngine]:
    with engine(job(folder)) as found:
        yield found


def half_of(engine: ServedEngine, requests: list[Request]) -> float:
    """Seconds after which such requests are half done, on this machine as it is now."""
    began = time.monotonic()
    answers(engine, requests)
    return (time.monotonic() - began) / 2


@pytest.fixture
def fresh(sglang: ServedEngine, folder: Path) -> Iterator[ServedEngine]:
    """The engine with the weights that it started with, before and after."""
    yield sglang
    with_pause(sglang, "in_place")
    sglang.load_weights(reload(folder).weights(mtp=True), 0)


def test_greedy_answers_are_those_of_plain_decoding(sglang: ServedEngine, folder: Path) -> None:
    """``test_plain`` compares SGLang's plain decoding with the same completions of the embedded engine."""
    greedy_test(sglang, folder)


def test_logprobs_are_those_of_the_distribution(sglang: ServedEngine, folder: Path) -> None:
    logprobs_test(sglang, folder)


def test_a_later_turn_finds_the_keys_and_values_of_the_one_before(fresh: ServedEngine, folder: Path) -> None:
    """By its tokens, whoever asks; one changed token is a miss from there on, and new weights know nothing of it."""

    def turn(context: tuple[int, ...], answer: int = 2) -> tuple[list[int], int]:
        output = raw(fresh, ask(1, answer, prompt=context)[0])
        wanted = logprobs(folder, context, output["output_ids"])
        given = [entry[0] for entry in output["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(given, wanted, atol=1e-4)  # what is kept is what would be computed
        return output["output_ids"], int(output["meta_info"]["cached_tokens"])

    first = tuple(range(1, 9)) * 2
    answer, _ = turn(first, 8)
    history = (*first, *answer, 7, 2, 9)  # with what an environment says
    _, kept = turn(history)
    read = len(first) + len(answer)
    assert read - 2 <= kept <= read, "all but what is never fed: the last token, and a pair that it begins"
    changed = (*history[:5], history[5] % 8 + 1, *history[6:])
    assert turn(changed)[1] <= 5
    fresh.load_weights(reload(folder).weights(mtp=True), 0)
    assert turn(history)[1] == 0


def test_statistics_are_those_of_the_logits(sglang: ServedEngine, folder: Path) -> None:
    """A reached position's draft distribution follows from the text alone, since the drafts before it were accepted."""
    model, compared = reload(folder), 0
    for _ in range(4):
        output = raw(sglang, ask(1, 24)[0])
        ids, entries = output["output_ids"], output["meta_info"]["bebop_verify"]
        assert len(entries) == output["meta_info"]["spec_verify_ct"]
        found = probe(model, [TokenRow(prompt=PROMPT, answer=tuple(ids))], DRAFTS, Sampling())
        at = {int(place): i for i, place in enumerate(found.place)}
        place = 1  # the first token is the prefill's
        for entry in entries:
            for k in range(min(entry["accepted"] + 1, DRAFTS)):
                for name in ("overlap", "target_only", "draft_entropy", "target_entropy"):
                    wanted = found.numbers[name][at[place], k] if place in at else np.nan
                    if np.isfinite(wanted):
                        assert abs(entry[name][k] - wanted) < 1e-3, (name, k)
                        compared += 1
            place += entry["accepted"] + 1
    assert compared > 100


def test_a_trace_is_that_of_the_model(sglang: ServedEngine, folder: Path) -> None:
    """Beside requests that have none; p by transformers, verdicts against SGLang's own counts."""
    asked = [dataclasses.replace(request, trace=request.id % 2 == 0) for request in ask(4, 24, 0.7)]
    found = answers(sglang, asked)
    assert [answer.trace is None for answer in found] == [False, True, False, True]
    for answer in found[::2]:
        trace, ids = answer.trace, answer.token_ids.tolist()
        assert trace is not None and len(trace) == 24 and trace.cycles.max() + 1 == answer.stats.cycles
        counts = {name: int((trace.verdicts == i).sum()) for i, name in enumerate(VERDICTS)}
        assert counts["unknown"] == 0 and counts["plain"] == 1 and counts["recovered"] > 0
        beyond = answer.stats.accepted.sum() - counts["accepted"]  # SGLang counts on where the answer has ended
        assert 0 <= beyond <= DRAFTS
        beyond = answer.stats.overlap.sum() - np.nansum(trace.overlap, dtype=np.float64)
        assert -1e-5 <= beyond <= DRAFTS  # a trace has float32
        for t in range(1, 24):
            every = distribution(folder, (*PROMPT, *ids[:t]), 0.7)
            np.testing.assert_allclose(trace.target_top[t], every[trace.target_ids[t]], atol=2e-3)
            if trace.drafts[t] >= 0:
                np.testing.assert_allclose(trace.draft_target_probs[t], every[trace.drafts[t]], atol=1e-4)
            if VERDICTS[trace.verdicts[t]] == "accepted":
                assert trace.drafts[t] == ids[t]


def test_acceptance_agrees_with_the_embedded_engine(sglang: ServedEngine, folder: Path) -> None:
    theirs, own = (
        DecodeStats.total(c.stats for c in answers(found, ask(40, 16))) for found in (sglang, embedded(folder))
    )
    for k in range(DRAFTS):
        rates = [stats.accepted[k] / stats.reached[k] for stats in (theirs, own)]
        error = np.sqrt(sum(r * (1 - r) / s.reached[k] for r, s in zip(rates, (theirs, own), strict=True)))
        assert abs(rates[0] - rates[1]) < 4 * error, (k, rates, theirs, own)
        overlaps = [stats.overlap[k] / stats.reached[k] for stats in (theirs, own)]
        assert abs(overlaps[0] - overlaps[1]) < 4 * error, (k, overlaps)


def test_the_distribution_of_tokens(sglang: ServedEngine, folder: Path) -> None:
    """Two tokens end after one verification; the third is a bonus, a second draft, or from the next cycle."""
    found = ask_many(sglang, {2: 30, 3: 10})
    assert len(found) == 2000 and sum(float(c.stats.accepted.sum()) for c in found) > 100
    tokens_distribution_test(found, folder)


def test_an_aborted_answer_goes_on(sglang: ServedEngine) -> None:
    whole = answers(sglang, ask(1, 40, temperature=0.0))[0]
    request = ask(1, 40, temperature=0.0)[0]
    half = half_of(sglang, [request])
    sglang.add(request)
    time.sleep(half)
    (cut,) = sglang.abort()
    assert sglang.unfinished == 0 and cut.completion.finish_reason in ("abort", "length")
    assert 0 < len(cut.completion.token_ids) <= 40
    resumed = Request(id=0, token_ids=PROMPT, params=request.params, partial=cut.completion)
    assert answers(sglang, [resumed])[0].token_ids.tolist() == whole.token_ids.tolist()
    sglang.add(request)
    (queued,) = sglang.abort([0])  # at once: perhaps before SGLang has seen it
    assert len(queued.completion.token_ids) < 40


def test_no_completion_goes_on_behind_its_end(sglang: ServedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang lets an aborted request take one more step, and does not look for its end there."""
    assert isinstance(sglang.server, SglangServer)
    own, told = sglang.server.backend.generate, list[dict[str, Any]]()

    async def generate(payload: Mapping[str, Any]) -> dict[str, Any]:
        told.append(await own(payload))
        return told[-1]

    monkeypatch.setattr(sglang.server.backend, "generate", generate)
    stop, limit = VOCAB - 1, 12
    params = SamplingParams(max_new_tokens=limit, stop_token_ids=(stop,))
    half = half_of(sglang, ask(24, limit))
    done: list[Completion] = []
    for first in range(0, 96, 24):
        waiting = [Request(id=first + i, token_ids=PROMPT, params=params) for i in range(24)]
        while waiting:
            asked = {request.id: request for request in waiting}
            for request in waiting:
                sglang.add(request)
            time.sleep(half / 2)  # they end by themselves, too
            ended = {one.id: one.completion for one in sglang.abort()}
            done += [one for one in ended.values() if one.finish_reason != "abort"]
            waiting = [
                dataclasses.replace(asked[id], partial=one if len(one.token_ids) else None)
                for id, one in ended.items()
                if one.finish_reason == "abort"
            ]
    assert len(done) == 96
    for one in done:
        ids = one.token_ids.tolist()
        assert stop not in ids[:-1] and len(ids) <= limit, ids
        assert one.finish_reason == ("stop" if ids[-1] == stop else "length")
    cut = [output["output_ids"] for output in told if output["meta_info"]["finish_reason"]["type"] == "abort"]
    assert any(stop in ids for ids in cut), "SGLang cut them itself: end_of_cut is not needed any more"


@pytest.mark.parametrize("pause", ["in_place", "retract", "abort"])
def test_the_target_changes_under_running_answers(
    fresh: ServedEngine, folder: Path, tmp_path: Path, pause: str
) -> None:
    other = checkpoint(tmp_path / "other", seed=5)
    with_pause(fresh, pause)
    half = half_of(fresh, ask(3, 30))
    for request in ask(3, 30):
        fresh.add(request)
    time.sleep(half)
    head = fresh.head
    fresh.load_weights({n: t for n, t in policy(5).weights().items()}, 3)
    found = collect(fresh, 3)
    assert fresh.head == head and fresh.version == 3
    for answer in found:
        ids, versions = answer.token_ids.tolist(), answer.versions
        assert len(ids) == 30 and set(versions.tolist()) <= {0, 3} and (np.diff(versions) >= 0).all()
        before = versions == 0
        np.testing.assert_allclose(answer.logprobs[before], logprobs(folder, PROMPT, ids)[before], atol=1e-4)
        new = logprobs(other, PROMPT, ids)
        if pause != "in_place" and not before.all():  # keys and values were computed again
            np.testing.assert_allclose(answer.logprobs[~before], new[~before], atol=1e-4)
    assert any((answer.versions == 3).any() and (answer.versions == 0).any() for answer in found)
    late = answers(fresh, ask(2, 8))
    for answer in late:  # no keys and values of old weights are reused, whatever the pause
        np.testing.assert_allclose(answer.logprobs, logprobs(other, PROMPT, answer.token_ids.tolist()), atol=1e-4)


def test_the_heads_change_alone_and_with_the_target(fresh: ServedEngine, folder: Path, tmp_path: Path) -> None:
    head = fresh.head
    other = policy(7)
    assert other.mtp is not None
    heads = {f"mtp.{name}": tensor for name, tensor in other.mtp.named_parameters()}
    fresh.load_weights(heads, 1)
    assert fresh.head != head
    mixed = reload(folder)
    mixed.mtp = other.mtp
    assert_statistics(fresh, mixed)
    fresh.load_weights(other.weights(mtp=True), 2)
    assert_statistics(fresh, other)


def assert_statistics(sglang: ServedEngine, model: object) -> None:
    """First-position overlaps of an answer are those of this model, target and head."""
    output = raw(sglang, ask(1, 16)[0])
    found = probe(model, [TokenRow(prompt=PROMPT, answer=tuple(output["output_ids"]))], 1, Sampling())  # type: ignore[arg-type]
    wanted = {int(place): found.numbers["overlap"][i, 0] for i, place in enumerate(found.place)}
    place = 1
    for entry in output["meta_info"]["bebop_verify"]:
        if place in wanted:
            assert abs(entry["overlap"][0] - wanted[place]) < 1e-3
        place += entry["accepted"] + 1


def test_heads_that_do_not_arrive_are_noticed(fresh: ServedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sent to the wrong one of SGLang's models, which skips them and reports success."""
    real = fresh.server.backend.control

    async def astray(name: str, payload: dict) -> dict:
        return await real(name, {**payload, "selector": "target"} if "selector" in payload else payload)

    weights = {f"mtp.{name}": torch.zeros_like(t) for name, t in policy(9).mtp.named_parameters()}  # type: ignore[union-attr]
    with monkeypatch.context() as patch:
        patch.setattr(fresh.server.backend, "control", astray)
        with pytest.raises(EngineDied, match="did not arrive"):
            fresh.load_weights(weights, 4)
    fresh.run(real("continue_generation", {"torch_empty_cache": False}))
