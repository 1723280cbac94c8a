"""The Markdown pages of the project, and the code in them."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.tree import ROOT, files

FENCE = re.compile(r"^(?P<mark>`{3,})(?P<language>.*)$")
COMMANDS = ("bash", "indented")  # languages whose lines are commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Code in a page: ``Block(page="README.md", line=14, language="bash", text="make test\\n")``."""

    page: str
    line: int  # of its first line of code
    language: str  # as behind the fence; "indented" for four spaces
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages(root: Path = ROOT) -> list[str]:
    """Every page, relative to the root."""
    return [path.as_posix() for path in files(root) if path.suffix == ".md"]


def blocks(page: str, text: str) -> Iterator[Block]:
    """The code of a page, in its order. ``ValueError`` for a fence that does not end."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        fence = FENCE.match(lines[at])
        if fence is not None:
            end = next((i for i in range(at + 1, len(lines)) if lines[i].strip() == fence["mark"]), None)
            if end is None:
                raise ValueError(f"{page}:{at + 1}: this block does not end")
            yield _block(page, at + 1, fence["language"].strip(), lines[at + 1 : end])
            at = end + 1
        elif lines[at].startswith("    ") and (at == 0 or not lines[at - 1].strip()):
            end = at
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            yield _block(page, at, "indented", [line[4:] for line in lines[at:end]])
            at = end
        else:
            at += 1


def _block(page: str, at: int, language: str, lines: list[str]) -> Block:
    return Block(page=page, line=at + 1, language=language, text="".join(f"{line}\n" for line in lines))


def without_code(text: str) -> str:
    """A page with its blocks and comments blanked, line by line."""
    lines = text.splitlines()
    for block in blocks("", text):
        for i in range(block.line - 1, block.line - 1 + block.text.count("\n")):
            lines[i] = ""
    blanked = re.sub(r"<!--.*?-->", lambda found: re.sub(r"[^\n]", " ", found[0]), "\n".join(lines), flags=re.DOTALL)
    return blanked


def anchors(text: str) -> set[str]:
    """What ``#...`` may name in a page, as GitHub makes it from headings."""
    found: dict[str, int] = {}
    for heading in re.findall(r"^#{1,6} +(.*?) *$", without_code(text), re.MULTILINE):
        plain = re.sub(r"\]\([^)]*\)|[\[`*]", "", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
        if found[slug]:
            found[f"{slug}-{found[slug]}"] = 0
    return set(found)


def lines_of(page: str, heading: str) -> list[str]:
    """Return the code blocks under one heading of a page, each as one line: lines that end in ``\\`` go on."""
    text = (ROOT / page).read_text()
    part = text.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [block.text.replace("\\\n", " ").strip() for block in blocks(page, part)]
