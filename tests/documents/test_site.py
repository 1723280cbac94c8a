"""The documentation site builds without a warning, asks no other host for anything, and its search works offline."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.browser import CHROMIUM
from tests.tree import ROOT, SKIPPED

LOADED = re.compile(r"""<(?:script|link|img|iframe)[^>]*(?:src|href)=["']?(?:https?:)?//""")
WANTED = ("index", "tutorial", "faq", "glossary", "settings", "metrics", "api", "decoding", "guides/models")
WANTED += ("recipes/sglang/index", "bebop/systems/block/index", "ARCHITECTURE")
pytestmark = pytest.mark.slow  # building the site takes seconds


def build(target: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout as ``make docs`` does."""
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "-f",
        "docs/site/mkdocs.yml",
        "-d",
        str(target),
    ]
    variables = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=variables, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    done = build(target)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def test_pages_are_there_and_ask_no_other_host(site: Path) -> None:
    assert [name for name in WANTED if not (site / f"{name}.html").is_file()] == []
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    assert {page.name: found for page in pages if (found := LOADED.findall(page.read_text()))} == {}
    assert LOADED.search('<script src="https://example.org/x.js">') and LOADED.search("<link href=//example.org/x.css>")


def test_terms_lead_to_the_glossary(site: Path) -> None:
    glossary = set(re.findall(r'<h3 id="([^"]+)"', (site / "glossary.html").read_text()))
    linked = re.findall(
        r'<a class="term" href="../glossary.html#([^"]+)" title="(.)', (site / "guides/history.html").read_text()
    )
    names = [name for name, _ in linked]
    assert len(names) > 8 and len(set(names)) == len(names) and set(names) <= glossary


def test_long_names_in_tables_break_after_dots_alone(site: Path) -> None:
    page = (site / "settings.html").read_text()
    assert "<td><code>rollout.<wbr>sglang.<wbr>tensor_parallel</code></td>" in page


def test_parts_of_the_package_are_documented(site: Path) -> None:
    page = (site / "api.html").read_text()
    for name in ("bebop.kernels.verify.chain_verify", "bebop.trajectory.SamplingParams", "bebop.certify.api.certify"):
        assert f'id="{name}"' in page


FAULTS = (  # a file, what is added to it, and what the build says of it
    ("docs/faq.md", "[no page](guides/none.md)", "'guides/none.md'"),
    ("docs/faq.md", "[no heading](tutorial.md#none)", "'tutorial.md#none'"),
    ("docs/faq.md", "[no file of the project](../bebop/none.py)", "'../bebop/none.py'"),
    ("docs/new.md", "# A page that is not in the navigation", "- new.md"),
)
MISSING = (("docs/api.md", "::: bebop.kernels.verify.none", "bebop.kernels.verify.none could not be found"),)


@pytest.mark.parametrize("faults", [FAULTS, MISSING])
def test_planted_faults_end_the_build(tmp_path: Path, faults: Sequence[tuple[str, str, str]]) -> None:
    root = tmp_path / "checkout"
    shutil.copytree(ROOT, root, symlinks=True, ignore=shutil.ignore_patterns(*SKIPPED))
    for file, line, _ in faults:
        with (root / file).open("a") as page:
            page.write(f"\n{line}\n")
    done = build(tmp_path / "site", root)
    assert done.returncode == 1
    assert [said for _, _, said in faults if said not in done.stdout + done.stderr] == []


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_search_works_from_files_without_a_network(site: Path) -> None:
    from playwright.sync_api import sync_playwright

    asked: list[str] = []
    errors: list[str] = []
    with sync_playwright() as playwright:
        arguments = ["--no-sandbox", "--allow-file-access-from-files"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=arguments)
        context = browser.new_context(viewport={"width": 390, "height": 800})
        context.set_offline(True)
        context.on("request", lambda request: asked.append(request.url))
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(str(error)))
        for name in WANTED:
            page.goto((site / f"{name}.html").as_uri())
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{name} scrolls sideways"
        page.set_viewport_size({"width": 1200, "height": 800})
        page.fill(".md-search__input", "acceptance falling")
        found = page.locator(".md-search-result__link").first
        found.wait_for(timeout=30_000)
        assert "Why is acceptance falling?" in page.locator(".md-search-result__list").inner_text()
        browser.close()
    assert errors == []
    assert [url for url in asked if not url.startswith(("file:", "data:", "blob:"))] == []
