"""Certificates of a real SGLang server: an intact one passes, one with a fault planted in its verification does not."""

import dataclasses
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from bebop.certify.answers import Answer
from bebop.certify.calls import Server
from bebop.certify.certificate import Certificate, cause
from bebop.certify.declared import candidates, check_reported, declare, find_mode
from bebop.certify.ledger import Ledger
from bebop.certify.model_reference import ModelReference
from bebop.certify.openai_server import OpenAIEngine
from bebop.certify.reference import LiveEngine, Reference
from bebop.certify.run import Plan, Run, plan_settings
from bebop.certify.served_reference import ServerReference
from bebop.certify.sglang_server import SglangEngine
from bebop.certify.structure import check_structure
from bebop.config.compose import job_config
from bebop.config.engines import SglangConfig
from bebop.errors import UserError
from bebop.model.checkpoint import resolve, save_policy
from bebop.rollout.engine import Request
from bebop.rollout.sglang.arguments import server_arguments
from bebop.rollout.sglang.backend import INTERPRETER, WHOLE_ANSWERS
from bebop.trajectory import SamplingParams
from tests.integration.sglang.faults import plant
from tests.integration.sglang.serving import serving
from tests.served_models import VOCAB, job, policy, reload

pytest_plugins = ["bebop.pytest_plugin"]
ALPHA = 1e-4
STOP = VOCAB - 1
COHORT = 32
CLAIM = SamplingParams(max_new_tokens=32, stop_token_ids=(STOP,))
INSIDE = {"BEBOP_CERTIFY": "1"}


@contextmanager
def engine(
    folder: Path, place: Path, fault: str = "", share: float = 1.0, system: str = "bebop"
) -> Iterator[SglangEngine]:
    """On a server of its own, which completions need a tokenizer of; with a fault, if one is named."""
    place.mkdir(exist_ok=True)
    environment = INSIDE | (plant(place, fault, share) if fault else {})
    with serving(job(folder, system), folder, place, environment, skip_tokenizer_init=False) as url:
        found = SglangEngine(Server(url))
        try:
            yield found
        finally:
            found.close()


@pytest.fixture(scope="module")
def reference(folder: Path) -> ModelReference:
    return ModelReference(reload(folder))


@pytest.fixture(scope="module")
def sglang(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangEngine]:
    with engine(folder, tmp_path_factory.mktemp("intact")) as found:
        yield found


def prompt(index: int) -> Sequence[int]:
    return 3, 1, 4, 1 + index % 9


def certified(engine: LiveEngine, reference: Reference, tokens: int, params: SamplingParams = CLAIM) -> Certificate:
    settings, weight = plan_settings(params, 0.0, engine.white_box is not None)
    plan = Plan(
        settings=settings, white_box_weight=weight, vocabulary=VOCAB, tokens=tokens, cohort=COHORT, alpha=ALPHA,
        limit_tv=0.5,
    )  # fmt: skip
    return Run(engine, reference, prompt, plan).run()


def acceptance(certificate: Certificate) -> float:
    (setting,) = certificate.settings
    assert setting.acceptance is not None
    return setting.acceptance


def test_an_intact_server_passes(sglang: SglangEngine, reference: ModelReference) -> None:
    assert sglang.drafts == 2 and sglang.vocabulary == VOCAB and sglang.white_box is not None
    found = certified(sglang, reference, 600)
    assert found.structure == () and found.log_e < math.log(1 / ALPHA)
    found.require_pass()
    box = sglang.white_box
    assert box.tokens > 400 and box.drafts > 400 and not box.untested and box.log_e < math.log(1 / ALPHA)
    assert {one.group for one in found.white_box} == {"draft_draw", "acceptance", "recovered", "bonus", "shared_noise"}
    assert 0.2 < acceptance(found) < 0.6
    said = found.engine
    assert said["version"] and said["speculative_algorithm"] and set(said["weights"]) == {"target", "draft"}


def test_its_answers_say_what_happened(sglang: SglangEngine, reference: ModelReference, folder: Path) -> None:
    """Cycles, ends, log-probs at a temperature; and its prefill says what the Hugging Face model says."""
    hot = dataclasses.replace(CLAIM, temperature=2.0, max_new_tokens=8)
    asked = [Request(id=i, token_ids=tuple(prompt(i // 2)), params=hot) for i in range(16)]
    told: list[int] = []
    answers = sglang.sample(asked, told.append)
    assert check_structure(answers, vocabulary=VOCAB) == []
    assert sum(told) == sum(len(answer.token_ids) for answer in answers)
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}
    for answer in answers:
        assert answer.cycles is None or (answer.cycles[0] == 1 and max(answer.cycles) <= 3)
    assert any(answer.cycles is not None and 3 in answer.cycles for answer in answers)
    model, server = (found.block(answers, hot) for found in (reference, ServerReference(sglang, VOCAB)))
    for name in ("probs", "before", "raw", "logprobs"):
        torch.testing.assert_close(getattr(server, name), getattr(model, name), rtol=1e-4, atol=1e-5)
    known = candidates(model, 2.0)
    found = find_mode(model.reported, known)
    assert set(found.same) == {"processed", "temperature"} and found.distances["raw"] > 0.01
    assert check_reported(declare(model, found.mode, 2.0), "float32") == []
    assert check_reported(declare(model, "raw", 2.0), "float32")  # the check would notice


def test_the_likeliest_tokens_of_its_prefill(sglang: SglangEngine, reference: ModelReference) -> None:
    asked = [Request(id=i, token_ids=tuple(prompt(i // 2)), params=CLAIM) for i in range(4)]
    answers = sglang.sample(asked, lambda tokens: None)
    few, whole = ServerReference(sglang, VOCAB), reference.block(answers, CLAIM)
    few.top = 5
    block = few.block(answers, CLAIM)
    assert block.ids is not None and block.probs.shape[1] == 6
    torch.testing.assert_close(block.logprobs, whole.logprobs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(block.probs[:, :-1], whole.probs.gather(1, block.ids[:, :-1]), rtol=1e-4, atol=1e-5)


def test_ctrl_c_gives_what_is_there(sglang: SglangEngine) -> None:
    """Our own requests end, as far as they came, and the server goes on."""
    long = SamplingParams(max_new_tokens=90)
    asked = [Request(id=i, token_ids=tuple(prompt(i)), params=long) for i in range(8)]
    threading.Timer(6.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    answers = sglang.sample(asked, lambda tokens: None)
    assert [answer.request for answer in answers] == list(range(8))
    assert check_structure(answers, vocabulary=VOCAB) == []
    ended = [answer for answer in answers if answer.finish_reason == "abort"]
    assert ended and any(0 < len(answer.token_ids) < 90 for answer in ended)
    assert sglang.sample(asked[:1], lambda tokens: None)[0].finish_reason == "length"


def test_its_completions_pass_too(sglang: SglangEngine, reference: ModelReference) -> None:
    """The OpenAI-compatible endpoint of the same server."""
    openai = OpenAIEngine(Server(sglang.server.url))
    try:
        found = certified(openai, reference, 400)
        assert found.verdict == "pass" and found.engine["model"] and found.settings[0].tokens >= 400
        answers = openai.sample([Request(id=0, token_ids=(3, 1), params=CLAIM)], lambda tokens: None)
        with pytest.raises(UserError, match="prompt_logprobs"):
            ServerReference(openai, VOCAB).block(answers, CLAIM)
    finally:
        openai.close()


def found_by(engine: SglangEngine, reference: Reference, most: int) -> tuple[Ledger, list[Answer]]:
    """Cohort after cohort until black and white box have both seen a fault, or so many tokens have come."""
    ledger, answers, limit = Ledger(VOCAB, alpha=ALPHA), [], math.log(1 / ALPHA)
    while ledger.tokens < most:
        first = len(answers)
        asked = [
            Request(id=i, token_ids=tuple(prompt(i // 2)), params=CLAIM) for i in range(first, first + COHORT)
        ]  # fmt: skip
        answers += engine.sample(asked, lambda tokens: None)
        block = reference.block(answers[first:], CLAIM)
        ledger.update(declare(block, "processed", 1.0))
        assert engine.white_box is not None
        print(ledger.tokens, "black", round(ledger.log_e, 1), "white", round(engine.white_box.log_e, 1))
        if min(ledger.log_e, engine.white_box.log_e) > limit:
            break
    return ledger, answers


@pytest.mark.parametrize(
    ("fault", "inside", "outside"), [("bonus", "bonus", "wrong_row"), ("recovered", "recovered", "draft_leak")]
)
def test_a_planted_fault_is_found(
    fault: str, inside: str, outside: str, folder: Path, reference: ModelReference, tmp_path: Path
) -> None:
    with engine(folder, tmp_path / "place", fault) as broken:
        ledger, answers = found_by(broken, reference, 4000)
        box = broken.white_box
    assert box is not None and check_structure(answers, vocabulary=VOCAB) == []
    assert ledger.log_e > math.log(1 / ALPHA) and box.log_e > math.log(1 / ALPHA)
    assert box.evidence()[0].group == inside and cause(ledger.evidence()).name == outside


def test_a_head_that_knows_nothing_passes_with_a_warning(reference: ModelReference, tmp_path: Path) -> None:
    """The distribution is right whatever drafts are drawn from: here a stranger's, sure of itself."""
    drafting, stranger = policy(), policy(7).mtp
    assert stranger is not None
    with torch.no_grad():
        for parameter in stranger.parameters():
            parameter.mul_(10.0 if parameter.dim() == 1 else 1.0)
    drafting.mtp = stranger
    save_policy(drafting, tmp_path / "model")
    with engine(tmp_path / "model", tmp_path / "place") as served:
        found = certified(served, reference, 400)
    assert found.verdict == "pass" and acceptance(found) < 0.2
    assert any("of the drafts are accepted" in warning for warning in found.warnings)


def test_greedy_drafts_pass(folder: Path, reference: ModelReference, tmp_path: Path) -> None:
    """Target-only: the white box sees one-hot drafts."""
    with engine(folder, tmp_path / "place", system="target_only") as greedy:
        found = certified(greedy, reference, 400)
        box = greedy.white_box
    assert found.verdict == "pass" and box is not None
    assert box.untested == {"draft_draw": "drafts are not sampled"} and box.tokens > 250 and box.drafts == 0


def test_the_fixture_certifies_sglang_of_this_process(
    certify_engine: Callable[..., Certificate], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By SGLang's own ``Engine`` with sampled drafts; with a temperature that is not the claimed one it fails."""
    for name, value in {**INTERPRETER, **WHOLE_ANSWERS}.items():
        monkeypatch.setenv(name, value)
    import sglang

    model = resolve("tiny")
    config = job_config(["model=tiny", "decoding=bebop", "decoding.draft_tokens=2", "rollout=sglang"])
    own = SglangConfig(cache_tokens=8192, extra={"skip_tokenizer_init": True})
    engine = sglang.Engine(**server_arguments(config, own, model, "cpu"))
    try:
        given = ("model.dtype=float32", "stress=0", "quick=true", "cohort=32", "sampling.max_new_tokens=64")
        certify_engine(engine, model, *given).require_pass()
        honest = engine.generate

        def hot(sampling_params: Sequence[dict[str, object]], **named: object) -> object:
            return honest(sampling_params=[one | {"temperature": 1.3} for one in sampling_params], **named)

        monkeypatch.setattr(engine, "generate", hot)
        assert certify_engine(engine, model, *given).verdict == "fail"
    finally:
        engine.shutdown()
