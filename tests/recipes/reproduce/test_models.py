"""Verdicts on claims: what makes them, what is corrected together, and the pages of both models, whole or missing."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch

from recipes.reproduce import __main__ as reproduce
from recipes.reproduce import pages as pages_module
from recipes.reproduce import record, rule_hash
from recipes.reproduce.__main__ import (
    LONG,
    NEED_GPU,
    RECIPES,
    ROOT,
    STUDIES,
    WHOLE,
    arguments,
    checked,
    rebuild,
    run,
    run_all,
    with_studies,
)
from recipes.reproduce.claims import MODELS, PAPERS, REAL_STUDIES, heading
from recipes.reproduce.deciding import deciding, effect_of
from recipes.reproduce.pages import family, verdicts, within
from recipes.reproduce.scope import SCOPES, counted, ours, scope_of
from recipes.reproduce.summary import UNTESTED, page
from recipes.reproduce.verdicts import Finding, Part, overall, p_values
from tests.recipes.reproduce.synthetic import keep

FOLDER = Path(rule_hash.__file__).parent
STORED = [name for name in STUDIES if within(FOLDER, name).joinpath("results.json").is_file()]
RESULTS = (FOLDER.parent.parent / "RESULTS.md").read_text()
Family = Callable[[str, Finding], tuple[str, ...]]


WORDS: dict[str, tuple[str, float, str | None]] = {
    "confirmed": ("confirmed", 1e-6, None),
    "refuted": ("refuted", 1e-6, None),
    "undecided": ("confirmed", 0.5, None),
    UNTESTED: ("confirmed", 1e-6, "the arm fell"),
}


def results(*findings: tuple[str, str | float, str], post_hoc: bool = False) -> dict[str, Any]:
    """Return a results.json with findings of (claim, verdict, evidence); a number: p on the confirming side."""
    place = {"device": "some processor", "torch": "2.13", "commit": "abc1234def", "dirty": True}
    made = []
    for claim, verdict, evidence in findings:
        side, p, untested = WORDS[verdict] if isinstance(verdict, str) else ("confirmed", verdict, None)
        words = {"claim": claim, "statement": f"About {claim}.", "rule": "the rule", "evidence": evidence}
        made.append(asdict(Finding(**words, side=side, p=p, untested=untested)))  # type: ignore[arg-type]
    judgements: list[dict[str, Any]] = [{"rule": {"hash": "aaaa", "derived": False}, "findings": made}]
    if post_hoc:
        old = [{"statement": finding["statement"], "verdict": "refuted"} for finding in made]
        judgements[0] |= {"findings": old, "rule": {"hash": "aaaa", "derived": True}}
        judgements.append({"rule": {"hash": "bbbb"}, "post_hoc": True, "reason": "Why.", "findings": made})
    common = {"seconds": 90, "processor_seconds": 60, "settings": {}, "place": place, "tables": {}, "figures": {}}
    return {**common, "numbers": {}, "facts": {}, "judgements": judgements}


def content(claim: str, *p_values: float) -> dict[str, Any]:
    return results(*((claim, p, "e") for p in p_values))


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    """The stored results of the built-in model, and folders for those of the real one."""
    for name in (one for one in RECIPES if one in STORED):
        copytree(FOLDER / name / "figures", tmp_path / name / "figures")
        (tmp_path / name / "results.json").write_text((FOLDER / name / "results.json").read_text())
    return {name: within(tmp_path, name) for name in STUDIES}


def on_built_in(claim: str) -> str:
    """The verdict that the page has which is stored: studies may run anew and come to another one."""
    found = re.search(rf"<summary>{claim}: .+ on SmolLM2, (.+) on the built-in model</summary>", RESULTS)
    assert found is not None
    return found[1]


# ---- what is corrected together


def check_families() -> None:
    """A claim on one model is one family: neither are models corrected together, nor studies by themselves."""
    many = (0.5,) * 9
    apart = verdicts({"real_losses": content("C3", 0.02), "objectives": content("C3", *many)})
    assert apart["real_losses", 0] == ("confirmed", 0.02), "the other model's findings are none of its business"
    assert apart["objectives", 0] == ("undecided", 1.0)
    other = verdicts({"real_losses": content("C3", *many), "objectives": content("C3", 0.02)})
    assert other["objectives", 0] == ("confirmed", 0.02), "nor the other way"
    shared = verdicts({"real_losses": content("beyond", 0.03), "real_entropy": content("beyond", 0.03)})
    assert shared["real_losses", 0] == shared["real_entropy", 0] == ("undecided", 0.06), "two studies, one claim"
    fourth = content("C4", 0.03)
    nested = verdicts({"real.rl": fourth, "real_losses": fourth, "drift": fourth})
    assert nested["real.rl", 0] == ("undecided", 0.06) and nested["drift", 0] == ("confirmed", 0.03)
    claims = verdicts({"real_losses": content("C3", 0.03), "real_entropy": content("C1", 0.03)})
    assert claims["real_losses", 0] == claims["real_entropy", 0] == ("confirmed", 0.03), "two claims, two families"
    beyond = content("beyond", 0.03)
    papers = verdicts({"drift": beyond, "pad_training": beyond})
    assert papers["drift", 0] == ("confirmed", 0.03), "what goes beyond one paper is no business of another"
    assert verdicts({"drift": beyond, "boundary": beyond})["drift", 0] == ("undecided", 0.06)
    alone = {"objectives": content("C3", 0.02)}
    assert "<summary>C3: confirmed</summary>" in page({**alone, "beyond": content("beyond", *many)})
    assert "<summary>C3: undecided</summary>" in page({**alone, "budget": content("C3", *many)})


def test_findings_are_corrected_by_claim_and_model() -> None:
    check_families()


BROKEN: dict[str, Family] = {
    "both models together": lambda study, finding: (heading(study, finding.claim),),
    "each study by itself": lambda study, finding: (study, heading(study, finding.claim)),
    "all claims of a model together": lambda study, finding: family(study, finding)[:1],
    "each finding by itself": lambda study, finding: (study, finding.claim, str(id(finding))),
}


@pytest.mark.parametrize("broken", BROKEN)
def test_other_families_are_caught(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages_module, "family", BROKEN[broken])
    with pytest.raises(AssertionError):
        check_families()


def test_the_page_says_what_is_corrected_together() -> None:
    text = page({})
    assert "all tested findings of a claim on one model are corrected by Holm's method" in text


# ---- the page


@pytest.mark.slow
def test_before_results_arrive_a_line_says_so_and_nothing_else_changes(folders: dict[str, Path]) -> None:
    target = folders["drift"].parent / "RESULTS.md"
    missing = [name for name in RECIPES if name not in STORED]
    assert rebuild(folders, target) == missing
    text = target.read_text()
    line = f"No results of SmolLM2-135M-Instruct yet: {', '.join(REAL_STUDIES)}."
    assert text.count(line) == 1 and ("**Results are missing**" in text) == bool(missing)
    assert not any(f"[{study}]" in text for study in REAL_STUDIES)
    assert f"<summary>C3: {on_built_in('C3')}</summary>" in text and not re.search("<summary>.* on SmolLM2", text)


@pytest.mark.slow
def test_each_claim_has_its_verdict_on_both_models_the_real_one_first(folders: dict[str, Path]) -> None:
    keep(folders["drift"].parent, "real_losses")
    text = page(checked(folders))
    bebop = text[text.index("## Bebop") : text.index("## PAD")]
    assert "| claim | the paper | here | verdict and first number | what would decide it |" in bebop
    row = next(line for line in bebop.splitlines() if line.startswith("| **C3** "))
    own = f"built-in: **{on_built_in('C3')}**"
    assert row.index("SmolLM2: **confirmed in part, so far**") < row.index(own)
    assert f"<summary>C3: confirmed in part, so far on SmolLM2, {on_built_in('C3')} on the built-in model<" in bebop
    assert f"<summary>C1: no results yet on SmolLM2, {on_built_in('C1')} on the built-in model<" in bebop
    third = bebop[bebop.index("<summary>C3") : bebop.index("<summary>C4")]
    assert (
        third.index("\nSmolLM2\n") < third.index("- *confirmed*, real_losses") < third.index("\nThe built-in model\n")
    )
    assert re.search(r"  - .*than those of hard-label cross-entropy: 0.400 \[0.398, 0.402\]\n", third)
    assert re.search(r"^Beyond the paper: \d+ \w+.*\(\[real_losses\], ", bebop, re.MULTILINE)
    others = ", ".join(study for study in REAL_STUDIES if study != "real_losses")
    assert f"No further results of SmolLM2-135M-Instruct yet: {others}." in text


@pytest.mark.slow
def test_results_of_one_model_change_no_verdict_on_the_other(folders: dict[str, Path]) -> None:
    before = re.findall(r"built-in: \*\*.*?\|", page(checked(folders)))
    for study in REAL_STUDIES:
        keep(folders["drift"].parent, study)
    text = page(checked(folders))
    assert before and re.findall(r"built-in: \*\*.*?\|", text) == before
    assert "results of SmolLM2-135M-Instruct yet" not in text and "recipes/reproduce/real/rl/README.md" in text


def test_a_study_of_a_claim_that_is_to_come_makes_its_verdict_one_so_far(folders: dict[str, Path]) -> None:
    text = page({"real_losses": content("C3", 1e-6), "real.rl": None, "real_entropy": None})
    assert "<summary>C3: confirmed on SmolLM2, " in text, "no rule of the other two speaks of C3"
    text = page({"real_losses": content("C4", 1e-6), "real.rl": None})
    assert "<summary>C4: confirmed, so far on SmolLM2, not tested on the built-in model</summary>" in text


# ---- what decides a finding


def check_deciding(chosen: Callable[..., Part]) -> None:
    """p of what is shown is p of the finding, but for the number of chances that the rule gave it."""
    checked = 0
    for name in STORED:
        kept = record.read(within(FOLDER, name) / "results.json")
        assert kept is not None
        numbers = record.numbers_of(kept)
        for one, finding in zip(record.rules_of(name), record.judged(kept), strict=True):
            if "not measured" in (finding.untested or ""):
                continue
            part = chosen(one, numbers, finding.side)
            chances = len(one.any_of) if finding.side == "confirmed" else len(one.any_of[0])
            chances = 1 if finding.side == "refuted" and len(one.any_of) > 1 else chances
            side = 0 if finding.side == "confirmed" else 1
            shown = min(1.0, chances * p_values(part, numbers)[side])
            assert shown == pytest.approx(finding.p, rel=1e-6, abs=1e-12), (name, one.statement)
            checked += 1
    assert checked > 100


def test_what_is_shown_is_what_the_verdict_hangs_on() -> None:
    check_deciding(deciding)


@pytest.mark.parametrize("broken", [lambda one, numbers, side: one.any_of[0][0],
                                    lambda one, numbers, side: one.any_of[-1][-1]])  # fmt: skip
def test_showing_another_number_is_caught(broken: Callable[..., Part]) -> None:
    with pytest.raises(AssertionError):
        check_deciding(broken)


def test_the_size_of_an_effect_is_its_distance_from_the_bound_in_units_of_noise(tmp_path: Path) -> None:
    """Single seeds deviate by 0.001, so two of them lie sqrt(2) times that apart."""
    kept = record.read(keep(tmp_path, "real_losses") / "results.json")
    assert kept is not None
    first = record.judged(kept)[0]
    effect = effect_of("real_losses", first, kept)
    assert effect is not None and effect.name == "e2e_tv - hard_ce, accept length"
    assert effect.size == pytest.approx(0.4 / (0.001 * 2**0.5), rel=1e-3)
    kept = record.read(keep(tmp_path, "real_drafts") / "results.json")
    assert kept is not None
    effects = [effect_of("real_drafts", finding, kept) for finding in record.judged(kept)]
    worth = next(one for one in effects if one is not None and one.bound == 0.01)  # WORTH of its rules
    assert worth.noise and worth.size == pytest.approx((worth.number.value - 0.01) / worth.noise)
    assert worth.size != pytest.approx(worth.number.value / worth.noise)  # what forgets the bound
    bare = Finding(claim="C3", statement="Of no rule.", rule="r", evidence="")
    assert effect_of("real_losses", bare, kept) is None


# ---- the command


def test_the_whole_study_goes_from_the_corpus_to_all_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_studies([WHOLE]) == list(LONG) == [WHOLE, *REAL_STUDIES]
    asked: list[str] = []

    def runs(name: str, among: object) -> bool:
        asked.append(name)
        return True

    monkeypatch.setattr(reproduce, "run", runs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_all(with_studies([WHOLE])) == [] and asked == list(LONG)


def test_what_needs_a_gpu_is_left_out_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for by itself it is begun, says so in a line, and fails."""
    asked: list[str] = []
    monkeypatch.setattr(reproduce, "run", lambda name, among: not asked.append(name))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run_all(with_studies([WHOLE])) == [] and asked == [name for name in LONG if name not in NEED_GPU]
    assert capsys.readouterr().out == "".join(f"{name}: left out, as there is no GPU\n" for name in NEED_GPU)
    assert run_all([*NEED_GPU]) == [] and asked[-1:] == [*NEED_GPU]


def test_studies_are_not_begun_where_what_they_share_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def runs(name: str, among: object) -> bool:
        asked.append(name)
        return name != WHOLE

    monkeypatch.setattr(reproduce, "run", runs)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run_all([*with_studies([WHOLE]), "drift"]) == list(LONG)
    assert asked == [WHOLE, "drift"]
    assert capsys.readouterr().out == "".join(f"{name}: not begun, as {WHOLE} failed\n" for name in REAL_STUDIES)
    assert run_all(["real_losses"]) == [] and asked[-1] == "real_losses", "by itself it is asked for as it is"


def test_judging_again_takes_all_that_has_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(reproduce, "rejudge", lambda names, reason: asked.append(list(names)))
    monkeypatch.setattr(reproduce, "rebuild", lambda folders, target: [])
    assert reproduce.main(["--rejudge", "Why."]) == 0 and asked[-1] == list(STUDIES)
    assert reproduce.main(["--rejudge", "Why.", "--only", WHOLE]) == 0 and asked[-1] == list(REAL_STUDIES)
    assert reproduce.main(["--rejudge", "Why.", "--only", "real_losses"]) == 0 and asked[-1] == ["real_losses"]


def test_every_study_is_of_one_model() -> None:
    assert list(MODELS) == ["SmolLM2", "built-in"] and len(set(STUDIES)) == len(STUDIES)
    assert all(one.statement.find("SmolLM2") >= 0 for study in REAL_STUDIES[:3] for one in record.rules_of(study))


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


@pytest.mark.parametrize(("verdicts", "wanted"), TABLE)
def test_a_claim_holds_if_all_of_it_holds(verdicts: list[str], wanted: str) -> None:
    assert overall(verdicts) == wanted
    assert overall(verdicts[::-1]) == wanted


def test_a_majority_is_not_enough() -> None:
    def majority(verdicts: list[str]) -> str:
        return Counter(verdicts).most_common(1)[0][0] if verdicts else UNTESTED

    wrong = [verdicts for verdicts, wanted in TABLE if majority(verdicts) != wanted]
    assert ["confirmed", "confirmed", "refuted"] in wrong  # the table catches the broken variant


def test_the_page_has_every_finding_under_its_claim() -> None:
    contents = {
        "objectives": results(("C3", "confirmed", "Gain 0.2 [0.1, 0.3]."), ("C2", "undecided", "Between.")),
        "top_k": results(("Fig 14b", "refuted", "Loss 0.1."), ("C4", UNTESTED, "Fell.")),
        "beyond": results(("beyond", "confirmed", "Inside."), ("something new", "undecided", "Odd.")),
    }
    text = page(contents)
    for claim, verdict in {
        "C1": UNTESTED,
        "C2": "undecided",
        "C3": "confirmed",
        "C4": UNTESTED,
        "C5": UNTESTED,
    }.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| **{claim}** "))
        assert f"built-in: **{verdict}**" in row
    assert "- *not tested*, top_k, 1: the arm fell\n" in text
    assert "Gain 0.2 [0.1, 0.3] ([objectives])" in text, "the first number of a claim stands in the table"
    assert text.index("  - About C2") < text.index("  - About C3")
    assert "Further findings of the paper: 1 refuted ([top_k])." in text
    assert "Beyond the paper: 1 confirmed, 1 undecided ([beyond])." in text
    assert "[top_k]: recipes/reproduce/top_k/README.md\n" in text
    assert "missing" not in text and "Judged again" not in text
    assert all(claim.text in text for paper in PAPERS for claim in paper.claims)


def test_a_judgement_made_after_the_run_is_called_so() -> None:
    text = page({"objectives": results(("C3", "confirmed", "Gain."), post_hoc=True)})
    assert "*Judged again* by rules that are younger than the numbers: objectives." in text
    assert "at the run: refuted" in text


def test_missing_results_are_named_and_no_verdict_is_made_up() -> None:
    text = page({"objectives": results(("C3", "confirmed", "Gain.")), "drift": None})
    assert "`python -m recipes.reproduce.drift`" in text and "**Results are missing**" in text
    assert "built-in: **no results yet**" in text and "<summary>C3: confirmed, so far</summary>" in text


def test_a_recipe_that_is_not_there_fails_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run("nowhere", ["nowhere"])
    assert capsys.readouterr().out == "[1/1] nowhere: there is no such recipe yet\n"


def test_what_goes_beyond_a_paper_stands_with_that_paper() -> None:
    found = results(("beyond", "confirmed", "7.125"), ("unheard of", "confirmed", "8.125"))
    text = page({"drift": found, "pad_training": found})
    assert "\nBeyond the paper: 2 confirmed ([drift]).\n" in text
    assert "\nBeyond the paper on PAD: 2 confirmed ([pad_training]).\n" in text
    assert heading("drift", "PAD 2") == "PAD 2", "a claim is that of its paper, whatever recipe tests it"


def test_all_recipes_are_known() -> None:
    ours = {"objectives", "budget", "temperature", "boundary", "top_k", "drift", "throughput", "async_steps", "beyond"}
    others = {"pad", "pad_training", "blockpilot", "firp", "trees", "pipo", "certificate", "frontier"}
    assert set(RECIPES) == ours | others


def test_studies_of_days_run_by_name_alone() -> None:
    assert arguments([]).only is None and not set(LONG) & set(RECIPES)
    assert arguments(["--only", *LONG]).only == list(LONG)
    assert with_studies(RECIPES) == list(RECIPES)
    assert with_studies(["real"]) == list(LONG) and with_studies(["real_losses", "real"])[:2] == ["real_losses", "real"]
    assert (ROOT / "recipes" / "reproduce" / WHOLE / "__main__.py").is_file()
    assert all(rule_hash.module(name).RULES for name in REAL_STUDIES)


# ---- whose bar a finding is held against


def test_every_scope_speaks_of_findings_that_are_there() -> None:
    found = [(study, rule.statement) for study in STUDIES for rule in record.rules_of(study)]
    meant = {id(scope_of(study, statement)) for study, statement in found}
    assert [scope.statements for scope in SCOPES if id(scope) not in meant] == []
    for scope in SCOPES:
        assert all(any(name == study for name, _ in found) for study in scope.studies)


def test_a_finding_outside_the_regime_of_a_paper_decides_nothing_and_one_with_a_bar_of_ours_stands_apart() -> None:
    slow = Finding(claim="C5", statement="With a head decoding beats plain decoding.", rule="r", evidence="e", p=1e-9)
    bar = replace(slow, claim="PAD 2", statement="At tau a quarter of a token more is accepted.")
    assert counted("real_pays", slow).untested and counted("pad", bar) == bar
    assert family("real_pays", slow) == ("SmolLM2", "C5") and family("pad", bar) == ("built-in", ours("PAD 2"))
    plain = replace(slow, statement="Something else.")
    assert counted("real_pays", plain) == plain and family("pad", plain)[1] == "C5"
    changed = replace(slow, untested="the head hardly drafts")
    assert counted("real_pays", changed) == changed, "the study's own reason stays"
