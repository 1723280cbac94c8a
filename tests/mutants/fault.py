"""Planted faults: the rows of ``faults/*.yaml``, and the place of each in the sources as they are now.

A file of faults covers one area. Its top-level keys are addresses, with one fault per row below them::

    chain_verify:
    - [sampling/ties-accepted, '* q < p)', '* q <= p)', test_the_output_distribution_is_the_target]

Neither moving nor reformatting code or tests invalidates a row:

- An address is a qualified name (``chain_verify``, ``Engine.submit``, ``MAX_ROWS``, ``Options.limit``) in any of the
  product sources. A file name is written in front of it only where several definitions of that name contain the old
  text (``verify:chain_verify``, ``kernels/verify:chain_verify``). ``verify:`` means the module's statements without
  a name, such as imports.
- The old text matches regardless of line breaks, spaces, comments and a trailing comma before a closing bracket. It
  begins and ends at the bounds of a word, and has to occur exactly once among all definitions with that address.
- ``new`` replaces it. Further lines of ``new`` are indented relative to the line in which the old text begins.
- A test is the name of a function (``test_x``, ``test_x[case]``) or, for a whole file, the name of that file. As with
  addresses, a file (``test_verify::test_x``) or its folder (``trainer/test_loss``) in front resolves ambiguity.
- A row may end with ``{equivalent: why}``: no test can notice this fault.
"""

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from tests.tree import ROOT, files

FAULTS = Path(__file__).parent / "faults"
GAP = r"\s*(?:#.*\n\s*)*"  # what may stand between two tokens
TEST = re.compile(r"^(?:async )?def (test_\w+)", re.MULTILINE)


class PatternNotUnique(Exception):
    """A fault's address and old text do not lead to exactly one place in the sources."""


class UnresolvedTest(Exception):
    """The name of a test does not lead to exactly one test function or file."""


@dataclass(frozen=True, slots=True)
class Place:
    """Characters ``start`` to ``end`` of the source ``file`` (relative to the root)."""

    file: str
    start: int
    end: int


class Code:
    """Python sources by path, indexed by the qualified names that they define."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self.texts = texts
        self.definitions: dict[str, list[Place]] = defaultdict(list)
        for file, text in texts.items():
            lines = [0]
            for line in text.splitlines(keepends=True):
                lines.append(lines[-1] + len(line))
            for name, first, last in _definitions(ast.parse(text).body):
                self.definitions[name].append(Place(file, lines[first - 1], lines[last]))

    def find(self, address: str, old: str) -> list[Place]:
        """Return every occurrence of ``old`` in the definitions at ``address``."""
        module, colon, name = address.rpartition(":")
        places = [p for p in self.definitions.get(name, []) if not colon or _is_called(p.file, module)]
        wanted = _pattern(old)
        found = [
            Place(place.file, place.start + match.start(), place.start + match.end())
            for place in places
            for match in wanted.finditer(self.texts[place.file][place.start : place.end])
        ]
        return list(dict.fromkeys(found))  # a statement with others inside, as `if`, and these may both be indexed


@dataclass(frozen=True, slots=True)
class Fault:
    """One change of the product code, and the tests that have to notice it."""

    name: str
    address: str
    old: str
    new: str
    tests: tuple[str, ...]  # as in the row: see ``node_ids``
    equivalent: str = ""  # why no test can notice the fault; empty if the tests have to

    def place(self, code: Code | None = None) -> Place:
        """Return the only place that the fault fits in ``code`` (the product if None), or raise PatternNotUnique."""
        places = (code or product()).find(self.address, self.old)
        if len(places) != 1:
            where = ", ".join(sorted({place.file for place in places}))
            raise PatternNotUnique(
                f"{self.name}: {self.old!r} occurs {len(places)} times in the definitions of {self.address!r}"
                + (f" ({where}): make the old text longer or the address narrower" if places else
                   ": give the row the name and the text that the code has now")
            )  # fmt: skip
        return places[0]

    def mutated(self, code: Code | None = None) -> str:
        """Return the source of the file at ``place`` with the fault in it."""
        place = self.place(code)
        text = (code or product()).texts[place.file]
        indent = re.match(r"[ ]*", text[text.rfind("\n", 0, place.start) + 1 :])
        assert indent is not None
        return text[: place.start] + self.new.replace("\n", "\n" + indent[0]) + text[place.end :]

    def node_ids(self) -> tuple[str, ...]:
        """Return the tests as pytest is given them, or raise UnresolvedTest."""
        try:
            return tuple(map(node_id, self.tests))
        except UnresolvedTest as error:
            raise UnresolvedTest(f"{self.name}: {error}") from None


@cache
def product() -> Code:
    """Return the sources of the project, each file once, without its tests."""
    paths = [path for path in files() if path.suffix == ".py" and path.parts[0] != "tests"]
    texts = {path.as_posix(): (ROOT / path).read_text() for path in paths}
    gc.disable()  # collections among the many nodes of syntax trees double the time
    try:
        return Code(texts)
    finally:
        gc.enable()


@cache
def load(folder: Path = FAULTS) -> tuple[Fault, ...]:
    """Return all faults in ``folder``, file by file."""
    found: list[Fault] = []
    for path in sorted(folder.glob("*.yaml")):
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(path.read_text())
        # Key by key, as a dict would drop the first rows of an address that occurs twice.
        for key, rows in loader.get_single_node().value:
            for name, old, new, *tests in loader.construct_object(rows, deep=True):
                options = tests.pop() if isinstance(tests[-1], dict) else {}
                found.append(Fault(name, key.value, old, new, tuple(tests), **options))
    names = [fault.name for fault in found]
    assert len(set(names)) == len(names), f"two faults of one name: {sorted({n for n in names if names.count(n) > 1})}"
    return tuple(found)


@cache
def node_id(test: str) -> str:
    """Return the node id of ``test``, such as tests/test_a.py::test_x[case] of ``test_x[case]``."""
    module, colons, rest = test.rpartition("::")
    name, bracket, case = rest.partition("[")
    by_name, paths = _tests()
    found = [f"{p}::{name}{bracket}{case}" for p in by_name.get(name, []) if not colons or _is_called(p, module)]
    if not colons:
        found += [path for path in paths if _is_called(path, test)]
    if len(found) != 1:
        what = f"several tests: {', '.join(found)}" if found else "no test"
        elsewhere = "" if found or name not in by_name else f"; {name} is in {', '.join(by_name[name])}"
        raise UnresolvedTest(f"{test!r} is the name of {what}{elsewhere}")
    return found[0]


@cache
def _tests() -> tuple[dict[str, list[str]], list[str]]:
    """Return the files of every test function by its name, and all files of tests.

    Read line by line: syntax trees of all tests would take a second.
    """
    by_name: dict[str, list[str]] = defaultdict(list)
    paths = [path.as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    paths = sorted(path.removeprefix(f"{ROOT.as_posix()}/") for path in paths)
    for path in paths:
        for name in TEST.findall((ROOT / path).read_text()):
            by_name[name].append(path)
    return by_name, paths


def _is_called(path: str, name: str) -> bool:
    """Whether ``name`` is the end of ``path`` without its suffix; a package is called as its folder."""
    return f"/{path}".removesuffix(".py").removesuffix("/__init__").endswith(f"/{name}")


def _definitions(body: Iterable[ast.AST], scope: str = "", inside: type[ast.AST] = ast.Module) -> Iterator[
    tuple[str, int, int]
]:  # fmt: skip
    """Yield the qualified name, first line and last line of all definitions in ``body``.

    A module's statements without a name have the name ''. Assignments count in modules and classes, not in functions.
    """
    for node in body:
        names = []
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [node.name]
            yield from _definitions(node.body, f"{scope}{node.name}.", type(node))
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and inside in (ast.Module, ast.ClassDef):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [
                n.id
                for target in targets
                for n in ast.walk(target)
                if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
            ]
        else:
            for part in ("body", "orelse", "finalbody", "handlers", "cases"):
                yield from _definitions(getattr(node, part, ()), scope, inside)
        if isinstance(node, ast.stmt) and (names or inside is ast.Module):
            first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
            for name in names or [""]:
                yield f"{scope if names else ''}{name}", first, node.end_lineno or first


@cache
def _pattern(old: str) -> re.Pattern[str]:
    """Return a pattern for ``old`` in any formatting."""
    tokens = re.findall(r"\w+|\S", old)
    wanted = ""
    for index, token in enumerate(tokens):
        if index and token in (")", "]", "}"):
            wanted += rf"{GAP}(?:,{GAP})?"
        elif token == "," and tokens[index + 1 : index + 2] in ([")"], ["]"], ["}"]):
            continue  # the trailing comma is part of the bracket's pattern
        elif index:
            wanted += GAP
        wanted += re.escape(token)
    left, right = (r"(?<!\w)" if re.match(r"\w", tokens[0]) else ""), (r"(?!\w)" if re.match(r"\w", tokens[-1]) else "")
    return re.compile(left + wanted + right)
