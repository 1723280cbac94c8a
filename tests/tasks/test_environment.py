"""How an environment is found, its arguments given out, and what it returns looked at."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from bebop.errors import UserError
from bebop.tasks.environment import (
    ENVIRONMENTS,
    EnvironmentKind,
    EnvStep,
    arguments,
    check_command,
    checked_messages,
    checked_step,
    find_kind,
    last_line,
    load_class,
    question,
    seed,
)
from tests.tasks.unruly import FILE

METHODS = "".join(f"    async def {name}(self, *_): pass\n" for name in ("reset", "step", "close"))


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_row_can_be_had(name: str) -> None:
    kind = find_kind(name)
    pytest.importorskip(kind.make.partition(":")[0])
    assert load_class(kind.make) and kind.name == name
    needed = [p for p in signature(load_class(kind.make)).parameters.values() if p.default is p.empty]
    given = {p.name: "x" for p in needed}
    one = question(kind, 5, 7, given)
    assert one == question(kind, 5, 7, given) != question(kind, 6, 7, given)
    # The tasks of a verifiers package have an order of their own.
    assert (one == question(kind, 5, 8, given)) == (name == "verifiers")


def test_one_of_the_users_own() -> None:
    kind = find_kind(f"{FILE}:Apart")
    assert kind == EnvironmentKind(make=f"{FILE}:Apart", item=f"{FILE}:Apart.item", blocking=True)
    assert question(kind, 3, 8, {"most": 1, "log": "x"}) == {"text": "3 of 8, 1"}
    assert arguments(kind, {"most": 1, "log": "x"}) == ({"most": 1}, {"log": "x"})
    here = find_kind(f"{FILE}:Here")
    assert not here.blocking and question(here, 3, 8, {}) == {"index": 3} and here.name == f"{FILE}:Here"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gess", "task.name='gess' is not possible for an environment: give guess, store, calc, openenv, verifiers or "
                 "path/to/file.py:Class; did you mean guess?"),
        ("file.py", "give guess"),
        ("there/is/none.py:Mine", "there is no such Python file"),
        (f"{FILE}:Aprt", "has no 'Aprt'; did you mean Apart?"),
        (f"{FILE}:say", "it is no class"),
        (f"{FILE}:NotAll", "its class has no 'async def step'"),
    ],
)  # fmt: skip
def test_names_that_are_none(name: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        find_kind(name)
    assert words in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["import sys; sys.exit(5)", "1 / 0", "import none_of_that", "def f(:"])
def test_files_that_cannot_be_imported(tmp_path: Path, source: str) -> None:
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(UserError) as error:
        find_kind(f"{tmp_path}/bad.py:Mine")
    assert "cannot be imported: " in str(error.value) and "\n" not in str(error.value)


def test_a_file_with_dataclasses(tmp_path: Path) -> None:
    """Python looks for the types of their fields in the module, by its name."""
    source = (
        "from __future__ import annotations\nimport dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\n"
    )
    (tmp_path / "mine.py").write_text(source + METHODS)
    assert arguments(find_kind(f"{tmp_path}/mine.py:A"), {"x": 2}) == ({}, {"x": 2})


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("guess", {"tris": 3}, "task.args.tris=3: environment guess has no such argument: there are numbers, tries; "
                               "did you mean tries?"),
        ("store", {"color": "red"}, "there are length, size, spare"),
        (f"{FILE}:Here", {"a": 1}, "it has none"),
        (f"{FILE}:Apart", {"most": -1}, "cannot make question 0: ValueError: most is below 0"),
        ("guess", {"tries": "six"}, "environment guess cannot make question 0: TypeError"),
    ],
)  # fmt: skip
def test_arguments_that_are_none(name: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as error:
        question(find_kind(name), 0, 0, args)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_an_argument_that_is_missing_or_free(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("class A:\n    def __init__(self, address, **more): pass\n" + METHODS)
    kind = find_kind(f"{tmp_path}/a.py:A")
    with pytest.raises(UserError, match=r"^task.args.address is missing: environment .*a.py:A needs it$"):
        arguments(kind, {"x": 1})
    assert arguments(kind, {"address": "b", "x": 1}) == ({}, {"address": "b", "x": 1})


def test_seeds_are_of_one_question_alone() -> None:
    assert len({seed(base, index) for base in range(20) for index in range(50)}) == 1000
    assert seed(3, 7) == (3 << 32) + 7


def test_what_comes_back_is_plain() -> None:
    class Text(str):
        pass

    step = checked_step(EnvStep(messages=[{"role": "user", "content": Text("x")}], reward=True, counts={"n": 2}), "e")  # type: ignore[arg-type]
    assert step == EnvStep(messages=({"role": "user", "content": "x"},), reward=1.0, counts={"n": 2.0})
    assert type(step.reward) is float and type(step.messages) is tuple


@pytest.mark.parametrize(
    "value", [None, 5, "text", ({"role": "assistant", "content": "x"},), ({"role": "user"},), ("text",),
              ({"role": "user", "content": 5},), ({"role": "user", "content": "x", "name": "y"},)],
)  # fmt: skip
def test_messages_that_are_none(value: Any) -> None:
    with pytest.raises(UserError, match=r"^environment e gave .* wanted$"):
        checked_messages(value, "e")
    with pytest.raises(UserError, match=r"^environment e"):
        checked_step(EnvStep(messages=value), "e")


@pytest.mark.parametrize("value", [None, 5, "12", (1, -1), (1.0,), (True,), ({"role": "user", "content": "x"},)])
def test_tokens_that_are_none(value: Any) -> None:
    with pytest.raises(UserError, match=r"^environment e gave .* a tuple of token ids is wanted$"):
        checked_messages(value, "e", tokens=True)
    with pytest.raises(UserError, match="token ids"):
        checked_step(EnvStep(messages=value), "e", tokens=True)
    assert checked_messages([2, 57], "e", tokens=True) == (2, 57)


@pytest.mark.parametrize("value", [None, (1, 2), EnvStep(reward="x"), EnvStep(counts={"a": None})])  # type: ignore
def test_steps_that_are_none(value: Any) -> None:
    with pytest.raises(UserError, match=r"^environment e"):
        checked_step(value, "e")


def test_the_last_line_counts() -> None:
    assert [last_line(text) for text in ("", " \n", "a", "a\n b \n\n")] == ["", "", "a", "b"]


def test_a_command_of_the_policy_ends_before_the_step_is_lost(tmp_path: Path) -> None:
    start = "    def __init__(self, seconds=20.0): pass\n"
    (tmp_path / "shell.py").write_text(f"class Shell:\n    command = 'seconds'\n{start}{METHODS}")
    shell = find_kind(f"{tmp_path}/shell.py:Shell")
    check_command(shell, {}, 20.5)
    check_command(shell, {"seconds": 1}, 2.0)
    check_command(ENVIRONMENTS["guess"], {}, 0.1)
    with pytest.raises(UserError, match=r"^task\.args\.seconds=20\.0 is not possible: .*step_seconds=20\.0"):
        check_command(shell, {}, 20.0)
    with pytest.raises(UserError, match=r"^task\.args\.seconds=9 is not possible"):
        check_command(shell, {"seconds": 9}, 5.0)
    (tmp_path / "typo.py").write_text(f"class Shell:\n    command = 'secnods'\n{start}{METHODS}")
    with pytest.raises(UserError, match=r"command = 'secnods' is no argument of the class$"):
        find_kind(f"{tmp_path}/typo.py:Shell")
