"""The verdict on a claim, and the page of all results, with results that are missing."""

from collections import Counter
from dataclasses import asdict
from typing import Any

import pytest

from recipes.reproduce.__main__ import LONG, RECIPES, ROOT, WHOLE, arguments, run, with_studies
from recipes.reproduce.claims import PAPERS, REAL_STUDIES, heading
from recipes.reproduce.pages import verdicts, within
from recipes.reproduce.summary import UNTESTED, page
from recipes.reproduce.verdicts import Finding, overall

TABLE = [
    (["confirmed", "confirmed"], "confirmed"),
    (["confirmed", "undecided"], "confirmed in part"),
    (["confirmed", UNTESTED], "confirmed in part"),
    (["confirmed", "confirmed", "refuted"], "refuted in part"),
    (["refuted", "undecided"], "refuted"),
    (["refuted"], "refuted"),
    (["undecided", UNTESTED], "undecided"),
    ([UNTESTED], UNTESTED),
    ([], UNTESTED),
]
WORDS: dict[str, tuple[str, float, str | None]] = {
    "confirmed": ("confirmed", 1e-6, None),
    "refuted": ("refuted", 1e-6, None),
    "undecided": ("confirmed", 0.5, None),
    UNTESTED: ("confirmed", 1e-6, "the arm fell"),
}


@pytest.mark.parametrize(("verdicts", "wanted"), TABLE)
def test_a_claim_holds_if_all_of_it_holds(verdicts: list[str], wanted: str) -> None:
    assert overall(verdicts) == wanted
    assert overall(verdicts[::-1]) == wanted


def test_a_majority_is_not_enough() -> None:
    def majority(verdicts: list[str]) -> str:
        return Counter(verdicts).most_common(1)[0][0] if verdicts else UNTESTED

    wrong = [verdicts for verdicts, wanted in TABLE if majority(verdicts) != wanted]
    assert ["confirmed", "confirmed", "refuted"] in wrong  # the table catches the broken variant


def content(*findings: tuple[str, str, str], post_hoc: bool = False) -> dict[str, Any]:
    """A results.json with findings of (claim, verdict, evidence)."""
    place = {"device": "some processor", "torch": "2.13", "commit": "abc1234def", "dirty": True}
    made = []
    for claim, verdict, evidence in findings:
        side, p, untested = WORDS[verdict]
        words = {"claim": claim, "statement": f"About {claim}.", "rule": "the rule", "evidence": evidence}
        made.append(asdict(Finding(**words, side=side, p=p, untested=untested)))  # type: ignore[arg-type]
    judgements: list[dict[str, Any]] = [{"rule": {"hash": "aaaa", "derived": False}, "findings": made}]
    if post_hoc:
        old = [{"statement": finding["statement"], "verdict": "refuted"} for finding in made]
        judgements[0] |= {"findings": old, "rule": {"hash": "aaaa", "derived": True}}
        judgements.append({"rule": {"hash": "bbbb"}, "post_hoc": True, "reason": "Why.", "findings": made})
    common = {"seconds": 90, "processor_seconds": 60, "settings": {}, "place": place, "tables": {}, "figures": {}}
    common |= {"numbers": {}, "facts": {}}
    return {**common, "judgements": judgements}


def test_the_page_has_every_finding_under_its_claim() -> None:
    contents = {
        "objectives": content(("C3", "confirmed", "Gain 0.2 [0.1, 0.3]."), ("C2", "undecided", "Between.")),
        "top_k": content(("Fig 14b", "refuted", "Loss 0.1."), ("C4", UNTESTED, "Fell.")),
        "beyond": content(("beyond", "confirmed", "Inside."), ("something new", "undecided", "Odd.")),
    }
    text = page(contents)
    assert "### C3: confirmed\n" in text and "### C2: undecided\n" in text
    assert f"### C1: {UNTESTED}\n" in text and f"### C5: {UNTESTED}\n" in text and f"### C4: {UNTESTED}\n" in text
    assert "Fell. Not tested: the arm fell." in text
    for evidence in ("Gain 0.2 [0.1, 0.3].", "Between.", "Loss 0.1.", "Inside.", "Odd."):
        assert evidence in text
    assert text.index("Loss 0.1.") < text.index("## Beyond the paper") < text.index("Inside.") < text.index("Odd.")
    assert "| 1.5 |" in text and "abc1234 (dirty)" in text and "missing" not in text and "Re-judged" not in text
    assert all(claim.text in text for paper in PAPERS for claim in paper.claims)


def test_the_correction_goes_over_all_studies_of_a_claim() -> None:
    alone, other = content(("C3", "confirmed", "A.")), content(*[("C3", "undecided", "B.")] * 9)
    alone["judgements"][0]["findings"][0]["p"] = 0.02
    assert "### C3: confirmed\n" in page({"objectives": alone})
    assert "### C3: undecided\n" in page({"objectives": alone, "budget": other})
    beyond = content(*[("beyond", "undecided", "B.")] * 9)
    assert "### C3: confirmed\n" in page(
        {"objectives": alone, "beyond": beyond}
    )  # other claims are none of its business


def test_a_judgement_made_after_the_run_is_called_so() -> None:
    text = page({"objectives": content(("C3", "confirmed", "Gain."), post_hoc=True)})
    assert "**Re-judged.**" in text and "This holds for objectives" in text
    assert "at the run: refuted" in text and "`aaaa` (derived)" in text and "`bbbb`, post hoc" in text


def test_missing_results_are_named_and_no_verdict_is_made_up() -> None:
    text = page({"objectives": content(("C3", "confirmed", "Gain.")), "drift": None})
    assert "`python -m recipes.reproduce.drift`" in text and "**Results are missing**" in text
    assert "### C4: no results yet\n" in text and "### C3: confirmed, so far\n" in text


def test_a_recipe_that_is_not_there_fails_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("nowhere", ["nowhere"])
    assert capsys.readouterr().out == "[1/1] nowhere: there is no such recipe yet\n"


def test_what_goes_beyond_a_paper_stands_with_that_paper() -> None:
    found = content(("beyond", "confirmed", "7.125"), ("unheard of", "confirmed", "8.125"))
    text = page({"drift": found, "pad_training": found})
    bebop, pad = text.index("### Beyond the paper\n"), text.index("### Beyond the paper on PAD")
    places = [text.index(f"[{name}](recipes") for name in ("drift", "pad_training")]
    assert bebop < places[0] < pad < places[1], "each under its own paper"
    assert text.count("7.125") == text.count("8.125") == 2
    assert heading("drift", "PAD 2") == "PAD 2", "a claim is that of its paper, whatever recipe tests it"


def test_findings_are_corrected_with_those_of_their_heading() -> None:
    found = content(("beyond", "confirmed", "7.125"))
    found["judgements"][-1]["findings"][0]["p"] = 0.03
    alone = verdicts({"drift": found, "pad_training": found})
    together = verdicts({"drift": found, "boundary": found})
    assert alone["drift", 0] == ("confirmed", 0.03)
    assert together["drift", 0] == ("undecided", 0.06)


def test_all_recipes_are_known() -> None:
    ours = {"objectives", "budget", "temperature", "boundary", "top_k", "drift", "throughput", "beyond"}
    others = {"pad", "pad_training", "blockpilot", "firp", "trees", "pipo", "certificate", "frontier"}
    assert set(RECIPES) == ours | others


def test_studies_of_days_run_by_name_alone() -> None:
    assert arguments([]).only is None and not set(LONG) & set(RECIPES)
    assert arguments(["--only", *LONG]).only == list(LONG)
    assert with_studies(RECIPES) == list(RECIPES)
    assert with_studies(["real"]) == list(LONG) and with_studies(["real_losses", "real"])[:2] == ["real_losses", "real"]
    assert (ROOT / "recipes" / "reproduce" / WHOLE / "__main__.py").is_file()
    assert all(within(ROOT / "recipes" / "reproduce", name).joinpath("findings.py").is_file() for name in REAL_STUDIES)
