"""Numbers in Markdown come from stored files: ``python -m recipes.docs`` fills them in, ``--check`` only compares.

A number stands between two comments, which a reader of the page does not see:

    Bebop decodes <!-- cpu/rollout > rows > batch=1, arm=bebop > tokens/s as ,.0f -->569<!-- / --> tokens a second.

The first comment is a path and a format; it may not begin a line, which Markdown would take for HTML. The path begins
with a stored file: ``cpu/rollout`` is ``benchmarks/cpu/rollout.json``, ``objectives`` the ``results.json`` of that
study. A step is a key, a place in a list (``0``), or conditions that one row of a list meets (``batch=1, arm=bebop``).
The format is Python's (default ``.3g``); a number with an interval comes with it, 3.034 [2.988, 3.081], unless the path
goes on to its ``value``.

Verdicts stand between comments of the same kind, which begin with ``claim`` (``recipes/reproduce/claim_text.py``):
``claim > C3`` is one line on all models, the real one first; ``claim > C3 > SmolLM2 as table`` every finding of a claim
on one model (``built-in`` is the other), ``as told`` those that were confirmed or refuted, ``as counts`` and ``as
verdict`` a few words; ``claims > PAD, BlockPilot`` all claims of papers. Where there are no results yet, they say so.

The README holds no such comments. Between the lines ``<!-- table docs/what_to_expect.md -->`` and ``<!-- / -->`` stands
the first table of that page, without comments.

Every other number outside code has to be in ``docs/numbers.txt``: ``README.md: exit code 2`` allows a phrase in a file,
``*: SPEC 0.3`` in all of them. Names (fp32), versions of three parts and code need no entry. An entry that nothing uses
is a mistake as well. The picture of the README is drawn from stored files in the same way.

The pages of ``PLAIN`` are in plain English: their sentences have at most ``MEAN`` words on average and none has more
than ``LONGEST``. A line of a list and a cell of a table end a sentence; cells count for the longest alone.
"""

import json
import posixpath
import re
import tempfile
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bebop.bench.record import ROOT, show
from bebop.command import Parser, run_main
from bebop.errors import UserError
from recipes.picture import PICTURE, draw, same
from recipes.reproduce import rule_hash
from recipes.reproduce.claim_text import claim_text, paper_text, stored
from recipes.reproduce.pages import within

STUDIES = Path(rule_hash.__file__).parent
ALLOWED = Path("docs/numbers.txt")
# Nothing in them was measured: the mathematics, and two pages that are made from the code.
APART = [Path("docs", name) for name in ("SPEC.md", "metrics.md", "settings.md")]
# Pages whose sentences are short: new ones join, older ones as they are rewritten.
PLAIN = (
    "README.md",
    "docs/install.md",
    "docs/rewards.md",
    "docs/evaluation.md",
    "docs/python.md",
    "docs/will_it_pay.md",
    "docs/what_to_expect.md",
    "docs/release.md",
    "docs/index.md",
    "docs/tutorial.md",
    "docs/faq.md",
    "docs/glossary.md",
    "docs/decoding.md",
    "docs/api.md",
    "docs/guides/*.md",
    "docs/adding.md",
    "docs/certificate.md",
    "docs/design.md",
    "docs/environments.md",
    "docs/environments_libraries.md",
    "docs/reliability.md",
    "docs/resuming.md",
    "docs/security.md",
    "docs/testing.md",
    "docs/viewer.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "bebop/systems/*/README.md",
    "recipes/sglang/README.md",
    "recipes/vllm/README.md",
    "recipes/certify/README.md",
    "recipes/megatron/README.md",
    "recipes/verl/README.md",
)
MEAN, LONGEST = 18, 35  # words of a sentence
MARK = re.compile(r"<!-- ([^>\n]+? > [^\n]+?)(?: as (\S+))? -->(.*?)<!-- / -->", re.DOTALL)
AT_START = re.compile(r"^ {0,3}<!-- ", re.MULTILINE)
TABLE = re.compile(r"^<!-- table (\S+) -->$.*?^<!-- / -->$", re.DOTALL | re.MULTILINE)
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?:    .*\n(?:\n(?=    ))?)+")
BESIDE = (
    TABLE,
    MARK,
    FENCED,
    INDENTED,
    re.compile(r"^ *\d+\. ", re.MULTILINE),  # of a list
    re.compile(r"`[^`]*`"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"<!--.*?-->", re.DOTALL),
)
NUMBER = re.compile(r"(?<![\w.-])[-+\u2212]?\.?\d[\w.,]*")
VERSION = re.compile(r"[-+]?\d+\.\d+\.(\d+|x)[,.]*")


def documents(root: Path = ROOT) -> list[Path]:
    """Return the pages whose numbers are compared with what is stored."""
    pages = [root / "README.md", *sorted(root.glob("docs/**/*.md"))]
    return [page for page in pages if page.relative_to(root) not in APART]


# ---- filling in


def filled(text: str, root: Path = ROOT, studies: Path = STUDIES, up: str = "") -> str:
    """Return a page with every marked number and verdict as stored; ``up``: the way from the page to the root.

    Raises:
        UserError: A path leads nowhere, or to something that is no number.
    """
    results = cache(lambda: stored(studies))

    def one(found: re.Match[str]) -> str:
        path, form = found[1], found[2]
        if path.startswith("claim > "):
            shown = claim_text(path, form, results(), up)
        elif path.startswith("claims > "):
            shown = paper_text(path, results(), up)
        else:
            shown = format_number(looked_up(path, root, studies), form or ".3g", path)
        return f"<!-- {path}{f' as {form}' if form else ''} -->{shown}<!-- / -->"

    return TABLE.sub(lambda found: _copied_table(found[1], root, studies, up), MARK.sub(one, text))


def _copied_table(page: str, root: Path, studies: Path, up: str) -> str:
    """Return the first table of a page between its two markers: no comments inside, links as seen from ``up``."""
    file = root / page
    text = filled(file.read_text(), root, studies, way_up(file, root)) if file.is_file() else ""
    table = re.search(r"^\|.*\n\|[-| :]+\|\n(?:\|.*\n)+", text, re.MULTILINE)
    if table is None:
        raise UserError(f"<!-- table {page} -->: there is no such page, or no table in it")
    plain = re.sub(r"<!--.*?-->", "", table[0])
    folder = posixpath.dirname(page)
    plain = re.sub(
        r"\]\((?![a-z]+:)([^)]*)\)", lambda link: f"]({up}{posixpath.normpath(posixpath.join(folder, link[1]))})", plain
    )
    return f"<!-- table {page} -->\n\n{plain}\n<!-- / -->"


def looked_up(path: str, root: Path = ROOT, studies: Path = STUDIES) -> Any:
    """Return what stands at a path."""
    name, *steps = path.split(" > ")
    file = within(studies, name) / "results.json" if "/" not in name else root / "benchmarks" / f"{name}.json"
    if not file.is_file():
        raise UserError(f"{path!r}: there is no {file.relative_to(root) if file.is_relative_to(root) else file}")
    at: Any = json.loads(file.read_text())
    for step in steps:
        at = _step(at, step, path)
    return at


def _step(at: Any, step: str, path: str) -> Any:
    if isinstance(at, dict) and step in at:
        return at[step]
    if isinstance(at, list) and step.isdigit() and int(step) < len(at):
        return at[int(step)]
    if isinstance(at, list) and "=" in step:
        wanted = [pair.partition("=") for pair in re.split(r", (?=[a-z][\w ]*=[^ ])", step)]
        rows = [row for row in at if all(str(row.get(key)) == value for key, _, value in wanted)]
        if len(rows) == 1:
            return rows[0]
        raise UserError(f"{path!r}: {len(rows)} rows have {step}; one is needed")
    there = ", ".join(at) if isinstance(at, dict) else f"{len(at)} rows" if isinstance(at, list) else repr(at)
    raise UserError(f"{path!r}: no {step!r} among {there}")


def format_number(value: Any, form: str, path: str) -> str:
    """Return a number, or a number with its interval, as text."""
    try:
        if isinstance(value, dict) and {"value", "low", "high"} <= value.keys():
            return f"{value['value']:{form}} [{value['low']:{form}}, {value['high']:{form}}]"
        if isinstance(value, int | float) and not isinstance(value, bool):
            return f"{value:{form}}"
    except ValueError as error:
        raise UserError(f"{path!r}: {form!r} is no format: {error}") from None
    raise UserError(f"{path!r} leads to {type(value).__name__}, which is no number")


def way_up(page: Path, root: Path = ROOT) -> str:
    """Return the way from the folder of a page to the root: ``../`` for ``docs/findings.md``."""
    return "../" * (len(page.relative_to(root).parts) - 1)


# ---- what is not filled in


def free_numbers(text: str, allowed: Sequence[str] = ()) -> Iterator[tuple[int, str]]:
    """Yield line and text of every number that is neither marked, nor code, nor allowed by a phrase."""
    for pattern in BESIDE:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for phrase in allowed:
        text = re.sub(_loose(phrase), lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for found in NUMBER.finditer(text):
        if VERSION.fullmatch(found[0]) is None:
            yield text.count("\n", 0, found.start()) + 1, found[0]


def _loose(phrase: str) -> str:
    """Return a phrase as a pattern. Line breaks count as spaces; it does not begin or end within a word or number."""
    inner = r"\s+".join(map(re.escape, phrase.split()))
    return rf"(?<![\w.]){inner}(?![\w]|\.\d)" if phrase[0].isalnum() else rf"{inner}(?![\w]|\.\d)"


def allowed_phrases(root: Path = ROOT) -> list[tuple[str, str]]:
    """Return (file or ``*``, phrase) of each entry, longest first."""
    path = root / ALLOWED
    lines = [line.strip() for line in path.read_text().splitlines()] if path.is_file() else []
    entries = [line.partition(": ") for line in lines if line and not line.startswith("#")]
    if bad := [name for name, colon, phrase in entries if not colon or not phrase]:
        raise UserError(f"{ALLOWED}: {bad[0]!r} is no entry; write FILE: phrase")
    return sorted(((name, phrase) for name, _, phrase in entries), key=lambda entry: -len(entry[1]))


def problems(root: Path = ROOT, studies: Path = STUDIES) -> list[str]:
    """Return what is wrong with the pages, a line each."""
    entries, used, wrong = allowed_phrases(root), set(), []
    for page in documents(root):
        name, text = page.relative_to(root).as_posix(), page.read_text()
        if filled(text, root, studies, way_up(page, root)) != text:
            wrong.append(f"{name}: numbers differ from what is stored; run python -m recipes.docs")
        for found_at in AT_START.finditer(TABLE.sub(lambda found: "\n" * found[0].count("\n"), text)):
            line = text.count("\n", 0, found_at.start()) + 1
            wrong.append(f"{name}:{line}: begins with a comment, which Markdown takes for HTML; move a word before it")
        mine = [(file, phrase) for file, phrase in entries if file in (name, "*")]
        used |= {entry for entry in mine if re.search(_loose(entry[1]), text)}
        for line, number in free_numbers(text, [phrase for _, phrase in mine]):
            wrong.append(
                f"{name}:{line}: {number} comes from no stored file; mark it, or allow its phrase in {ALLOWED}"
            )
    return wrong + [
        f"{ALLOWED}: nothing uses {file}: {phrase}" for file, phrase in entries if (file, phrase) not in used
    ]


# ---- sentences


def sentences(text: str) -> tuple[list[str], list[str]]:
    """Return the sentences of a page: of its text and lists, and of its tables. Code in a sentence is one word."""
    for pattern, shown in ((FENCED, "\n"), (INDENTED, "\n"), (re.compile(r"<!--.*?-->", re.DOTALL), "")):
        text = pattern.sub(shown, text)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", re.sub(r"`[^`]*`", "code", text))
    text = re.sub(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)]*\)", r"\1", text)
    blocks, cells = [""], []
    for line in text.splitlines():
        if line.startswith("|"):
            cells += line.strip("|").split("|")
        elif not line.strip() or line.startswith(("#", ":::")):
            blocks.append("")
        else:
            item = re.match(r" *(?:[-*]|\d+\.) +", line)
            blocks += [line[item.end() :]] if item else [f"{blocks.pop()} {line.strip()}"]
    return _split(blocks), _split(cells)


def _split(texts: Sequence[str]) -> list[str]:
    found = [one.strip() for text in texts for one in re.split(r"(?<=[.!?])[)\"*]*\s+", text)]
    return [one for one in found if re.search(r"\w", one)]


def words(sentence: str) -> int:
    """Return the number of words."""
    return len(re.findall(r"\w[\w'/.-]*", sentence))


def long_sentences(root: Path = ROOT) -> list[str]:
    """Return a line for each plain page whose sentences are too long on average, and for each sentence too long."""
    wrong = []
    for page in (page for pattern in PLAIN for page in sorted(root.glob(pattern))):
        name, (running, cells) = page.relative_to(root).as_posix(), sentences(page.read_text())
        mean = sum(map(words, running)) / max(1, len(running))
        if mean > MEAN:
            wrong.append(f"{name}: {mean:.1f} words a sentence, {MEAN} are allowed; make two of one")
        wrong += [
            f"{name}: {words(one)} words, {LONGEST} are allowed in a sentence: {one[:60]} ..."
            for one in (*running, *cells)
            if words(one) > LONGEST
        ]
    return wrong


def stale_results() -> list[str]:
    """Return pages of results that are not what ``recipes.reproduce --rebuild`` would write."""
    from recipes.reproduce import __main__ as reproduce

    folders = {name: within(STUDIES, name) for name in reproduce.STUDIES}
    wanted = reproduce.pages(folders, ROOT / "RESULTS.md")
    stale = [path for path, text in wanted.items() if not path.is_file() or path.read_text() != text]
    return [f"{path.relative_to(ROOT)}: run python -m recipes.reproduce --rebuild" for path in stale]


def stale_picture(picture: Path = PICTURE) -> list[str]:
    """Return a line if the picture is another than the stored files make."""
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder, picture.name))
        fresh = Path(folder, picture.name).read_text()
    if picture.is_file() and same(picture.read_text(), fresh):
        return []
    return [f"{picture.name} differs from what is stored; run python -m recipes.docs"]


def main(arguments: list[str]) -> int:
    """Fill in or compare; 1 if something is wrong. ``UserError`` if a path leads nowhere."""
    parser = Parser(prog="python -m recipes.docs", description="Numbers in Markdown from stored files.")
    parser.add_argument("--check", action="store_true", help="change nothing; the status is 1 if something is wrong")
    options = parser.parse_args(arguments)
    if not options.check:
        for page in documents():
            page.write_text(filled(page.read_text(), up=way_up(page)))
        draw(PICTURE)
    wrong = problems() + long_sentences() + stale_results() + stale_picture()
    show("".join(f"{line}\n" for line in wrong) or "every number in the pages is stored, and sentences are short\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    run_main(main)
