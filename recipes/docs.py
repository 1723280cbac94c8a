"""Fill stored numbers into Markdown: ``python -m recipes.docs`` writes them, ``--check`` only compares.

Numbers stand in tables. A table is written between two comment lines, and the first line describes its contents:

    <!-- rows cpu/precision > rows where dtype=bfloat16 sorted by model | model | mean .4f | TV .4f: total variation -->
    <!-- / -->

``rows`` writes one line per row of a stored list. The path begins with a stored file: ``cpu/precision`` is
``benchmarks/cpu/precision.json``, ``objectives`` the ``results.json`` of that study. A step is a key, a place in a list
(``0``), or conditions that exactly one row of a list meets (``batch=1, arm=bebop``). ``where`` selects rows by
conditions (``batch=1 or 8, arm!=plain``), and ``sorted by`` orders them (``batch, -TV`` ends with the smallest TV). A
path to a mapping is also a list: its keys are the column ``name``, its values the column ``value``.

A column is a key. These may follow: a Python format (default ``.3g``), the keys of an interval
(``ratio .1f [low to high]``), other words for its values (``model (tiny = built-in; smollm2 = SmolLM2)``) and
``: HEADING``. A missing value is a dash. A number stored with an interval is shown with it: 3.03 [2.99, 3.08].

``table`` is for numbers of several files. Its lines are the table, with paths in braces:

    <!-- table
    What | SmolLM2 | Built-in
    Faster at batch 8 | {real_pays > numbers > batch 8: faster as .2f} | {cpu/rollout > rows > 3 > x plain as .2f}
    -->
    <!-- / -->

A verdict has a path too (``recipes/reproduce/claim_text.py``). ``claim > C3 as line`` is one line on all models, the
real model first. ``claim > C3 > SmolLM2 as counts`` and ``as verdict`` are a few words on one model (``built-in`` is
the other).
``<!-- table docs/what_to_expect.md -->`` copies the first table of that page; the README does this.

Outside these tables and code, prose may hold whole numbers up to ``WHOLE``. A larger number, a sign, a decimal point, a
unit after it (``UNIT``) and a cell with only a number are mistakes: such numbers are mostly measured. Write a
definition, a setting or a version as code (`0.05`). Names (fp32), versions of three parts and years of citations are
allowed. The picture of the README is drawn from stored files in the same way.

The pages of ``PLAIN`` are in plain English: their sentences have at most ``MEAN`` words on average and none has more
than ``LONGEST``. A line of a list and a cell of a table end a sentence; cells count only for the longest.
"""

import json
import posixpath
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from bebop.bench.record import ROOT, show
from bebop.command import Parser, run_main
from bebop.errors import UserError
from recipes.picture import PICTURE, draw, same
from recipes.reproduce import rule_hash
from recipes.reproduce.claim_text import claim_text, stored
from recipes.reproduce.pages import within

STUDIES = Path(rule_hash.__file__).parent
# Pages without measurements: the mathematics, and two pages generated from the code.
APART = [Path("docs", name) for name in ("SPEC.md", "metrics.md", "settings.md")]
# Pages whose sentences must be short: every new page, and older pages once they are rewritten.
PLAIN = (
    "README.md",
    "docs/install.md",
    "docs/rewards.md",
    "docs/evaluation.md",
    "docs/findings.md",
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
WHOLE = 32  # the largest whole number that needs no file
AT_START = re.compile(r"^ {0,3}<!-- ", re.MULTILINE)
BLOCK = re.compile(r"^<!-- (table|rows)\s+(.*?)\s*-->$(.*?)^<!-- / -->$", re.DOTALL | re.MULTILINE)
IN_CELL = re.compile(r"\{([^{}\n]+? > [^{}\n]+?)(?: as (\S+))?\}")
COLUMN = re.compile(
    r"(?P<key>.+?)(?: (?P<form>\+?,?(?:\.\d+[efg%]|d)))?(?: \[(?P<low>[^\]]+?) to (?P<high>[^\]]+)\])?"
    r"(?: \((?P<words>.+ = .+)\))?(?:: (?P<heading>.+))?"
)
CONDITION = re.compile(r"(?P<key>[^=]+?)(?P<sign>!?=)(?P<values>.*)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
INDENTED = re.compile(r"(?<=\n\n)(?:    .*\n(?:\n(?=    ))?)+")
BESIDE = (
    BLOCK,
    FENCED,
    INDENTED,
    re.compile(r"^ *\d+\. ", re.MULTILINE),  # of a list
    re.compile(r"`[^`]*`"),
    re.compile(r"\]\([^)]*\)"),
    re.compile(r"<!--.*?-->", re.DOTALL),
    re.compile(r"(?<=et al\.)\s+\(?\d{4}|arXiv \d{4}\.\d{5}"),  # citations
)
NUMBER = re.compile(r"(?<![\w.#-])[-+\u2212]?\.?\d[\w.,]*")
VERSION = re.compile(r"[-+]?\d+\.\d+\.(\d+|x)")
PLACE = re.compile(r"\d+(st|nd|rd|th)")
UNIT = re.compile(r"\s?(%|\u00d7|(x|times|[m\u00b5u]?s|min|h|seconds|minutes|hours|nats|points|tokens|[KMG]i?B)\b)")


def documents(root: Path = ROOT) -> list[Path]:
    """Return the pages whose numbers are compared with the stored ones."""
    pages = [root / "README.md", *sorted(root.glob("docs/**/*.md"))]
    return [page for page in pages if page.relative_to(root) not in APART]


# ---- filling in


def filled(text: str, root: Path = ROOT, studies: Path = STUDIES, up: str = "") -> str:
    """Return a page with every table, number and verdict as stored; ``up`` is the path from the page to the root.

    Raises:
        UserError: A path leads nowhere, or to a value that is no number.
    """
    results = cache(lambda: stored(studies))

    def in_cell(found: re.Match[str]) -> str:
        path, form = found[1], found[2]
        if path.startswith("claim > "):
            return claim_text(path, form, results())
        return cell_text(looked_up(path, root, studies), form, path)

    def block(found: re.Match[str]) -> str:
        kind, spec = found[1], found[2]
        if "<!--" in found[3]:
            raise UserError(
                f"<!-- {kind} {spec.partition(chr(10))[0]}: there is no <!-- / --> line before the next comment"
            )
        begin = found[0][: found.start(3) - found.start()]
        if kind == "rows":
            head, *columns = (" ".join(part.split()) for part in spec.split("|"))
            table = aligned(rows_table(head, columns, lambda path: looked_up(path, root, studies)))
        elif re.fullmatch(r"\S+\.md", spec):
            table = _copied_table(spec, root, studies, up)
        else:
            cells = [[cell.strip() for cell in line.split("|")] for line in spec.splitlines()]
            if odd := [line for line in cells if len(line) != len(cells[0])]:
                raise UserError(
                    f"<!-- table: {' | '.join(odd[0])!r} has {len(odd[0])} cells, its heading {len(cells[0])}"
                )
            table = aligned([[IN_CELL.sub(in_cell, cell) for cell in line] for line in cells])
        return f"{begin}\n\n{table}\n<!-- / -->"

    return BLOCK.sub(block, text)


def aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table, its heading first, padded to columns of equal width so that its source is readable."""
    width = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
    shown = ["| " + " | ".join(map(str.ljust, line, width)) + " |\n" for line in lines]
    return "".join([shown[0], "|" + "|".join("-" * (each + 2) for each in width) + "|\n", *shown[1:]])


def rows_table(head: str, columns: Sequence[str], look: Callable[[str], Any]) -> list[list[str]]:
    """Return the cells of ``<!-- rows HEAD | COLUMN | ... -->``, headings first."""
    parts = re.fullmatch(r"(?P<path>.+?)(?: where (?P<where>.+?))?(?: sorted by (?P<by>.+))?", head)
    assert parts is not None, "any text matches"
    path, at = parts["path"], look(parts["path"])
    if isinstance(at, dict):
        at = [{**(each if isinstance(each, dict) else {}), "name": name, "value": each} for name, each in at.items()]
    if not isinstance(at, list) or not at or not all(isinstance(row, dict) for row in at) or not columns:
        raise UserError(f"<!-- rows {head}: a path to a list of rows and at least one column are needed")
    keys = list(dict.fromkeys(key for row in at for key in row))

    def get(row: dict[str, Any], key: str) -> Any:
        if key not in keys:
            raise UserError(f"{path!r}: no row has {key!r}; there are {', '.join(keys)}")
        return row.get(key)

    rows = at
    for condition in re.split(r", (?=[A-Za-z][^,=]*!?=)", parts["where"] or ""):
        if not condition:
            continue
        met = CONDITION.fullmatch(condition)
        if met is None:
            raise UserError(f"<!-- rows {head}: {condition!r} is no condition; write key=value or key!=value")
        wanted = met["values"].split(" or ")
        rows = [row for row in rows if (str(get(row, met["key"])) in wanted) == (met["sign"] == "=")]
    if not rows:
        raise UserError(f"<!-- rows {head}: no row meets {parts['where']}")
    for by in reversed((parts["by"] or "").split(", ")):
        if by:
            rows = sorted(rows, key=lambda row: get(row, by.removeprefix("-")), reverse=by.startswith("-"))
    made = [_column(spec, rows, get, path) for spec in columns]
    return [list(line) for line in zip(*made, strict=True)]


def _column(
    spec: str, rows: Sequence[dict[str, Any]], get: Callable[[dict[str, Any], str], Any], path: str
) -> list[str]:
    """Return the heading of a column and its cells."""
    parts = COLUMN.fullmatch(spec)
    assert parts is not None, "any text matches"
    words = dict(pair.split(" = ") for pair in (parts["words"] or "").split("; ") if pair)
    cells = []
    for row in rows:
        value = get(row, parts["key"])
        if parts["low"]:
            value = {"value": value, "low": get(row, parts["low"]), "high": get(row, parts["high"])}
            value = value if None not in value.values() else value["value"]
        cells.append(words.get(str(value)) or cell_text(value, parts["form"], f"{path} > {parts['key']}"))
    return [parts["heading"] or parts["key"], *cells]


def cell_text(value: Any, form: str | None, path: str) -> str:
    """Return a value as the text of a cell: a number by its format, a dash for a missing measurement."""
    if value is None or value == "":
        return "\u2013"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, str):
        return value.replace("|", "\\|")
    return format_number(value, form or (",d" if isinstance(value, int) else ".3g"), path)


def _copied_table(page: str, root: Path, studies: Path, up: str) -> str:
    """Return the first table of a page without comments; its links are relative to ``up``."""
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
    heading, _, *lines = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in plain.splitlines())
    return aligned([heading, *lines])


def looked_up(path: str, root: Path = ROOT, studies: Path = STUDIES) -> Any:
    """Return the stored value at a path."""
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
    """Return the relative path from the folder of a page to the root: ``../`` for ``docs/findings.md``."""
    return "../" * (len(page.relative_to(root).parts) - 1)


# ---- what is not filled in


def free_numbers(text: str) -> Iterator[tuple[int, str]]:
    """Yield line and text of every number that prose may not hold: see the rule at the head of this file."""
    for pattern in BESIDE:
        text = pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    for found in NUMBER.finditer(text):
        number = found[0].rstrip(".,")
        after = text[found.start() + len(number) :]
        in_cell = text[: found.start()].rstrip(" ").endswith("|") and after.lstrip(" ").startswith("|")
        small = number.isdecimal() and int(number) <= WHOLE and UNIT.match(after) is None and not in_cell
        if not small and VERSION.fullmatch(number) is None and PLACE.fullmatch(number) is None:
            yield text.count("\n", 0, found.start()) + 1, number


def problems(root: Path = ROOT, studies: Path = STUDIES) -> list[str]:
    """Return the mistakes on the pages, one line each."""
    wrong = []
    for page in documents(root):
        name, text = page.relative_to(root).as_posix(), page.read_text()
        if filled(text, root, studies, way_up(page, root)) != text:
            wrong.append(f"{name}: numbers differ from what is stored; run python -m recipes.docs")
        for found_at in AT_START.finditer(BLOCK.sub(lambda found: "\n" * found[0].count("\n"), text)):
            line = text.count("\n", 0, found_at.start()) + 1
            wrong.append(f"{name}:{line}: begins with a comment, which Markdown takes for HTML; move a word before it")
        for line, number in free_numbers(text):
            wrong.append(f"{name}:{line}: {number} in prose; put a measured number in a table, any other in code")
    return wrong


# ---- sentences


def sentences(text: str) -> tuple[list[str], list[str]]:
    """Return the sentences of a page: first of its text and lists, then of its tables. Inline code is one word."""
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
    """Return a line if RESULTS.md differs from the output of ``recipes.reproduce --rebuild``."""
    from recipes.reproduce import __main__ as reproduce

    text = reproduce.page(reproduce.checked({name: within(STUDIES, name) for name in reproduce.STUDIES}))
    fresh = (ROOT / "RESULTS.md").read_text() == text
    return [] if fresh else ["RESULTS.md: run python -m recipes.reproduce --rebuild"]


def stale_picture(picture: Path = PICTURE) -> list[str]:
    """Return a line if the picture differs from the one that the stored files make."""
    with tempfile.TemporaryDirectory() as folder:
        draw(Path(folder, picture.name))
        fresh = Path(folder, picture.name).read_text()
    if picture.is_file() and same(picture.read_text(), fresh):
        return []
    return [f"{picture.name} differs from what is stored; run python -m recipes.docs"]


def main(arguments: list[str]) -> int:
    """Fill in or compare; return 1 if there are mistakes. Raise ``UserError`` if a path leads nowhere."""
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
