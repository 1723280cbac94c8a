"""Small packages with bugs, drawn from (index, seed): the files shown, the hidden tests, and the repairs.

Functions come from ``lists.py`` and ``texts.py`` with new numbers, and longer functions are composed of them. A bug is
a change of one function's syntax tree (``mutations.py``). Every package has been run: without its bugs it passes the
hidden tests, and each bug alone fails at least one of them.

These packages are our own and run here, in this process; a limit on loop rounds stops the endless loops of a bug. Code
that a model wrote never runs here.
"""

import ast
import builtins
import copy
import difflib
import inspect
import random
import re
import string
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from recipes.environments.bugfix import lists, texts
from recipes.environments.bugfix.mutations import Mutation, mutations

SOURCES = (lists, texts)
MODULES = ("core", "tools", "parts", "shapes", "texts")
REPORT = "report"
SHOWN_CALLS, HIDDEN_CALLS, BUGGY_CALLS = 1, 3, 12  # of a function; of one with a bug
TRIES = 200
Functions = dict[str, list[ast.FunctionDef]]  # module -> its functions
WORDS = "ash birch cedar elm fir hazel larch maple oak pine rowan willow yew".split()
ROUNDS = 20_000  # of all loops during one call
KNOWN = {name: getattr(builtins, name) for name in "all any bool chr dict enumerate int len list max min ord range "
         "sorted str sum tuple zip".split()}  # fmt: skip
Call = tuple[str, str, str]  # module, function, arguments as Python writes them


# ---- arguments, and what a package makes of them


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


def draw_arguments(draw: random.Random, kinds: Sequence[str]) -> str:
    """Return random arguments of these kinds as Python source: ``([3, -1], 4)``."""
    return repr(tuple(KINDS[kind](draw) for kind in kinds))


class _Endless(BaseException):
    """Raised after more rounds than ``ROUNDS``. It is no ``Exception``, so that a package cannot catch it."""


class _Counted(ast.NodeTransformer):
    """Inserts a counter into the rounds of loops."""

    def visit_For(self, node: ast.For) -> ast.For:
        """Count the rounds of a for loop."""
        self.generic_visit(node)
        node.body = [*ast.parse("_round()").body, *node.body]
        return node

    def visit_While(self, node: ast.While) -> ast.While:
        """Count the rounds of a while loop."""
        self.generic_visit(node)
        node.body = [*ast.parse("_round()").body, *node.body]
        return node


class Package:
    """Package of our own, made from the text of its modules."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        """Keep ``modules``, name -> source; they import each other by ``from .name import ...``."""
        self._left = ROUNDS
        self._sources = dict(modules)
        self._modules: dict[str, types.SimpleNamespace] = {}

    def _module(self, name: str) -> types.SimpleNamespace:
        """Return a module, imported at its first use."""
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
        """Return the repr of a call's result, or ``raised NAME``, or ``runs for ever``."""
        module, function, arguments = call
        self._left = ROUNDS
        try:
            return repr(getattr(self._module(module), function)(*ast.literal_eval(arguments)))
        except _Endless:
            return "runs for ever"
        except Exception as error:
            return f"raised {type(error).__name__}"


def draw_name(draw: random.Random) -> str:
    """Return a random package name: ``hazel_k4``."""
    return f"{draw.choice(WORDS)}_{draw.choice(string.ascii_lowercase)}{draw.randint(2, 9)}"


# ---- packages


def _library() -> dict[str, tuple[ast.FunctionDef, tuple[str, ...]]]:
    """Return all functions with the kinds of their arguments."""
    found = {}
    for module in SOURCES:
        for node in ast.parse(inspect.getsource(module)).body:
            if isinstance(node, ast.FunctionDef):
                found[node.name] = (node, module.CALLS[node.name])
    return found


LIBRARY = _library()
NUMBERS = {name: (value - 1, value + 4) for module in SOURCES for name, value in vars(module).items()
           if name.isupper() and isinstance(value, int)}  # fmt: skip


class _Numbers(ast.NodeTransformer):
    """Replaces the names in capitals by a package's own numbers, also in docstrings."""

    def __init__(self, numbers: Mapping[str, int]) -> None:
        self.numbers = numbers

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Replace a name in code."""
        return ast.Constant(self.numbers[node.id]) if node.id in self.numbers else node

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        """Replace the names in a docstring."""
        if not isinstance(node.value, str) or len(node.value) < 4:
            return node
        return ast.Constant(re.sub(r"\b[A-Z]{3,}\b", lambda m: str(self.numbers.get(m[0], m[0])), node.value))


def _functions(draw: random.Random, modules: int, each: int) -> tuple[Functions, dict[str, tuple[str, ...]]]:
    """Return a package without bugs, and the kinds of its functions' arguments."""
    numbers = _Numbers({name: draw.randint(*bounds) for name, bounds in NUMBERS.items()})
    names = draw.sample(sorted(set(LIBRARY)), min(modules * each, len(LIBRARY)))
    steps, ends = draw.sample(lists.STEPS, 2), draw.sample(lists.ENDS, 2)
    names = [*steps, *ends, *(n for n in names if n not in (*steps, *ends))][: max(modules * each, 4)]
    draw.shuffle(names)
    package: Functions = {module: [] for module in draw.sample(MODULES, modules)}
    for place, name in enumerate(names):
        made = numbers.visit(copy.deepcopy(LIBRARY[name][0]))
        list(package.values())[place % modules].append(ast.fix_missing_locations(made))
    package[REPORT] = [_composed(draw, "summary", steps, ends), _composed(draw, "outlook", steps[::-1], ends[::-1])]
    kinds = {name: LIBRARY[name][1] for name in names} | {"summary": ("values",), "outlook": ("values",)}
    return package, kinds


def _composed(draw: random.Random, name: str, steps: Sequence[str], ends: Sequence[str]) -> ast.FunctionDef:
    """Return a longer function that calls functions of other modules."""
    factor, rest = draw.randint(2, 9), draw.randint(1, 9)
    chain = f"{ends[0]} of the {steps[1]} of the {steps[0]} of the values"
    source = f'''
def {name}(values: list[int]) -> int:
    """{factor} times {chain}, less {ends[1]} of the values, and {rest} more."""
    changed = {steps[0]}(values)
    changed = {steps[1]}(changed)
    return {factor} * {ends[0]}(changed) - {ends[1]}(values) + {rest}
'''
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef), "as written above"
    return node


def _written(package: Functions) -> dict[str, str]:
    """Return the text of each module."""
    home = {function.name: module for module, functions in package.items() for function in functions}
    texts = {}
    for module, functions in package.items():
        used = {n.id for f in functions for n in ast.walk(f) if isinstance(n, ast.Name)}
        needed: dict[str, list[str]] = {}
        for name in sorted(used & set(home)):
            if home[name] != module:
                needed.setdefault(home[name], []).append(name)
        head = [f"from .{other} import {', '.join(names)}" for other, names in sorted(needed.items())]
        parts = ["\n".join(head)] if head else []
        texts[module] = "\n\n\n".join([*parts, *(ast.unparse(function) for function in functions)]) + "\n"
    return texts


def _with_bug(package: Functions, name: str, bug: Mutation) -> Functions:
    """Return the package with one function changed."""
    return {module: [bug.applied(f) if f.name == name else f for f in functions]
            for module, functions in package.items()}  # fmt: skip


def _calls(draw: random.Random, package: Functions, kinds: Mapping[str, tuple[str, ...]], buggy: set[str],
           right: Package) -> list[tuple[Call, str]]:  # fmt: skip
    """Return calls of every function with their expected results."""
    found: dict[Call, str] = {}
    for module, functions in package.items():
        for function in functions:
            wanted = BUGGY_CALLS if function.name in buggy else HIDDEN_CALLS + SHOWN_CALLS
            for _ in range(wanted):
                call = (module, function.name, draw_arguments(draw, kinds[function.name]))
                if not (result := right.result(call)).startswith(("raised", "runs")):
                    found[call] = result
    return list(found.items())


def _wrong(package: Package, calls: Iterable[tuple[Call, str]]) -> list[tuple[Call, str]]:
    """Return the calls whose result is not the expected one."""
    return [(call, result) for call, result in calls if package.result(call) != result]


def make_question(index: int, seed: int, *, modules: int, functions: int, bugs: int) -> dict[str, Any]:
    """Return the question of this number, as ``Bugfix.item`` describes it."""
    draw = random.Random(f"bugfix {seed} {index}")
    for _ in range(TRIES):
        package, kinds = _functions(draw, modules, functions)
        names = draw.sample([f.name for fs in package.values() for f in fs], bugs)
        by_name = {f.name: f for fs in package.values() for f in fs}
        planted = {name: _bug(draw, by_name[name]) for name in names}
        right = Package(_written(package))
        calls = _calls(draw, package, kinds, set(names), right)
        wrong = package
        for name, bug in planted.items():
            wrong = _with_bug(wrong, name, bug)
        alone = [_wrong(Package(_written(_with_bug(package, *one))), calls) for one in planted.items()]
        together = _wrong(Package(_written(wrong)), calls)
        shown = _shown(draw, calls, together)
        hidden = [call for call in calls if call not in shown]
        if all(any(call in hidden for call in failing) for failing in [*alone, together]) and shown:
            return _item(draw, package, wrong, shown, hidden, {n: b.kind for n, b in planted.items()})
    raise AssertionError(f"no bug that shows in {TRIES} tries")


def _bug(draw: random.Random, function: ast.FunctionDef) -> Mutation:
    """Return a random bug of a function, each kind equally likely."""
    found = mutations(function)
    kind = draw.choice(sorted({bug.kind for bug in found}))
    return draw.choice([bug for bug in found if bug.kind == kind])


def _shown(draw: random.Random, calls: Sequence[tuple[Call, str]],
           failing: Sequence[tuple[Call, str]]) -> list[tuple[Call, str]]:  # fmt: skip
    """Return one call per function for the visible tests; the first of them fails."""
    if len(failing) < 2:
        return []
    first = draw.choice(failing)
    chosen: dict[str, tuple[Call, str]] = {}
    for call in calls:
        if call not in failing:
            chosen.setdefault(call[0][1], call)
    return [first, *chosen.values()]


def _item(draw: random.Random, right: Functions, wrong: Functions, shown: Sequence[tuple[Call, str]],
          hidden: Sequence[tuple[Call, str]], kinds: Mapping[str, str]) -> dict[str, Any]:  # fmt: skip
    """Return the question: files, tests and repairs."""
    name = draw_name(draw)
    before, after = _written(wrong), _written(right)
    files = {f"{name}/{module}.py": text for module, text in before.items()}
    files |= {f"{name}/__init__.py": "", "tests.py": _tests(name, shown)}
    repairs = [
        {"path": f"{name}/{module}.py", "old": old, "new": new}
        for module in before
        for old, new in repairs_of(before[module], after[module])
    ]
    got = Package(before).result(shown[0][0])
    call, wanted = shown[0]
    arguments = call[2][1:-1].removesuffix(",")
    return {
        "package": name,
        "files": dict(sorted(files.items())),
        "symptom": f"{name}.{call[0]}.{call[1]}({arguments}): it should return {wanted}, but {_said(got)}.",
        "hidden": [[f"{name}.{module}", function, arguments, result]
                   for (module, function, arguments), result in hidden],
        "repairs": repairs,
        "bugs": dict(kinds),
    }  # fmt: skip


def _said(result: str) -> str:
    """Describe the result of a call."""
    if result == "runs for ever":
        return "it does not come to an end"
    return result.replace("raised", "it raises", 1) if result.startswith("raised ") else f"it returns {result}"


def repairs_of(before: str, after: str) -> list[tuple[str, str]]:
    """Return pairs (old, new) that turn ``before`` into ``after``; each old text occurs once in ``before``."""
    old, new = before.splitlines(True), after.splitlines(True)
    found = []
    for tag, a, b, c, d in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        low, high = a, b
        while before.count("".join(old[low:high])) != 1 or low == high:
            low, high = max(0, low - 1), min(len(old), high + 1)
        found.append(("".join(old[low:high]), "".join([*old[low:a], *new[c:d], *old[b:high]])))
    return found


def _tests(name: str, shown: Sequence[tuple[Call, str]]) -> str:
    """Return a program that runs the visible tests."""
    imports = sorted({f"from {name}.{module} import {function}" for (module, function, _), _ in shown})
    cases = [f"    ({function}, {arguments}, {result})," for (_, function, arguments), result in shown]
    return "\n".join([
        "import sys", "", *imports, "", "CASES = [", *sorted(cases), "]", "failed = 0",
        "for function, arguments, wanted in CASES:",
        "    try:",
        "        got = function(*arguments)",
        "    except Exception as error:",
        "        got = error",
        "    if got != wanted:",
        "        failed += 1",
        '        print(f"FAILED {function.__name__}{arguments}: got {got!r}, wanted {wanted!r}")',
        'print(f"{len(CASES) - failed} of {len(CASES)} passed")',
        "sys.exit(failed > 0)", "",
    ])  # fmt: skip
