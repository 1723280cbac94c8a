"""The certificate: planted faults are named by the strongest direction; verdict, words, JSON, page and exit code."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from bebop.certify import NotCertified
from bebop.certify.answers import Block
from bebop.certify.certificate import (
    CAUSES,
    EXIT_CODES,
    NAMED,
    Cause,
    Certificate,
    SettingResult,
    cause,
    decide,
    merged,
    share,
    warnings_of,
    words,
)
from bebop.certify.directions import SHARED_NOISE, verified
from bebop.certify.evidence import Evidence
from bebop.certify.ledger import EVENT_NAMES, FAMILY, Ledger
from bebop.certify.report import render
from bebop.kernels.verify import sample
from tests.cases import slow_but
from tests.certify.blocks import Fault, block, rows

M = 32


def unit(r: torch.Tensor) -> torch.Tensor:
    return r / r.sum(-1, keepdim=True)


def mixed(share: float, r: Fault) -> Fault:
    return lambda given: (1 - share) * given.probs + share * r(given)


def one_draft(given: Block, drawn: torch.Tensor | None = None, recovered: torch.Tensor | None = None) -> torch.Tensor:
    """What verification of one draft samples, with drafts or recovered tokens from something else."""
    p, q = given.probs, given.draft
    assert q is not None
    accept = (p / q).clamp_max(1)
    residual = unit((p - q).clamp_min(0))
    return verified(p, q if drawn is None else drawn, accept, residual if recovered is None else recovered)


FAULTS: dict[str, tuple[Fault, set[str]]] = {
    "row before": (mixed(0.05, lambda given: given.before), {"wrong_row"}),
    "row of a neighbour": (mixed(0.1, lambda given: given.probs.roll(20, 0)), {"wrong_row"}),
    "hotter": (lambda given: unit(given.probs**0.85), {"sharpness"}),
    "colder": (lambda given: unit(given.probs**1.2), {"sharpness"}),
    "top-p": (lambda given: unit(given.probs * (given.probs > 0.015)), {"truncation"}),
    "stops suppressed": (lambda given: unit(given.probs.index_fill(1, torch.tensor([1, 3]), 0.0)), {"stop_token"}),
    "one token written": (mixed(0.02, lambda given: torch.eye(M).double()[torch.full((len(given),), 9)]), {"override"}),
    "recovered from p": (lambda given: one_draft(given, recovered=given.probs), {"draft_leak"}),
    "drafts drawn hotter": (lambda given: one_draft(given, drawn=unit(given.draft**0.7)), {"draft_leak"}),
    "seen tokens": (lambda given: unit(given.probs * (1 + given.seen)), {"context"}),
}  # fmt: skip


# One of each cause; the others have a cause in common with one of these.
QUICK = [name for name in FAULTS if name not in ("row of a neighbour", "colder", "drafts drawn hotter")]


@pytest.mark.parametrize("name", slow_but(QUICK, FAULTS))
def test_a_planted_fault_is_found_and_named(name: str) -> None:
    fault, names = FAULTS[name]
    ledger, cohorts = Ledger(M, enumerate_rows=False), 0
    while ledger.log_e <= 9.22 and cohorts < 6:  # named where a certificate would stop
        ledger.update(block(1000, M, seed=cohorts, first=50 * cohorts, fault=fault))
        cohorts += 1
    assert ledger.log_e > 9.22 and cause(ledger.evidence()).name in names
    assert ledger.positions(3)


def shared_seeds(seed: int) -> Block:
    """Every second request with the uniforms of the one before."""
    given = block(1000, M, seed=seed, first=50 * seed)
    u = torch.rand(25, 20, generator=torch.Generator().manual_seed(seed)).repeat_interleave(2, 0).ravel()
    cells = (given.probs.cumsum(-1) < u[:, None]).sum(-1).clamp_max(M - 1)
    chosen = given.probs.gather(1, cells[:, None])[:, 0].log()
    return replace(given, tokens=cells, cells=cells, logprobs=chosen, reported=chosen, declared=chosen, twin=None)


def test_shared_seeds_are_found_and_named() -> None:
    ledger = Ledger(M)
    for i in range(3):
        ledger.update(shared_seeds(i))
    assert ledger.log_e > 9.22 and cause(ledger.evidence()).name == "shared_randomness"


def shared_noise(kind: str, seed: int) -> Block:
    """Tokens after one draft each, where two of the three draws use the same noise."""
    given, g = block(1000, M, seed=seed, first=50 * seed), torch.Generator().manual_seed(1000 + seed)
    u, fresh, coin = torch.rand(3, 1000, generator=g, dtype=torch.float64)
    noise = -torch.rand(1000, M, generator=g, dtype=torch.float64).log().neg().log()
    p, q = given.probs, rows(1000, M, g)
    left, trick = (p - q).clamp_min(0), kind == "residual_draft_gumbel"
    y = (q.log() + noise).argmax(-1) if trick else sample(q, u)
    x = (left.log() + noise).argmax(-1) if trick else sample(left, u if kind == "residual_draft_uniform" else fresh)
    coin = u if kind == "accept_draft_uniform" else coin
    stands = coin * q.gather(1, y[:, None])[:, 0] < p.gather(1, y[:, None])[:, 0]
    cells = torch.where(stands, y, x)
    chosen = p.gather(1, cells[:, None])[:, 0].log()
    return replace(
        given, tokens=cells, cells=cells, draft=q, logprobs=chosen, reported=chosen, declared=chosen, twin=None
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", SHARED_NOISE)
def test_noise_that_two_draws_share_is_found_and_named(kind: str) -> None:
    ledger, clean, cohorts = Ledger(M, enumerate_rows=False), Ledger(M, enumerate_rows=False), 0
    while ledger.log_e <= 9.22 and cohorts < 8:
        ledger.update(shared_noise(kind, cohorts))
        clean.update(shared_noise("none", cohorts))
        cohorts += 1
    assert ledger.log_e > 9.22 and cause(ledger.evidence()).name == "shared_noise"
    assert ledger.evidence()[0].name == kind and clean.highest < math.log(20)


def test_copies_of_a_twin_are_found_and_named() -> None:
    ledger = Ledger(M)
    for i in range(3):
        given = block(1000, M, seed=i, first=50 * i)
        struck = (torch.arange(1000) % 10 == 0) & (given.twin >= 0)
        cells = torch.where(struck, given.twin, given.cells)
        chosen = given.probs.gather(1, cells[:, None])[:, 0].log()
        ledger.update(replace(given, tokens=cells, cells=cells, logprobs=chosen, reported=chosen, declared=chosen))
    assert ledger.log_e > 9.22 and cause(ledger.evidence()).name == "shared_randomness"
    assert ledger.positions(1)[0][2] > 0


def reports(truth: Fault, told: Fault, seed: int) -> Block:
    """Tokens drawn from ``truth``, log-probs of ``told``."""
    given = block(1000, M, seed=seed, first=50 * seed, fault=truth)
    return replace(given, reported=told(given).gather(1, given.cells[:, None])[:, 0].log())


def jittered(size: float) -> Fault:
    def fault(given: Block) -> torch.Tensor:
        noise = torch.randn(given.probs.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        return (given.probs.log() + size * noise).softmax(-1)

    return fault


def sometimes(fault: Fault, one_in: int) -> Fault:
    return lambda given: torch.where((torch.arange(len(given)) % one_in == 0)[:, None], fault(given), given.probs)


right: Fault = lambda given: given.probs  # noqa: E731
REPORTS: dict[str, tuple[Fault, Fault, str]] = {
    "of the draft, one in a hundred": (right, sometimes(lambda given: given.draft, 100), "reported_logprobs"),
    "weights a little off": (jittered(0.01), jittered(0.01), "weights"),
    "temperature 1 % off": (*[lambda given: unit(given.probs**0.99)] * 2, "sharpness"),
    "another context, one in ten": (*[sometimes(jittered(1.0), 10)] * 2, "context"),
    "top-p in secret": (*[lambda given: unit(given.probs * (given.probs > 0.005))] * 2, "truncation"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REPORTS)
def test_wrong_reports_are_found_and_named(name: str) -> None:
    truth, told, wanted = REPORTS[name]
    ledger = Ledger(M, enumerate_rows=False)
    for i in range(2):
        ledger.update(reports(truth, told, i))
    assert ledger.log_e > 9.22 and cause(ledger.evidence()).name == wanted


def test_a_setting_that_was_not_applied_is_told_from_a_temperature() -> None:
    assert cause([one("unprocessed"), one("bigram", log_e=5)]).name == "truncation"
    assert cause([one("unprocessed"), one("hotter", log_e=15)]).name == "sharpness"


def one(name: str, group: str = "contamination", log_e: float = 20.0) -> Evidence:
    return Evidence(name=name, group=group, log_e=log_e, weight=0.01, share=None, tv=None)


def test_every_direction_has_a_cause_with_a_sentence() -> None:
    for name, (group, _) in FAMILY.items():
        if name not in EVENT_NAMES:
            assert cause([one(name, group)]).name != "unknown", name
    assert set(NAMED.values()) <= set(CAUSES)
    for name, sentence in CAUSES.items():
        assert "look at" in sentence and sentence.endswith("."), name


def test_the_look_inside_names_its_draw_and_structure_comes_first() -> None:
    assert cause([one("hotter", "draft_draw")]).name == "draft_draw"
    assert cause([one("lenient", "acceptance", 30), one("hotter", "draft_draw")]).name == "acceptance"
    assert cause([one("hotter")], structure=True).name == "structure"
    assert cause([]).name == "unknown"


# ---- the verdict

ALPHA = 1e-4
PROOF = math.log(1 / ALPHA)


def test_evidence_is_merged_by_its_weights_which_may_not_exceed_one() -> None:
    assert merged([(0.5, math.log(4.0)), (0.25, math.log(8.0))]) == pytest.approx(math.log(4.0))
    assert merged([(1.0, 800.0)]) == 800.0
    with pytest.raises(ValueError, match="more than 1"):
        merged([(0.7, 0.0), (0.4, 0.0)])


@pytest.mark.parametrize(
    ("log_e", "structure", "bounds", "verdict"),
    [
        (0.0, [], [0.005, 0.001], "pass"),
        (PROOF, [], [0.005], "fail"),
        (PROOF - 1e-9, [], [0.005], "pass"),
        (0.0, ["a token follows a stop token"], [0.005], "fail"),
        (0.0, [], [0.005, 0.02], "inconclusive"),
        (0.0, [], [0.01], "inconclusive"),
        (0.0, [], [0.005, None], "inconclusive"),
        (0.0, [], [], "inconclusive"),
    ],
)
def test_no_evidence_against_is_not_evidence_for(
    log_e: float, structure: list[str], bounds: list[float | None], verdict: str
) -> None:
    assert decide(log_e, ALPHA, 0.01, structure, bounds) == verdict


def result(**changes: Any) -> SettingResult:
    found = Evidence(name="hotter", group="contamination", log_e=1.0, weight=0.1, share=0.02, tv=0.004)
    fields: dict[str, Any] = dict(
        name="as asked", sampling={"temperature": 1.0}, weight=1.0, answers=4, unfinished=0, tokens=100, log_e=1.0,
        history=((100, 1.0),), evidence=(found,),
    )  # fmt: skip
    return SettingResult(**fields | changes)


def certificate(verdict: Any = "pass", **changes: Any) -> Certificate:
    fields: dict[str, Any] = dict(
        verdict=verdict, sentence="Found.", advice="Do.", log_e=1.0, alpha=ALPHA, limit_tv=0.01,
        engine={"name": "embedded"}, reference={"name": "model"}, settings=(result(),),
    )  # fmt: skip
    return Certificate(**fields | changes)


def test_exit_codes_leave_two_to_mistakes_of_the_user() -> None:
    assert EXIT_CODES == {"pass": 0, "fail": 1, "inconclusive": 3}
    assert certificate("inconclusive").exit_code == 3


def test_only_a_pass_is_let_through() -> None:
    one = certificate()
    assert one.require_pass() is one
    for verdict in ("fail", "inconclusive"):
        with pytest.raises(NotCertified, match=r"Found\. Do\."):
            certificate(verdict).require_pass()


def test_the_bound_is_that_of_the_worst_setting_and_unknown_where_one_has_none() -> None:
    other = Evidence(name="argmax", group="contamination", log_e=0.0, weight=0.1, share=0.5, tv=0.02)
    assert certificate(settings=(result(), result(evidence=(other,)))).bound == 0.02
    assert certificate(settings=(result(), result(evidence=()))).bound is None


def test_json_has_no_numbers_that_json_does_not_have() -> None:
    content = json.loads(certificate(log_e=math.inf).to_json())
    assert content["log_e"] is None and content["settings"][0]["evidence"][0]["tv"] == 0.004


def said(verdict: Any, **changes: Any) -> tuple[str, str]:
    fields: dict[str, Any] = dict(
        engine="sglang", tokens=20_000, log_e=23.0, bound=0.004, limit_tv=0.01, cause=None, structure=[],
        referenced=True,
    )  # fmt: skip
    return words(verdict, **fields | changes)


def test_the_sentences_say_what_was_found_and_what_to_do() -> None:
    assert "20,000 tokens" in said("pass")[0] and "0.4 %" in said("pass")[0]
    found, advice = said("fail", cause=Cause(name="wrong_row", sentence="Look at row K."))
    assert "10^10 to 1" in found and advice == "Look at row K."
    found, _ = said("fail", structure=["request 3: a token follows the stop token", "another"])
    assert "request 3: a token follows the stop token (1 more like it)" in found
    found, advice = said("inconclusive", bound=0.03)
    assert "3 %" in found and "60,000 tokens" in advice
    assert "before every setting" in said("inconclusive", bound=None, complete=False)[0]
    assert "reference=model" in said("inconclusive", referenced=False)[1]
    assert [share(value) for value in (0.0123, 0.9999, 0.2, 0.00045)] == ["1.2 %", "100 %", "20 %", "0.045 %"]


def test_low_acceptance_is_a_warning_and_no_fault() -> None:
    assert warnings_of([result(acceptance=0.6)]) == ()
    [line] = warnings_of([result(acceptance=0.05)])
    assert "5 % of the drafts are accepted" in line and "completions are right" in line


def test_the_page_begins_with_the_verdict_and_escapes_what_engines_say() -> None:
    page = render(certificate(engine={"name": "embedded", "model": "<b>mine</b>"}, warnings=("a warning",)))
    assert "<b>mine</b>" not in page and page.index("Found.") < page.index("Evidence against the claim")
    assert "Warning: a warning." in page and "0.4 %" in page
