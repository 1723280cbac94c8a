"""Numbers and verdicts in Markdown are those of stored files, and no others stand there; a planted fault of each."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from bebop.errors import UserError
from recipes import docs
from recipes.docs import ROOT, STUDIES, filled, free_numbers, problems, way_up
from recipes.reproduce.real_losses.findings import RULES
from recipes.reproduce.scope import scope_of
from tests.recipes.reproduce.synthetic import keep

PAGE = """# Page

Bebop decodes much; `--rounds 7`, Qwen3, SmolLM2-135M, version 2.13.0, batch 8, K + 1, the 3rd, vllm#55005.
Karvonen et al. 2025 and arXiv 2606.12370 say so.

<!-- rows cpu/speed > rows where arm=bebop or plain, batch!=4 sorted by -batch
  | batch | tokens/s ,.1f [least to most]: speed | arm (bebop = ours) | holds -->
<!-- / -->

<!-- table
what | value
gain | about {study > numbers > a - b as .2f} tokens
first | {cpu/speed > rows > batch=1, arm=bebop > tokens/s as ,.0f}
-->
<!-- / -->

<!-- rows study > numbers | name | value .1f -->
<!-- / -->

    python -m bebop.run trainer.steps=20

```python
x = 17
```
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with a benchmark, a study, a page that is filled in, and nothing allowed."""
    rows = [
        {"batch": 1, "arm": "bebop", "tokens/s": 1234.5, "least": 1200, "most": 1300.04, "holds": False},
        {"batch": 2, "arm": "bebop", "tokens/s": 9, "least": None, "most": None, "holds": True},
        {"batch": 3, "arm": "plain", "tokens/s": None},
        {"batch": 4, "arm": "plain", "tokens/s": 5},
        {"batch": 5, "arm": "other", "tokens/s": 5},
    ]
    number = {"value": 0.0551, "low": 0.0021, "high": 0.1079}
    for path, kept in (
        ("benchmarks/cpu/speed.json", {"rows": rows}),
        ("s/study/results.json", {"numbers": {"a - b": number}}),
    ):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text(json.dumps(kept))
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(filled(PAGE, tmp_path, tmp_path / "s"))
    return tmp_path


def found(project: Path) -> list[str]:
    return problems(project, project / "s")


def test_tables_are_filled_in_and_filling_in_again_changes_nothing(project: Path) -> None:
    text = (project / "README.md").read_text()
    assert filled(text, project, project / "s") == text
    assert found(project) == []
    tables = ["".join(line for line in part.splitlines(True) if line[0] == "|") for part in text.split("<!-- / -->")]
    assert tables[0] == (
        "| batch | speed                      | arm   | holds |\n"
        "|-------|----------------------------|-------|-------|\n"
        "| 3     | \u2013                          | plain | \u2013     |\n"
        "| 2     | 9.0                        | ours  | yes   |\n"
        "| 1     | 1,234.5 [1,200.0, 1,300.0] | ours  | no    |\n"
    )
    assert "| gain  | about 0.06 [0.00, 0.11] tokens |\n| first | 1,234 " in tables[1]
    assert "| a - b | 0.1 [0.0, 0.1] |" in tables[2]


def test_a_stored_number_that_changed_is_noticed(project: Path) -> None:
    path = project / "benchmarks/cpu/speed.json"
    path.write_text(path.read_text().replace("1234.5", "1300"))
    assert found(project) == ["README.md: numbers differ from what is stored; run python -m recipes.docs"]


@pytest.mark.parametrize(
    "planted",
    [
        "It takes 3.5 ms.",
        "It gave -1 to +2 %.",
        "| 0.44 |",
        "twice: .439",
        "A gain of 2,213 tokens",
        "0.2.",
        "- 7e-6",
        "95 %",
        "It takes 12 ms.",
        "2x as fast",
        "as many as 3 times",
        "| 7 |",
        "33 of them",
    ],
)
def test_a_number_from_nowhere_is_noticed(project: Path, planted: str) -> None:
    page = project / "README.md"
    page.write_text(page.read_text() + f"\n{planted}\n")
    assert found(project) and all("in prose" in line for line in found(project))
    assert f"README.md:{page.read_text().count(chr(10))}: " in found(project)[0]
    (project / "docs" / "more.md").write_text(f"# More\n\n{planted}\n")
    assert any(line.startswith("docs/more.md:3: ") for line in found(project))


def test_code_marks_and_names_are_no_numbers() -> None:
    assert list(free_numbers(PAGE)) == []
    assert [n for _, n in free_numbers("at K = 300, not K300, `300` or [x](a/300.md)\n\n1. 32, 33, 1e-4")] == [
        "300",
        "33",
        "1e",
    ]


def test_a_line_that_begins_with_a_mark_is_noticed(project: Path) -> None:
    page = project / "README.md"
    page.write_text(page.read_text().replace("so.\n", "so.\n<!-- a word -->\n"))
    assert [line.partition(": ")[2][:6] for line in found(project)] == ["begins"]


@pytest.mark.parametrize(
    ("path", "line"),
    [("cpu/none > rows", "no benchmarks/cpu/none.json"),
     ("cpu/speed > rows > arm=bebop > batch", "2 rows have arm=bebop"),
     ("cpu/speed > rows > 0 > tokens", "no 'tokens' among batch, arm, tokens/s"), ("cpu/speed > rows", "leads to list"),
     ("cpu/speed > rows > 7 > batch", "no '7' among 5 rows")],
)  # fmt: skip
def test_a_path_to_nowhere_is_one_line(project: Path, path: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        filled(f"<!-- table\na\n{{{path}}}\n-->\n<!-- / -->", project, project / "s")
    with pytest.raises(UserError, match="is no format"):
        filled("<!-- table\na\n{cpu/speed > rows > 0 > batch as .3q}\n-->\n<!-- / -->", project, project / "s")


@pytest.mark.parametrize(
    ("spec", "line"),
    [("rows cpu/none > rows | arm", "no benchmarks/cpu/none.json"),
     ("rows cpu/speed > rows | arms", "no row has 'arms'; there are batch, arm, tokens/s"),
     ("rows cpu/speed > rows where arm=bop | arm", "no row meets arm=bop"),
     ("rows cpu/speed > rows where arms=bop | arm", "no row has 'arms'"),
     ("rows cpu/speed > rows where arm | arm", "'arm' is no condition"),
     ("rows cpu/speed > rows sorted by size | arm", "no row has 'size'"),
     ("rows cpu/speed > rows", "at least one column"), ("rows cpu/speed > rows > 0 > batch | arm", "a list of rows"),
     ("rows study > numbers > a - b > value | name", "a list of rows"),
     ("table\na | b\nc\n", "'c' has 1 cells, its heading 2"),
     ("rows cpu/speed > rows | arm -->\n<!-- rows cpu/speed > rows | arm", "before the next comment")],
)  # fmt: skip
def test_a_table_of_nothing_is_one_line(project: Path, spec: str, line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        filled(f"<!-- {spec} -->\n<!-- / -->\n", project, project / "s")
    assert "\n" not in str(error.value)


def test_sentences_are_counted() -> None:
    text = (
        "# A heading of five words\n\nOne two `three four`. Five [six\nseven](x.md) eight.\n\n- nine\n- ten\n\n"
        "| eleven. Twelve | <!-- no word --> |\n|---|---|\n\n```bash\nmake test\n```\n"
    )
    assert docs.sentences(text) == (["One two code.", "Five six seven eight.", "nine", "ten"], ["eleven.", "Twelve"])
    assert [docs.words(one) for one in ("One two code.", "p(x) is 0.5, the head's")] == [3, 6]


def test_a_page_with_long_sentences_is_noticed(project: Path) -> None:
    (project / "README.md").unlink()  # its sentence is too long
    page, words = project / "docs/faq.md", [f"word{i}" for i in range(docs.LONGEST + 1)]
    for text, wrong in (
        (f"{' '.join(words[: docs.MEAN])}. {' '.join(words[: docs.MEAN])}.", []),
        (f"{' '.join(words[: docs.MEAN])}. {' '.join(words[: docs.MEAN + 2])}.", ["19.0 words a sentence"]),
        (f"Yes. Yes. {' '.join(words)}.", [f"{docs.LONGEST + 1} words, {docs.LONGEST} are allowed"]),
        (f"Yes.\n\n| a | {' '.join(words)} |", [f"{docs.LONGEST + 1} words, {docs.LONGEST} are allowed"]),
    ):
        page.write_text(f"{text}\n")
        said = docs.long_sentences(project)
        assert len(said) == len(wrong) and all(part in line for part, line in zip(wrong, said, strict=True)), text


# ---- the real pages


def test_sentences_of_the_plain_pages_are_short() -> None:
    assert docs.long_sentences() == []
    assert [pattern for pattern in docs.PLAIN if not list(ROOT.glob(pattern))] == []


def test_every_number_of_the_pages_is_stored() -> None:
    assert problems() == []
    assert docs.stale_results() == []


@pytest.mark.slow
def test_the_real_pages_are_held(tmp_path: Path) -> None:
    """In a copy: a marked number by hand is noticed, and so is one in the table that the README copies."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "benchmarks", tmp_path / "benchmarks")
    text = (ROOT / "README.md").read_text()
    (tmp_path / "README.md").write_text(text)
    assert problems(tmp_path, STUDIES) == []
    page = (tmp_path / "docs" / "what_to_expect.md").read_text()
    number = re.search(r"0\.\d\d \[0\.\d\d, \d\.\d\d\]", page)
    assert number is not None and number[0] in text
    differ = "{}: numbers differ from what is stored; run python -m recipes.docs"
    (tmp_path / "README.md").write_text(text.replace(number[0], "9.99"))
    assert problems(tmp_path, STUDIES) == [differ.format("README.md")]
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "docs" / "what_to_expect.md").write_text(page.replace(number[0], "9.99"))
    assert problems(tmp_path, STUDIES) == [differ.format("docs/what_to_expect.md")]
    with pytest.raises(UserError, match="no such page, or no table in it"):
        filled("<!-- table docs/gone.md -->\n<!-- / -->\n", tmp_path, STUDIES)


@pytest.mark.slow
def test_a_page_of_results_changed_by_hand_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    from recipes.reproduce import __main__ as reproduce

    real = reproduce.page
    monkeypatch.setattr(reproduce, "page", lambda contents: real(contents).replace("undecided", "confirmed"))
    assert "RESULTS.md: run python -m recipes.reproduce --rebuild" in docs.stale_results()


@pytest.mark.slow
def test_a_picture_that_is_not_drawn_from_what_is_stored_is_noticed(tmp_path: Path) -> None:
    assert docs.stale_picture() == []
    picture, text = tmp_path / docs.PICTURE.name, docs.PICTURE.read_text()
    for changed in (
        text.replace(">1.44<", ">1.54<"),
        re.sub(r"L (\d+)\.", lambda n: f"L {int(n[1]) + 1}.", text, count=1),
        text.replace("bebop_adaptive", "another"),
        text[: len(text) // 2],
    ):
        assert changed != text
        picture.write_text(changed)
        assert docs.stale_picture(picture) == [
            f"{picture.name} differs from what is stored; run python -m recipes.docs"
        ]
    picture.write_text(re.sub(r"(\d\.\d{5})\d", r"\g<1>0", text))  # rounding
    assert docs.stale_picture(picture) == []


def test_the_makefile_has_the_check() -> None:
    shown = subprocess.run(
        ["make", "-n", "-o", "venv", "docs-check"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "python -m recipes.docs --check" in shown.stdout


# ---- verdicts, before and after those of the real model arrive

OUTSIDE = sum(scope_of("real_losses", rule.statement) is not None for rule in RULES if rule.claim == "C3")
COUNT = sum(rule.claim == "C3" for rule in RULES) - OUTSIDE  # findings about C3 on the real model that test it
VERDICTS = """# Page

<!-- table
claim | SmolLM2 | built-in
C3 | {claim > C3 > SmolLM2 as counts} | {claim > C3 > built-in as verdict}
all | {claim > C3 as line} | {claim > C1 as line}
-->
<!-- / -->
"""


@pytest.fixture
def studies(tmp_path: Path) -> Path:
    """Results of one study on the built-in model, and of one on the real one."""
    (tmp_path / "s" / "objectives").mkdir(parents=True)
    shutil.copy(STUDIES / "objectives" / "results.json", tmp_path / "s" / "objectives")
    keep(tmp_path / "s", "real_losses")
    return tmp_path / "s"


def shown(path: str, studies: Path) -> str:
    """What stands in a cell."""
    text = filled(f"<!-- table\nhead\n{{{path}}}\n-->\n<!-- / -->", studies.parent, studies)
    return text.splitlines()[-3].strip("| ")


def test_verdicts_are_filled_in_for_both_models(studies: Path) -> None:
    real = "confirmed in part, so far"  # one of its studies is there
    assert OUTSIDE and shown("claim > C3 > SmolLM2", studies) == real
    counted = f"{real} ({COUNT} confirmed, {OUTSIDE} not tested)"
    assert shown("claim > C3 > SmolLM2 as counts", studies) == counted
    line = shown("claim > C3 as line", studies)
    toy = shown("claim > C3 > built-in as counts", studies)
    verdict, counts = toy.split(" (", 1)
    assert verdict.endswith(", so far"), "not all of its studies are there"
    of_real = f"{real} on SmolLM2 ({COUNT} confirmed, {OUTSIDE} not tested)"
    assert line == f"{of_real}; {verdict} on the built-in model ({counts}"
    assert shown("claim > C1 as line", studies).startswith("no results yet on SmolLM2; ")


def test_a_verdict_written_by_hand_is_noticed_and_one_that_results_changed(studies: Path) -> None:
    root = studies.parent
    (root / "docs").mkdir()
    page = root / "docs" / "findings.md"
    page.write_text(filled(VERDICTS, root, studies, "../"))
    (root / "README.md").write_text("# Read me\n")
    assert problems(root, studies) == []
    wrong = ["docs/findings.md: numbers differ from what is stored; run python -m recipes.docs"]
    right = page.read_text()
    page.write_text(right.replace("| confirmed in part, so far (", "| refuted (", 1))
    assert page.read_text() != right and problems(root, studies) == wrong
    page.write_text(right)
    shutil.rmtree(studies / "real_losses")
    assert problems(root, studies) == wrong
    page.write_text(filled(right, root, studies, "../"))
    assert problems(root, studies) == [] and "| no results yet " in page.read_text()


@pytest.mark.parametrize(
    ("mark", "line"),
    [("claim > C9", "no claim 'C9'"), ("claim > C3 > Llama", "no model 'Llama'"),
     ("claim > C3 > SmolLM2 as .3f", "'.3f' is no form"), ("claim > C3 as table", "'table' is no form"),
     ("claim > C3 > SmolLM2 > p", "no model 'SmolLM2 > p'")],
)  # fmt: skip
def test_a_mark_of_nothing_is_one_line(studies: Path, mark: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        shown(mark, studies)


def test_links_go_up_from_where_the_page_is() -> None:
    assert way_up(ROOT / "README.md") == "" and way_up(ROOT / "docs" / "findings.md") == "../"


def test_the_pages_rest_on_the_real_model_first() -> None:
    """what_to_expect.md has a line for each claim that a study of the real model tests, so has findings.md."""
    summary, findings = ((ROOT / "docs" / f"{page}.md").read_text() for page in ("what_to_expect", "findings"))
    for claim in ("C1", "C2", "C3", "C4"):
        assert f"{{claim > {claim} as line}}" in summary
        assert f"{{claim > {claim} > SmolLM2 as counts}} | {{claim > {claim} > built-in as counts}}" in findings
