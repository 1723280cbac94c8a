"""From evidence to verdict, words and exit code."""

import json
import math
from typing import Any

import pytest

from bebop.certify import NotCertified
from bebop.certify.certificate import (
    EXIT_CODES,
    Cause,
    Certificate,
    SettingResult,
    decide,
    merged,
    share,
    warnings_of,
    words,
)
from bebop.certify.evidence import Evidence
from bebop.certify.report import render

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
    assert "5 % of the drafts are accepted" in line and "answers are right" in line


def test_the_page_begins_with_the_verdict_and_escapes_what_engines_say() -> None:
    page = render(certificate(engine={"name": "embedded", "model": "<b>mine</b>"}, warnings=("a warning",)))
    assert "<b>mine</b>" not in page and page.index("Found.") < page.index("Evidence against the claim")
    assert "Warning: a warning." in page and "0.4 %" in page
