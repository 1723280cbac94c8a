"""What stands in the pages: links lead somewhere, files that are named exist, and no page grows over its length."""

import re
from pathlib import Path

import pytest

from recipes.docs import sentences
from tests.documents.pages import anchors, pages, without_code
from tests.tree import ROOT

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
FILE = re.compile(r"`([\w.-]+(?:/[\w.-]+)*(?:/|\.(?:py|md|yaml|toml|sh|txt|svg|json)))`")
LENGTHS = {"README.md": 130, "ARCHITECTURE.md": 120, "CONTRIBUTING.md": 60}
START, ANSWER, SENTENCES = 250, 120, 2  # words of the start page and of an answer; sentences of a definition
# Pages that tell where things are, and the folders that their names may be relative to.
GUIDES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/adding.md", "docs/resuming.md")
GUIDES += ("docs/tutorial.md", "docs/faq.md", "docs/decoding.md")
GUIDES += tuple(page for page in pages() if page.startswith("docs/guides/"))
GUIDES += tuple(f"recipes/{name}/README.md" for name in ("sglang", "verl", "megatron", "tiny"))
# What a run writes, and what an example of a page is called.
WRITTEN = ("report.html", "results.json", "config.yaml", "overrides.json", "identity.json", "machine.json", "pids.txt")
WRITTEN += ("tensorboard/", "wandb/", "checkpoints/step_000020/", "policy/", "model/", "reward.py")


def broken_links(page: str, text: str, root: Path = ROOT) -> list[str]:
    """Relative links that lead to no file or to no heading."""
    found = []
    for target in LINK.findall(without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (root / page).parent / path if path else root / page
        there = text if not path else file.read_text() if file.suffix == ".md" and file.is_file() else ""
        if (path and not file.exists()) or (anchor and anchor not in anchors(there)):
            found.append(f"{page}: {target}")
    return found


def missing_files(page: str, text: str, root: Path = ROOT) -> list[str]:
    """Names of files and folders in a page that are neither in the project nor written by a run."""
    folders = ("", "bebop", "rollout", "rollout/decoding", "trainer", "recipes", "tests")
    places = [(root / page).parent, *(root / folder for folder in folders)]
    named = FILE.findall(without_code(text))
    return sorted({n for n in named if n not in WRITTEN and not any((place / n).exists() for place in places)})


@pytest.mark.parametrize("page", pages())
def test_links_lead_somewhere(page: str) -> None:
    assert broken_links(page, (ROOT / page).read_text()) == []


@pytest.mark.parametrize("page", GUIDES)
def test_files_that_are_named_exist(page: str) -> None:
    assert missing_files(page, (ROOT / page).read_text()) == []


@pytest.mark.parametrize(("page", "most"), LENGTHS.items())
def test_pages_keep_their_length(page: str, most: int) -> None:
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_the_readme_is_read_in_three_minutes() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700
    assert [mark.split()[1] for mark in re.findall(r"<!--.*?-->", text)] == ["table", "/"]


def parts(page: str) -> dict[str, str]:
    """The text below each heading of the third level."""
    return dict(re.findall(r"^### (.+)\n((?:(?!#).*\n)*)", (ROOT / page).read_text() + "\n", re.MULTILINE))


def test_definitions_and_answers_are_short() -> None:
    glossary, faq = parts("docs/glossary.md"), parts("docs/faq.md")
    assert len(glossary) > 50 and len(faq) > 15
    assert {term for term, text in glossary.items() if not 1 <= len(sentences(text)[0]) <= SENTENCES} == set()
    assert {question for question, text in faq.items() if len(text.split()) > ANSWER} == set()
    assert {question for question, text in faq.items() if "](" not in text} == set()
    assert len(without_code((ROOT / "docs/index.md").read_text()).split()) <= START


def test_planted_faults_are_noticed(tmp_path: Path) -> None:
    (tmp_path / "there.md").write_text("# A title, *twice* `x`\n\n```bash\n# no heading\n```\n")
    right = "[a](there.md) [b](there.md#a-title-twice-x) [c](https://example.org/x) [d](#here)\n\n## Here\n"
    assert broken_links("page.md", right, tmp_path) == []
    for wrong in ("[a](gone.md)", "[a](there.md#no-heading)", "![a](gone.svg)", "[a](#there)"):
        assert broken_links("page.md", wrong, tmp_path), wrong
    assert missing_files("page.md", "`there.md` and `report.html`, not `a.b` or `1/2`", tmp_path) == []
    assert missing_files("page.md", "`gone.md`, `gone/`", tmp_path) == ["gone.md", "gone/"]
