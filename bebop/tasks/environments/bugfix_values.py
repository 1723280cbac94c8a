"""Arguments for the functions of packages with a bug, drawn by kind, and what a package makes of them.

Packages of our own are run here, in this process: what a bug makes of a loop is bounded by a count of its rounds. What
a model wrote never is.
"""

import ast
import builtins
import random
import string
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

WORDS = "ash birch cedar elm fir hazel larch maple oak pine rowan willow yew".split()
ROUNDS = 20_000  # of all loops during one call
KNOWN = {name: getattr(builtins, name) for name in "all any bool chr dict enumerate int len list max min ord range "
         "sorted str sum tuple zip".split()}  # fmt: skip
Call = tuple[str, str, str]  # module, function, arguments as Python writes them


def _integers(draw: random.Random, low: int, high: int, most: int) -> list[int]:
    return [draw.randint(low, high) for _ in range(draw.choice((0, 1, 2, most, most, most, most)))]


def _word(draw: random.Random) -> str:
    return "".join(draw.choice("aabbcz") for _ in range(draw.choice((0, 1, 3, 5, 8))))


def _mirror(draw: random.Random) -> str:
    half = "".join(draw.choice("abAB1 ") for _ in range(draw.randint(0, 4)))
    text = half + draw.choice(("", "c", "dc")) + half[::-1]
    return text.swapcase() if draw.random() < 0.5 else text


def _tokens(draw: random.Random) -> list[str]:
    tokens = [str(draw.randint(0, 9))]
    for _ in range(draw.randint(0, 4)):
        tokens += [str(draw.randint(0, 9)), draw.choice("+-*")]
    return tokens


def _spans(draw: random.Random) -> list[tuple[int, int]]:
    starts = [draw.randint(0, 30) for _ in range(draw.randint(0, 5))]
    return [(start, start + draw.randint(0, 6)) for start in starts]


KINDS: dict[str, Callable[[random.Random], Any]] = {
    "number": lambda draw: draw.randint(-10, 50),
    "low": lambda draw: draw.randint(-5, 10),
    "high": lambda draw: draw.randint(11, 40),
    "small": lambda draw: draw.randint(0, 9),
    "count": lambda draw: draw.randint(1, 4),
    "corner": lambda draw: draw.randint(0, 2),
    "large": lambda draw: draw.randint(0, 60),
    "base": lambda draw: draw.randint(2, 9),
    "coins": lambda draw: draw.sample((1, 2, 5, 7, 10), draw.randint(1, 3)),
    "values": lambda draw: _integers(draw, -6, 9, 9),
    "ordered": lambda draw: sorted(_integers(draw, 0, 9, 7)),
    "word": _word,
    "mirror": _mirror,
    "text": lambda draw: " ".join(draw.choice(WORDS) for _ in range(draw.randint(0, 8))),
    "brackets": lambda draw: "".join(draw.choice(("()", "[]", "([", "])", "x", "(a)")) for _ in range(3)),
    "settings": lambda draw: ";".join(draw.choice(("a=1", "b = 2", "a=x=y", "c", " d=")) for _ in range(3)),
    "path": lambda draw: "/".join(draw.choice(("a", "b", "..", ".", "")) for _ in range(5)),
    "tokens": _tokens,
    "pairs": lambda draw: [(draw.choice(WORDS[:5]), draw.randint(-2, 4)) for _ in range(draw.randint(0, 7))],
    "moves": lambda draw: [(draw.choice(("in", "out")), draw.randint(1, 12)) for _ in range(7)],
    "spans": _spans,
    "grid": lambda draw: [[draw.randint(0, 9) for _ in range(3)] for _ in range(draw.randint(3, 4))],
}


def drawn(draw: random.Random, kinds: Sequence[str]) -> str:
    """Arguments of these kinds, as Python writes them: ``([3, -1], 4)``."""
    return repr(tuple(KINDS[kind](draw) for kind in kinds))


class _Endless(BaseException):
    """More rounds than ``ROUNDS``. No ``Exception``: a package must not catch it."""


class _Counted(ast.NodeTransformer):
    """Counts the rounds of loops."""

    def visit_For(self, node: ast.For) -> ast.For:
        """A round of a for loop."""
        self.generic_visit(node)
        node.body = [*ast.parse("_round()").body, *node.body]
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        """A round of a while loop."""
        self.generic_visit(node)
        node.body = [*ast.parse("_round()").body, *node.body]
        return node


class Package:
    """A package of our own, from the text of its modules."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        """``modules``: name -> source; they import each other by ``from .name import ...``."""
        self._left = ROUNDS
        self._sources = dict(modules)
        self._modules: dict[str, types.SimpleNamespace] = {}

    def _module(self, name: str) -> types.SimpleNamespace:
        """A module, imported when it is wanted."""
        if name not in self._modules:
            scope = {"__builtins__": {**KNOWN, "__import__": self._import}, "_round": self._round, "__name__": name}
            tree = ast.fix_missing_locations(_Counted().visit(ast.parse(self._sources[name])))
            exec(compile(tree, name, "exec"), scope)
            self._modules[name] = types.SimpleNamespace(**scope)
        return self._modules[name]

    def _import(self, name: str, scope: Any = None, local: Any = None, wanted: Any = (), level: int = 0) -> Any:
        assert level == 1, "packages import from themselves alone"
        return self._module(name)

    def _round(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise _Endless

    def result(self, call: Call) -> str:
        """What a call returns, as Python writes it, or ``raised NAME``, or ``runs for ever``."""
        module, function, arguments = call
        self._left = ROUNDS
        try:
            return repr(getattr(self._module(module), function)(*ast.literal_eval(arguments)))
        except _Endless:
            return "runs for ever"
        except Exception as error:
            return f"raised {type(error).__name__}"


def name_of(draw: random.Random) -> str:
    """A package's name: ``hazel_k4``."""
    return f"{draw.choice(WORDS)}_{draw.choice(string.ascii_lowercase)}{draw.randint(2, 9)}"
