"""Packages with a bug: each shows in a hidden test, none is left once it is mended, and a number means one package."""

import ast
import random

import pytest

from recipes.environments.bugfix.environment import Bugfix
from recipes.environments.bugfix.mutations import mutations
from recipes.environments.bugfix.programs import LIBRARY, Package, draw_arguments, repairs_of
from tests.cases import slow_but


def modules(files) -> dict[str, str]:
    """The package's modules by name."""
    return {path.split("/")[1].removesuffix(".py"): text for path, text in files.items() if path != "tests.py"}


def failing(files, hidden) -> int:
    """How many hidden tests these files fail."""
    package = Package(modules(files))
    return sum(package.result((module.split(".")[1], name, args)) != wanted for module, name, args, wanted in hidden)


def mended(files, repairs) -> dict[str, str]:
    """The files with these repairs made."""
    files = dict(files)
    for repair in repairs:
        assert files[repair["path"]].count(repair["old"]) == 1
        files[repair["path"]] = files[repair["path"]].replace(repair["old"], repair["new"])
    return files


@pytest.mark.parametrize("bugs", slow_but([2], [1, 2]))
def test_every_bug_fails_a_hidden_test_and_the_mended_package_none(bugs: int) -> None:
    for index in range(8):
        made = Bugfix.item(index, 3, bugs=bugs, modules=2)
        assert len(made["bugs"]) == bugs and failing(made["files"], made["hidden"]) > 0
        assert failing(mended(made["files"], made["repairs"]), made["hidden"]) == 0
        for kept in range(len(made["repairs"])):
            others = made["repairs"][:kept] + made["repairs"][kept + 1 :]
            assert failing(mended(made["files"], others), made["hidden"]) > 0


def test_hidden_tests_are_not_among_those_shown() -> None:
    made = Bugfix.item(0, 0)
    shown = "\n".join(made["files"].values())
    assert len(made["hidden"]) > 20
    assert not any(f"({name}, {arguments}, " in shown for _, name, arguments, _ in made["hidden"])
    call = made["symptom"].split(":")[0]
    assert not any(f"{module}.{name}({arguments[1:-1].removesuffix(',')})" == call
                   for module, name, arguments, _ in made["hidden"])  # fmt: skip


def test_a_number_means_one_package() -> None:
    one = Bugfix.item(4, 9, modules=2)
    assert one == Bugfix.item(4, 9, modules=2)
    assert len({str(made["files"]) for made in (one, Bugfix.item(5, 9, modules=2), Bugfix.item(4, 10, modules=2))}) == 3


def test_mutations_of_a_function() -> None:
    source = '''def f(a, b):
    """a < b."""
    if a < b and a > 0:
        a += 1
        print(a, b)
    return max(a, b)
'''
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    found = [(bug.kind, repairs_of(ast.unparse(function) + "\n", ast.unparse(bug.applied(function)) + "\n"))
             for bug in mutations(function)]  # fmt: skip
    seen = {(kind, new.strip()) for kind, repairs in found for _, new in repairs}
    assert {
        ("comparison", "if a <= b and a > 0:"),
        ("comparison", "if a < b and a >= 0:"),
        ("logic", "if a < b or a > 0:"),
        ("negation", "if not (a < b and a > 0):"),
        ("off by one", "if a < b and a > 1:"),
        ("operator", "a -= 1"),
        ("call", "return min(a, b)"),
        ("swapped arguments", "print(b, a)"),
        ("missing return", "max(a, b)"),
        ("name", "return max(b, b)"),
    } <= seen
    assert "missing statement" in {kind for kind, _ in found}
    assert ast.unparse(function) == ast.unparse(ast.parse(source)), "the function itself stays as it is"
    assert all(len(repairs) == 1 for _, repairs in found), "each changes one place, the docstring never"


def test_every_function_of_the_library_can_be_called_and_broken() -> None:
    draw = random.Random(1)
    for name, (function, kinds) in LIBRARY.items():
        assert len(mutations(function)) >= 3, name
        assert len(ast.literal_eval(draw_arguments(draw, kinds))) == len(function.args.args), name
        assert ast.get_docstring(function), name


def test_a_package_that_does_not_end_is_stopped() -> None:
    package = Package({"one": "def f(n):\n    while True:\n        n += 1\n", "two": "from .one import f\ng = f\n"})
    assert package.result(("two", "g", "(1,)")) == "runs for ever"
    assert Package({"one": "def f(n):\n    return 1 // n\n"}).result(("one", "f", "(0,)")) == "raised ZeroDivisionError"
