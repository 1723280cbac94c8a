"""The tests notice faults in the code: rows of ``tests/mutants/faults`` are planted one by one."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.__main__ import main
from tests.mutants.fault import ROOT, Code, Fault, PatternNotUnique, UnresolvedTest, load, node_id, product

SCALE = Fault("area/scale", "Scaler.scale", "scaled(values, self.factor) + 1", "scaled(values, 1) + 1", ("test_x",))
TOGETHER = """
class Scaler:
    def scale(self, values):
        return scaled(values, self.factor) + 1

    def shift(self, values):
        return scaled(values, self.factor) + 1
"""
REFORMATTED = """
class Scaler:
    @cache
    def scale(
        self,
        values,
    ):
        return (
            scaled(
                values,  # [B, K]
                self.factor,
            )
            + 1
        )
"""


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1800)


@pytest.mark.slow
def test_every_fault_fits_one_place_and_its_tests_exist() -> None:
    for fault in load():
        place = fault.place()
        text, changed = product().texts[place.file], fault.mutated()
        assert changed != text, fault.name
        assert fault.tests and all((ROOT / test.split("::")[0]).is_file() for test in fault.node_ids()), fault.name
        # Parsing the faulty definition instead of its file takes a tenth of the time.
        for definition in product().definitions[fault.address.rpartition(":")[2]]:
            if definition.file == place.file and definition.start <= place.start < definition.end:
                ast.parse(
                    "if True:\n    pass\n" + changed[definition.start : definition.end + len(changed) - len(text)]
                )


@pytest.mark.parametrize(
    "text",
    [TOGETHER, REFORMATTED, f"def other():\n    return scaled(values, self.factor) + 1\n{TOGETHER}"],
    ids=["as written", "reformatted", "beside the same text"],
)
@pytest.mark.parametrize("path", ["bebop/scaler.py", "rollout/decoding/layers.py"])
def test_a_fault_follows_code_that_moves_or_is_reformatted(path: str, text: str) -> None:
    code = Code({"bebop/other.py": "import math\n", path: text})
    assert SCALE.place(code).file == path
    faulty = ast.unparse(ast.parse(SCALE.mutated(code)))
    intact = ast.unparse(ast.parse(text))
    start = intact.index("def scale")
    assert faulty == intact[:start] + intact[start:].replace("self.factor", "1", 1)


def test_a_fault_brings_its_indentation() -> None:
    fault = Fault("area/name", "f", "first()\nsecond()", "if third:\n    second()\nfirst()", ())
    for margin, head in (("    ", "def f():\n"), ("        ", "if x:\n    def f():\n")):
        code = Code({"a.py": f"{head}{margin}first()  # why\n\n{margin}second()\n"})
        body = "".join(f"{margin}{line}\n" for line in ("if third:", "    second()", "first()"))
        assert fault.mutated(code) == head + body


@pytest.mark.parametrize(
    ("address", "old", "problem"),
    [
        ("Scaler.scale", "no such text", "occurs 0 times in the definitions of 'Scaler.scale'"),
        ("Scaler.gone", "scaled(", "occurs 0 times in the definitions of 'Scaler.gone'"),
        ("Scaler.scale", "caled(", "occurs 0 times"),  # half a word
        ("other:Scaler.scale", "scaled(", "occurs 0 times"),
        ("Scaler", "scaled(", "occurs 4 times in the definitions of 'Scaler' (bebop/a.py, trainer/a.py)"),
        ("Scaler.scale", "scaled(", "occurs 2 times"),
        ("bebop/a:Scaler", "scaled(", "occurs 2 times"),
    ],
)
def test_a_fault_that_fits_nowhere_or_twice_is_named(address: str, old: str, problem: str) -> None:
    code = Code({"bebop/a.py": TOGETHER, "trainer/a.py": TOGETHER})
    with pytest.raises(PatternNotUnique) as caught:
        Fault("area/name", address, old, "x", ()).place(code)
    assert f"area/name: {old!r} {problem}" in str(caught.value)


def test_an_address_can_name_its_file() -> None:
    code = Code({"bebop/a/__init__.py": TOGETHER, "trainer/b.py": f"if True:\n    import math\n{TOGETHER}LIMIT = 2\n"})
    for address, old, file in (
        ("a:Scaler.scale", "scaled(", "bebop/a/__init__.py"),
        ("trainer/b:Scaler.scale", "scaled(", "trainer/b.py"),
        ("b:", "math", "trainer/b.py"),
        ("LIMIT", "2", "trainer/b.py"),
    ):
        assert Fault("area/name", address, old, "x", ()).place(code).file == file


def test_a_test_is_found_by_its_name() -> None:
    own = "tests/test_mutants.py"
    assert node_id("test_mutants") == own
    for name in ("test_a_test_is_found_by_its_name", "test_a_test_is_found_by_its_name[case]"):
        assert node_id(name) == node_id(f"test_mutants::{name}") == f"{own}::{name}"
    with pytest.raises(UnresolvedTest, match="area/name: 'test_of_nothing' is the name of no test"):
        Fault("area/name", "f", "a", "b", ("test_of_nothing",)).node_ids()


def test_a_repeated_address_loses_no_rows(tmp_path: Path) -> None:
    (tmp_path / "area.yaml").write_text("f:\n- [a/one, 'a', 'b', test_x]\ng:\n- [a/two, 'a', 'b', test_x]\n"
                                        "f:\n- [a/three, 'a', 'b', test_x, test_y, {equivalent: 'why'}]\n")  # fmt: skip
    assert [(f.name, f.address, f.tests, f.equivalent) for f in load(tmp_path)] == [
        ("a/one", "f", ("test_x",), ""),
        ("a/two", "g", ("test_x",), ""),
        ("a/three", "f", ("test_x", "test_y"), "why"),
    ]


JUDGED = """
from dataclasses import replace
from tests.mutants.fault import Fault, load
from tests.mutants.running import judge_all, preload
preload()
tests = ("test_mean_only_by_hand",)
faults = [
    Fault("no/difference", "mean_only", "0.0, rewards - ", "0.0, +rewards - ", tests),
    Fault("a/difference", "mean_only", "0.0, rewards - ", "0.0, rewards + ", tests),
    Fault("a/typo", "mean_only", "0.0, rewards - ", "0.0, reward - ", tests),
    replace(next(f for f in load() if f.name.startswith("view/")), name="of/others", tests=tests),
]
for result in judge_all(faults, jobs=2):
    print(result.fault.name, result.outcome, result.expected)
"""


@pytest.mark.slow
def test_outcomes_are_told_apart() -> None:
    done = run("-c", JUDGED)
    assert sorted(done.stdout.splitlines()) == [
        "a/difference killed True",
        "a/typo error False",
        "no/difference survived False",
        "of/others error False",
    ], done.stderr


@pytest.mark.slow
def test_a_sample_of_the_faults_is_killed() -> None:
    """Every sixtieth of them. ``make mutants`` runs all, which takes most of an hour."""
    done = run("-m", "tests.mutants", "--every", "60")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{len(load()[::60])} faults in" in done.stdout


def test_a_sample_takes_every_nth_fault(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policy/", "--every", "5", "--list"]) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    names = [fault.name for fault in load() if fault.name.startswith("policy/")]
    assert listed == names[::5] and len(listed) < len(names)
    with pytest.raises(SystemExit, match="2"):
        main(["--every", "0"])
    assert "--every 0: must be at least 1" in capsys.readouterr().err
