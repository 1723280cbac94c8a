"""The verdict on a claim, and the page of all results, with results that are missing."""

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest

from recipes.common.record import Finding, Verdict
from recipes.common.summary import CLAIMS, UNTESTABLE, overall, page
from recipes.reproduce import RECIPES, run

TABLE = [
    (["confirmed", "confirmed"], "confirmed"),
    (["confirmed", "undecided"], "confirmed in part"),
    (["confirmed", UNTESTABLE], "confirmed in part"),
    (["confirmed", "confirmed", "refuted"], "refuted in part"),
    (["refuted", "undecided"], "refuted"),
    (["refuted"], "refuted"),
    (["undecided", UNTESTABLE], "undecided"),
    ([UNTESTABLE], UNTESTABLE),
    ([], UNTESTABLE),
]


@pytest.mark.parametrize(("verdicts", "wanted"), TABLE)
def test_a_claim_holds_if_all_of_it_holds(verdicts: list[str], wanted: str) -> None:
    assert overall(verdicts) == wanted
    assert overall(verdicts[::-1]) == wanted


def test_a_majority_is_not_enough() -> None:
    def majority(verdicts: list[str]) -> str:
        return Counter(verdicts).most_common(1)[0][0] if verdicts else UNTESTABLE

    wrong = [verdicts for verdicts, wanted in TABLE if majority(verdicts) != wanted]
    assert ["confirmed", "confirmed", "refuted"] in wrong  # the table catches the broken variant


def content(*findings: tuple[str, Verdict, str]) -> dict[str, Any]:
    """A results.json with findings of (claim, verdict, evidence)."""
    place = {"device": "some processor", "torch": "2.13", "commit": "abc1234"}
    made = [
        asdict(Finding(claim=c, statement=f"About {c}.", rule="the rule", verdict=v, evidence=e))
        for c, v, e in findings
    ]
    return {"seconds": 90, "settings": {}, "place": place, "findings": made, "tables": {}}


def test_the_page_has_every_finding_under_its_claim() -> None:
    found = {
        "objectives": content(("C3", "confirmed", "Gain 0.2 [0.1, 0.3]."), ("C2", "undecided", "Between.")),
        "top_k": content(("Fig 14b", "refuted", "Loss 0.1.")),
        "beyond": content(("beyond", "confirmed", "Inside."), ("something new", "undecided", "Odd.")),
    }
    text = page(found)
    assert "### C3: confirmed\n" in text and "### C2: undecided\n" in text
    assert f"### C1: {UNTESTABLE}\n" in text and f"### C5: {UNTESTABLE}\n" in text
    for evidence in ("Gain 0.2 [0.1, 0.3].", "Between.", "Loss 0.1.", "Inside.", "Odd."):
        assert evidence in text
    assert text.index("Loss 0.1.") < text.index("## Beyond the paper") < text.index("Inside.") < text.index("Odd.")
    assert "| 1.5 |" in text and "abc1234" in text and "missing" not in text
    assert all(claim.text in text for claim in CLAIMS)


def test_missing_results_are_named_and_no_verdict_is_made_up() -> None:
    text = page({"objectives": content(("C3", "confirmed", "Gain.")), "drift": None})
    assert "`python -m recipes.drift`" in text and "**Results are missing**" in text
    assert "### C4: no results yet\n" in text and "### C3: confirmed, so far\n" in text


def test_a_recipe_that_is_not_there_fails_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("nowhere", ["nowhere"])
    assert capsys.readouterr().out == "[1/1] nowhere: there is no such recipe yet\n"


def test_all_recipes_are_known() -> None:
    ours = {"objectives", "budget", "temperature", "boundary", "top_k", "drift", "throughput", "beyond"}
    assert set(RECIPES) == ours
