"""A run from the first request to the verdict, over an engine of a table: what is asked, weighed, stopped and said."""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markupsafe import escape

from bebop.certify import certify
from bebop.certify.__main__ import main
from bebop.certify.answers import Answer
from bebop.certify.api import ScoreReference
from bebop.certify.certificate import share
from bebop.certify.function import FunctionEngine
from bebop.certify.ledger import Ledger
from bebop.certify.report import render
from bebop.certify.run import Examination, Plan, Run, Setting, plan_settings, seed_of
from bebop.config.compose import certify_config
from bebop.rollout.engine import Request
from bebop.trajectory import SamplingParams
from tests.commands import ended

VOCABULARY, STOP = 12, 0
TABLE = np.random.default_rng(3).normal(scale=1.2, size=(VOCABULARY, VOCABULARY))
PROMPTS = [[1, 2], [3], [4, 5, 6]]
CLAIM = SamplingParams(max_new_tokens=40, stop_token_ids=(STOP,))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum())


@cache
def row(last: int, temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs after a token, and their distribution function."""
    logprobs = log_softmax(TABLE[last] / temperature)
    return logprobs, np.exp(logprobs).cumsum()


class Table:
    """An engine whose next token depends on the last one; a fault is a change of what it draws or tells."""

    def __init__(self, temperature_off: float = 1.0, report: str = "processed", override: float = 0.0) -> None:
        self.factor, self.report, self.override = temperature_off, report, override
        self.asked: list[Request] = []

    def __call__(self, requests: list[Request]) -> list[Answer]:
        self.asked += requests
        return [self._answer(request) for request in requests]

    def _answer(self, request: Request) -> Answer:
        rng, last, ids, told = np.random.default_rng(request.params.seed), request.token_ids[-1], [], []
        temperature = request.params.temperature
        while len(ids) < request.params.max_new_tokens and (not ids or ids[-1] != STOP):
            token = min(int(row(last, temperature * self.factor)[1].searchsorted(rng.random())), VOCABULARY - 1)
            token = 7 if rng.random() < self.override else token
            ids.append(token)
            told.append(float(row(last, 1.0 if self.report == "raw" else temperature)[0][token]))
            last = token
        reason = "stop" if ids[-1] == STOP else "length"
        return Answer(
            request=request.id, prompt=request.token_ids, token_ids=np.array(ids), logprobs=np.array(told),
            finish_reason=reason, seed=request.params.seed, stops=(STOP,), limit=request.params.max_new_tokens,
        )  # fmt: skip


def logits(prompt: Sequence[int], answer: Sequence[int]) -> np.ndarray:
    return TABLE[[prompt[-1], *answer[:-1]]]


def run(engine: Callable[..., Any], other: Any = None, referenced: bool = True, **changes: Any) -> Run:
    settings, weight = plan_settings(CLAIM, changes.pop("stress", 0.0), False)
    plan = Plan(settings=settings, white_box_weight=weight, vocabulary=VOCABULARY, tokens=2_000, cohort=8)
    reference = ScoreReference(logits) if referenced else None
    against = None if other is None else FunctionEngine(other)
    return Run(
        FunctionEngine(engine), reference, lambda i: PROMPTS[i % 3], dataclasses.replace(plan, **changes), against
    )


@pytest.mark.slow
def test_an_intact_engine_passes_at_both_settings_and_a_fault_is_named() -> None:
    certificate = run(Table(), stress=2.0, tokens=6_000, limit_tv=0.05, cohort=48).run()
    assert certificate.verdict == "pass" and [one.name for one in certificate.settings] == ["as asked", "stress"]
    assert certificate.settings[1].sampling["temperature"] == 2.0 and certificate.bound is not None
    assert certificate.seeds["repeated by seed"] == 1.0 and certificate.logprobs["of"] == "processed, temperature"
    failed = run(Table(override=0.02), stress=2.0, cohort=24).run()
    assert failed.verdict == "fail" and failed.cause is not None and failed.cause.name == "override"
    assert failed.not_tested[-1] == "stress: not begun" and failed.settings[0].places
    assert json.loads(failed.to_json())["verdict"] == "fail" and "Worst positions" in render(failed)


@pytest.mark.slow
def test_a_setting_ends_once_its_bound_is_reached_or_goes_on_if_asked() -> None:
    early = run(Table(), tokens=30_000, limit_tv=0.1, cohort=24, stop_when_bounded=True).run()
    [one] = early.settings
    assert early.verdict == "pass" and one.tokens < 10_000 and len(one.history) > 1
    assert one.bound is not None and one.bound < 0.1
    whole = run(Table(), tokens=one.tokens + 1, limit_tv=0.1, cohort=24).run()
    assert whole.tokens > one.tokens and whole.verdict == "pass"
    assert not Examination(setting=run(Table()).plan.settings[0], ledger=Ledger(2)).bounded(0.01, 0.1), "one cohort"


@pytest.mark.slow
def test_it_says_what_so_many_tokens_can_see() -> None:
    certificate = run(Table(), tokens=400, cohort=24).run()
    [line], [one] = certificate.scope, certificate.settings
    hardest = max((each for each in one.visible if each.share < 1), key=lambda each: each.tv)
    assert f"moves {share(hardest.tv)} of a token's probability; {hardest.name} is the hardest" in line
    late = [each.needs for each in one.visible if each.needs is not None and each.needs > one.tokens]
    assert late and f"takes a longer run in {len(late)} directions, up to {max(late):,} tokens" in line
    assert all(each.needs is None or each.tv > 0.02 for each in one.visible if (each.needs or 0) > one.tokens)
    assert str(escape(line)) in render(certificate)


def test_requests_come_in_pairs_of_a_prompt_with_seeds_of_their_own() -> None:
    engine = Table()
    run(engine, tokens=400).run()
    first = engine.asked[:8]
    assert [request.token_ids for request in first] == [tuple(PROMPTS[i // 2 % 3]) for i in range(8)]
    assert len({request.params.seed for request in first}) == 8
    assert [request.id for request in engine.asked[8:16]] == list(range(8, 16))


def test_the_first_pair_is_asked_again_once_all_evidence_is_in() -> None:
    """With the same seeds, whose draws are known: a look inside would take them for new ones."""
    engine = Table()
    certificate = run(engine, tokens=400).run()
    assert [request.params.seed for request in engine.asked[-2:]] == [r.params.seed for r in engine.asked[:2]]
    seeds = [request.params.seed for request in engine.asked[:-2]]
    assert len(set(seeds)) == len(seeds) == certificate.settings[0].answers


def test_seeds_fit_31_bits_and_none_is_given_twice() -> None:
    seeds = [seed_of(seed, number, stream, i) for seed, number, stream in ((0, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 0))
             for i in range(2_000)]  # fmt: skip
    assert len(set(seeds)) == len(seeds) and 0 <= min(seeds) and max(seeds) < 1 << 31


@pytest.mark.slow
def test_what_log_probs_are_of_is_found_at_each_setting() -> None:
    """At temperature 1 the raw softmax and the claim are one; at 2 they are not, and neither choice is a fault."""
    for report in ("raw", "processed"):
        certificate = run(Table(report=report), stress=2.0, limit_tv=0.5, cohort=24).run()
        assert certificate.verdict == "pass" and report in certificate.logprobs["of"]
        assert certificate.logprobs["first that are off"] == []
    wrong = run(Table(report="raw"), stress=2.0, logprobs="processed", cohort=24).run()
    assert wrong.verdict == "fail" and len(wrong.logprobs["first that are off"]) == 12


def test_without_a_reference_answers_are_held_against_those_of_an_engine_without_drafts() -> None:
    same = run(Table(), other=Table(), referenced=False).run()
    assert same.verdict == "inconclusive" and "without a reference" in same.sentence and not same.settings[0].evidence
    assert same.reference["name"] == "none" and any("there is no reference" in gap for gap in same.not_tested)
    other = Table()
    different = run(Table(temperature_off=3.0), other=other, referenced=False, tokens=8_000).run()
    assert different.verdict == "fail" and different.log_e > math.log(1e4)
    own = {request.params.seed for request in run_requests()}
    assert not own & {request.params.seed for request in other.asked}  # independent draws


def run_requests() -> list[Request]:
    """What the engine in question is asked for."""
    one = run(Table())
    return [r for first in range(0, 80, 8) for r in one.requests(one.plan.settings[0], 0, first)]


def test_an_interrupted_cohort_counts_as_far_as_it_came() -> None:
    class Interrupted(Table):
        def _answer(self, request: Request) -> Answer:
            answer = super()._answer(request)
            if request.id < 12:
                return answer
            return dataclasses.replace(
                answer, token_ids=answer.token_ids[:1], logprobs=np.array([-1.0]), finish_reason="abort"
            )

    certificate = run(Interrupted(), logprobs="none").run()
    assert certificate.settings[0].answers == 16 and certificate.settings[0].unfinished == 4
    assert certificate.verdict == "inconclusive" and "before every setting was examined" in certificate.sentence
    assert "it was interrupted" in certificate.warnings


def test_an_interrupted_cohort_of_the_other_engine_is_no_evidence() -> None:
    def stopped(requests: list[Request]) -> list[Answer]:
        raise KeyboardInterrupt

    one = run(Table(), other=stopped, referenced=False)
    certificate = one.run()
    assert certificate.verdict == "inconclusive" and "it was interrupted" in certificate.warnings
    assert one.done[0].against.pairs == 0 and certificate.log_e == 0 and certificate.settings[0].answers == 8


def goes_on(answer: Answer) -> dict[str, Any]:
    return {"token_ids": np.append(answer.token_ids, 5), "logprobs": np.append(answer.logprobs, -1.0), "limit": 99}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (goes_on, "follows the stop token"),
        (lambda answer: {"logprobs": answer.logprobs[:-1]}, "log-probs for"),
        (lambda answer: {"token_ids": np.append(answer.token_ids[:-1], -1)}, "id -1 is not in the vocabulary of 12"),
        (lambda answer: {"request": 0}, "it was answered 8 times"),
    ],
    ids=["goes on", "log-probs", "id", "request"],
)
def test_a_broken_rule_fails_whatever_the_evidence(change: Callable[[Answer], dict[str, Any]], sentence: str) -> None:
    """The reference could not read most of these completions."""

    class Broken(Table):
        def _answer(self, request: Request) -> Answer:
            answer = super()._answer(request)
            return dataclasses.replace(answer, **change(answer))

    certificate = run(Broken()).run()
    assert certificate.verdict == "fail" and sentence in certificate.sentence
    assert certificate.cause is not None and certificate.cause.name == "structure"


def test_weights_of_settings_and_white_box_share_one() -> None:
    for stress, white in ((0.0, False), (2.0, False), (0.0, True), (2.0, True)):
        settings, weight = plan_settings(CLAIM, stress, white)
        assert sum(one.weight for one in settings) + weight == pytest.approx(1.0)
        assert len(settings) == 1 + (stress > 0)
    assert [one.name for one in plan_settings(CLAIM, 1.0, False)[0]] == ["as asked"]  # the same temperature twice


def test_the_call_refuses_what_makes_no_sense() -> None:
    def sample(prompts: list[list[int]], seeds: list[int], most: int) -> list[tuple[list[int], None]]:
        return [([1, STOP], None) for _ in prompts]

    with pytest.raises(ValueError, match="prompts is empty"):
        certify(sample, logits, [], vocabulary=VOCABULARY)
    with pytest.raises(ValueError, match=r"\[T, V\] is wanted"):
        certify(sample, lambda prompt, answer: TABLE[:1], PROMPTS, vocabulary=VOCABULARY, params=CLAIM)


def test_a_setting_may_not_weigh_more_than_everything() -> None:
    one = Setting(name="as asked", params=CLAIM, weight=0.7)
    plan = Plan(settings=(one, one), white_box_weight=0.0, vocabulary=VOCABULARY, tokens=100, cohort=2)
    with pytest.raises(ValueError, match="more than 1"):
        Run(FunctionEngine(Table()), ScoreReference(logits), lambda i: PROMPTS[0], plan).run()


@pytest.mark.slow
def test_quick_means_fewer_tokens_and_a_wider_limit_unless_others_are_asked_for() -> None:
    usual, quick = certify_config([]), certify_config(["quick=true"])
    assert (usual.tokens_asked, usual.limit) == (20_000, 0.02) and (quick.tokens_asked, quick.limit) == (2_500, 0.05)
    own = certify_config(["quick=true", "tokens=70", "limit_tv=.3"])
    assert (own.tokens_asked, own.limit) == (70, 0.3)


SMALL = ["tokens=300", "cohort=4", "stress=0", "threads=1", "progress=false", "sampling.max_new_tokens=24"]


@pytest.mark.slow
def test_the_command_writes_a_certificate_and_says_by_its_exit_code_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with ended(main, [*SMALL, "--quick", "limit_tv=.02", f"dir={tmp_path / 'a'}"], capsys) as (code, out, _):
        assert code == 3 and out.startswith("Inconclusive: ") and "what it can see, as asked: " in out
    content = json.loads((tmp_path / "a" / "certificate.json").read_text())
    assert content["verdict"] == "inconclusive" and content["engine"]["target"] and content["settings"][0]["evidence"]
    assert "Not tested" in (tmp_path / "a" / "report.html").read_text()
    with ended(main, [*SMALL, "limit_tv=0.99", f"dir={tmp_path / 'b'}"], capsys) as (code, out, _):
        assert code == 0 and out.startswith("Pass: ")
    wrong = lambda z, *_: ((z / 1.3).softmax(-1), z[:, 0].isnan())  # noqa: E731
    monkeypatch.setattr("bebop.certify.model_reference.claimed", wrong)
    with ended(main, [*SMALL, f"dir={tmp_path / 'c'}"], capsys) as (code, out, _):
        assert code == 1 and out.startswith("Fail: ")
    with ended(main, [*SMALL, f"dir={tmp_path / 'a'}"], capsys) as (code, _, errors):
        assert code == 2 and "it holds a certificate already" in errors[0]
