"""What MkDocs does not do by itself for the site: pages from outside of docs/, and links to the glossary.

- The Markdown pages of the repository that pages of docs/ link to become pages of the site, under their own paths.
  Results of studies and benchmarks stay out of the search, which would find little else.
- A link to any other file leads to the repository's address, if pyproject.toml has one, and is plain text if not.
- The first use of each term of ``docs/glossary.md`` in a page is a link to it, with the definition as its tooltip.
"""

import html
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from posixpath import normpath, relpath
from typing import Any

from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel

from tests.lint import copy_packages

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("*.md", "bebop/systems/*/README.md", "recipes/**/*.md", "benchmarks/**/*.md")
PICTURES = ("recipes/**/*.svg", "recipes/**/*.png", "benchmarks/**/*.svg", "benchmarks/**/*.png")
UNSEARCHED = re.compile(r"benchmarks/|recipes/reproduce/|RESULTS\.md|CHANGELOG\.md")
GUIDES = re.compile(r"guides/|(faq|tutorial|decoding|glossary|resuming|viewer|certificate)\.md")  # found before others
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
TIGHT_LIST = re.compile(r"^((?![-*|#>]|\d+\. | ).+)\n(?=- |1\. )", re.MULTILINE)  # a list on GitHub, a text to Markdown
NAME = re.compile(r"(?<=<td><code>)[^<]+(?=</code>)")
CODE = re.compile(r"(^ *(`{3,}).*?^ *\2 *$)", re.DOTALL | re.MULTILINE)
EXAMPLE = re.compile(r"^( +)>>> .*\n(?: +(?!\"{3})\S.*\n)*", re.MULTILINE)
TAG = re.compile(r"(<[^>]+>)")
UNTOUCHED = ("a", "code", "pre", "h1", "h2", "h3", "h4", "h5", "h6", "th", "script", "style", "svg", "button", "label")


@event_priority(100)  # before mkdocstrings reads its settings
def on_config(config: Any) -> Any:
    """Take the repository's address from pyproject.toml, and show mkdocstrings the sources."""
    config.plugins["mkdocstrings"].config.handlers["python"]["paths"] = [sources().name]
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
    config.repo_url = next((urls[name] for name in ("Repository", "Source", "Homepage") if name in urls), None)
    config.watch += [str(ROOT / "recipes"), str(ROOT / "bebop/systems")]
    return config


@cache
def sources() -> "tempfile.TemporaryDirectory[str]":
    """Return a folder with a copy of the packages.

    mkdocstrings follows no links, which ``bebop/kernels`` and others are; in the copy they are ordinary packages.
    Examples of docstrings become blocks of code, as Markdown takes ``>>>`` for three quotations.
    """
    folder = tempfile.TemporaryDirectory()
    copy_packages(ROOT, Path(folder.name))
    for path in Path(folder.name).rglob("*.py"):
        if EXAMPLE.search(text := path.read_text()):
            path.write_text(EXAMPLE.sub(_example, text))
    return folder


def _example(found: re.Match[str]) -> str:
    code = re.sub(r"(?m)^ *(>>>|\.\.\.) ?| *# doctest: \+SKIP$", "", found[0])
    lines = ["```python", *code.rstrip().split("\n"), "```"]
    return "\n".join(found[1] + line for line in lines) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Add the pages and pictures of the repository that lie outside of docs/."""
    for pattern in (*OUTSIDE, *PICTURES):
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if name != "README.md":  # index.md stands for it
                added = InclusionLevel.NOT_IN_NAV
                files.append(File.generated(config, name, abs_src_path=str(path), inclusion=added))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Turn links from places in the repository into links between pages of the site."""
    if UNSEARCHED.match(page.file.src_uri):
        page.meta["search"] = {"exclude": True}
    elif GUIDES.match(page.file.src_uri):
        page.meta["search"] = {"boost": 4}
    parts = CODE.split(markdown)  # text, fenced block, its fence, text, ...
    for i in range(0, len(parts), 3):
        parts[i] = TIGHT_LIST.sub(r"\1\n\n", parts[i])
        parts[i] = LINK.sub(lambda found: _link(found, page.file.src_uri, config.repo_url, files), parts[i])
    return "".join(part for i, part in enumerate(parts) if i % 3 != 2)


def _link(found: re.Match[str], page: str, repository: str | None, files: Files) -> str:
    """Return a link as the site needs it; one that leads nowhere stays, for MkDocs to complain of."""
    mark, text, target = found.groups()
    path, _, anchor = target.partition("#")
    if not path or re.match(r"[a-z]+:", target):
        return found[0]
    here = page if files.get_file_from_path(page).generated_by else f"docs/{page}"
    there = normpath(os.path.join(os.path.dirname(here), path))
    if there == "README.md":
        return f"[{text}]({relpath('index.md', os.path.dirname(page) or '.')})"
    name = there.removeprefix("docs/")
    if files.get_file_from_path(name) is not None:
        return f"{mark}[{text}]({relpath(name, os.path.dirname(page) or '.')}{'#' * bool(anchor)}{anchor})"
    if (ROOT / there).exists() and not there.endswith(".md"):
        return f"[{text}]({repository}/blob/main/{there})" if repository else text
    return found[0]


@cache
def terms() -> dict[str, tuple[str, str]]:
    """Return each term of the glossary with its anchor and the text of its definition."""
    found = re.findall(r"^### ([^\n]+)\n\n(.+?)\n\n", (ROOT / "docs/glossary.md").read_text() + "\n\n", re.M | re.S)
    plain = {term: re.sub(r"\[([^\]]*)\]\([^)]*\)|[`*]", r"\1", text).replace("\n", " ") for term, text in found}
    return {term.lower(): (re.sub(r"[^\w\- ]", "", term.lower()).replace(" ", "-"), plain[term]) for term in plain}


@cache
def pattern() -> re.Pattern[str]:
    """Return what finds a term, or its plural, in a text; longer terms first."""
    words = "|".join(re.escape(term).replace(r"\ ", r"\s+") for term in sorted(terms(), key=len, reverse=True))
    return re.compile(rf"(?<![\w/.=-])({words})s?(?![\w/=-]|\.\w)", re.IGNORECASE)


def on_page_content(content: str, page: Any, config: Any, files: Files) -> str:
    """Link the first use of each term to the glossary; headings, code and links stay as they are.

    Long names in the first column of a table may break after a dot or a slash.
    """
    content = NAME.sub(lambda found: re.sub(r"([./])(?=\w)", r"\1<wbr>", found[0]), content)
    if page.file.src_uri == "glossary.md" or UNSEARCHED.match(page.file.src_uri):
        return content
    glossary = relpath("glossary.html", os.path.dirname(page.file.dest_uri) or ".")
    seen: set[str] = set()

    def link(found: re.Match[str]) -> str:
        term = " ".join(found[1].lower().split())
        if term in seen:
            return found[0]
        seen.add(term)
        anchor, meaning = terms()[term]
        return f'<a class="term" href="{glossary}#{anchor}" title="{html.escape(meaning)}">{found[0]}</a>'

    return "".join(pattern().sub(link, text) if open_ else text for text, open_ in _texts(content))


def _texts(content: str) -> Iterator[tuple[str, bool]]:
    """Yield the pieces of a page, and whether each is a text in which terms may be linked."""
    inside = 0
    for piece in TAG.split(content):
        if piece.startswith("<"):
            name = re.sub(r"[</]+", "", piece).split()[0].rstrip(">") if len(piece) > 2 else ""
            if name in UNTOUCHED:
                inside += -1 if piece.startswith("</") else 0 if piece.endswith("/>") else 1
            yield piece, False
        else:
            yield piece, inside == 0
