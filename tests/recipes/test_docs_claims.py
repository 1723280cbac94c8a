"""Verdicts in Markdown are those of stored results, before and after those of the real model arrive."""

import shutil
from pathlib import Path

import pytest

from bebop.errors import UserError
from recipes.docs import AT_START, STUDIES, filled, free_numbers, problems, way_up
from recipes.reproduce.real_losses.findings import RULES
from tests.recipes.reproduce.made_up import keep
from tests.tree import ROOT

MARKS = (
    "claim > C3", "claim > C3 > SmolLM2 as verdict", "claim > C3 > SmolLM2 as counts", "claim > C3 > SmolLM2 as told",
    "claim > C3 > SmolLM2 as table", "claim > C1 > SmolLM2 as told", "claim > C5 > SmolLM2 as counts", "claims > Bebop",
    "claims > PAD, FIRP",
)  # fmt: skip
COUNT = sum(rule.claim == "C3" for rule in RULES)  # findings about C3 on the real model
PAGE = "# Page\n\n" + "\n\n".join(f"Then: <!-- {mark} -->0<!-- / -->" for mark in MARKS) + "\n"


@pytest.fixture
def studies(tmp_path: Path) -> Path:
    """Results of one study on the built-in model, and of one on the real one."""
    (tmp_path / "s" / "objectives").mkdir(parents=True)
    shutil.copy(STUDIES / "objectives" / "results.json", tmp_path / "s" / "objectives")
    keep(tmp_path / "s", "real_losses")
    return tmp_path / "s"


def shown(mark: str, studies: Path, up: str = "") -> str:
    """What is filled in at a mark."""
    text = filled(f"x <!-- {mark} -->0<!-- / -->", studies.parent, studies, up)
    return text.partition(" -->")[2].removesuffix("<!-- / -->")


def test_verdicts_are_filled_in_for_both_models(studies: Path) -> None:
    assert shown("claim > C3 > SmolLM2", studies) == "confirmed"
    assert shown("claim > C3 > SmolLM2 as counts", studies) == f"confirmed ({COUNT} confirmed)"
    line = shown("claim > C3 as line", studies)
    toy = shown("claim > C3 > built-in as counts", studies)
    verdict, counts = toy.split(" (", 1)
    assert verdict.endswith(", so far"), "not all of its studies are there"
    assert line == f"confirmed on SmolLM2 ({COUNT} confirmed); {verdict} on the built-in model ({counts}"
    assert shown("claim > C1", studies).startswith("no results yet on SmolLM2; ")
    told, table = (shown(f"claim > C3 > built-in as {form}", studies) for form in ("told", "table"))
    assert "| **undecided** |" in table and "| **undecided** |" not in told
    assert shown("claim > C3 > SmolLM2 as told", studies, "../").count("(../recipes/reproduce/real_losses/") == COUNT
    assert "| **C1** " in shown("claims > Bebop", studies) and "no results yet" in shown("claims > Bebop", studies)
    assert shown("claims > Bebop", studies).startswith("1 confirmed, 4 no results yet on SmolLM2; ")
    assert "SmolLM2" not in shown("claims > PAD, FIRP", studies), "they have no studies on it"


def test_a_page_of_verdicts_is_one_of_markdown_and_stays_as_it_is(studies: Path) -> None:
    page = filled(PAGE, studies.parent, studies)
    assert filled(page, studies.parent, studies) == page != PAGE
    assert list(free_numbers(page)) == [], "what is filled in needs no leave"
    assert AT_START.search(page) is None
    assert AT_START.search(page.replace("Of its findings", "\n<!-- / -->"))  # a mark that ended with its table
    assert page.count("\n\n| ") == page.count("\n\nOf its findings: ") + page.count("\n\nEvery finding: ") >= 4


def test_a_verdict_written_by_hand_is_noticed_and_one_that_results_changed(studies: Path) -> None:
    root = studies.parent
    (root / "docs").mkdir()
    page = root / "docs" / "findings.md"
    page.write_text(filled(PAGE, root, studies, "../"))
    (root / "README.md").write_text("# Read me\n")
    assert problems(root, studies) == []
    wrong = ["docs/findings.md: numbers differ from what is stored; run python -m recipes.docs"]
    right = page.read_text()
    page.write_text(right.replace("-->confirmed<!--", "-->refuted<!--"))
    assert page.read_text() != right and problems(root, studies) == wrong
    page.write_text(right)
    shutil.rmtree(studies / "real_losses")
    assert problems(root, studies) == wrong
    page.write_text(filled(right, root, studies, "../"))
    assert problems(root, studies) == [] and "-->no results yet.<!--" in page.read_text()


@pytest.mark.parametrize(
    ("mark", "line"),
    [("claim > C9", "no claim 'C9'"), ("claim > C3 > Llama", "no model 'Llama'"),
     ("claims > Bebop, TAP", "no paper 'TAP'"),
     ("claim > C3 > SmolLM2 as .3f", "'.3f' is no form"), ("claim > C3 as table", "'table' is no form"),
     ("claim > C3 > SmolLM2 > p", "no model 'SmolLM2 > p'")],
)  # fmt: skip
def test_a_mark_of_nothing_is_one_line(studies: Path, mark: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        shown(mark, studies)


def test_links_go_up_from_where_the_page_is() -> None:
    assert way_up(ROOT / "README.md") == "" and way_up(ROOT / "docs" / "findings.md") == "../"


def test_the_pages_rest_on_the_real_model_first() -> None:
    """The README has a line for each claim that a study of the real model tests, findings.md a paragraph."""
    readme, findings = (ROOT / "README.md").read_text(), (ROOT / "docs" / "findings.md").read_text()
    for claim in ("C1", "C2", "C3", "C4"):
        assert f"<!-- claim > {claim} as line -->" in readme
        marks = [f"<!-- claim > {claim} > {model} as counts -->" for model in ("SmolLM2", "built-in")]
        assert findings.index(marks[0]) < findings.index(marks[1])
