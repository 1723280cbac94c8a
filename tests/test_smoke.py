"""What .ci/run takes, and the budgets of processor seconds that ``make test`` and ``make test-slow`` keep.

Of every integration suite it takes the tests marked ``smoke``, which name what they show. They are read from the
source, since a suite is collected only in the environment of its engine.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import SimpleNamespace

import pytest

from tests.budget import START, TOP, Recorder, folder, processor_seconds
from tests.order import LONGEST, longest_first
from tests.tree import ROOT

# The engine itself runs, drafts are made and judged, weights change, a process is killed: one job, which starts the
# engine once for all of it.
SHOWN = ("engine", "drafts", "update", "killed")
SUITES = {
    # An episode of each library, none with another's answer, none with other tokens than were sampled.
    "agents": ("openenv", "stale", "verifiers", "token", "seam"),
    "megatron": (*SHOWN, "gradients"),
    "sglang": SHOWN,
    "verl": (*SHOWN, "documents"),
    "vllm": (*SHOWN, "second runner"),
}


def marks(source: str) -> list[str]:
    """What the marks of a test file say that they show."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    smoke = [call for call in calls if ast.unparse(call.func) == "pytest.mark.smoke"]
    return [ast.literal_eval(argument) for call in smoke for argument in call.args]


def missing(sources: Mapping[str, str], shown: Sequence[str] = SHOWN) -> list[str]:
    """Return what no smoke test of a suite shows, what is shown that nobody asks for, and what two of them show."""
    found = [name for source in sources.values() for name in marks(source)]
    return sorted({*found} ^ {*shown} | {name for name in found if found.count(name) > 1})


def commands(script: str) -> list[str]:
    """The make targets that a script runs."""
    words = [line.split()[1:] for line in script.splitlines() if line.startswith("run ")]
    return [word for line in words for word in line if re.fullmatch(r"[a-z][a-z-]+", word)]


def recipe(makefile: str, target: str) -> str:
    """A target's own line with its prerequisites, and its recipe."""
    return makefile.split(f"\n{target}: ")[1].split("\n\n")[0]


@pytest.mark.parametrize("suite", SUITES)
def test_smoke_tests_of_a_suite_show_what_they_must(suite: str) -> None:
    files = (ROOT / "tests" / "integration" / suite).glob("test_*.py")
    assert missing({str(file): file.read_text() for file in files}, SUITES[suite]) == []


def test_every_suite_is_run() -> None:
    folders = (path.name for path in (ROOT / "tests" / "integration").iterdir() if list(path.glob("test_*.py")))
    assert sorted(folders) == [*SUITES]
    smoke = [f"smoke-{suite}" for suite in SUITES]
    assert sorted(commands((ROOT / ".ci" / "run").read_text())) == sorted(["test", "lint", "docs", "test-slow", *smoke])
    makefile = (ROOT / "Makefile").read_text()
    assert "grep -l pytest.mark.smoke tests/integration/$*/test_*.py) -m smoke $(ARGS)" in recipe(makefile, "smoke-%")
    ready = makefile.split("\nSUITES := ")[1].split("\n")[0].split()
    assert sorted(ready) == [*SUITES] and "$(SUITES:%=.venv-%/.installed)" in recipe(makefile, "environments")
    everything = recipe(makefile, "test-all").split(" ## ")[0].split()
    assert sorted(everything) == sorted(
        ["test", "lint", "test-slow", "test-exhaustive", "mutants", "bad-input", "test-verl-sglang"]
        + [f"test-{suite}" for suite in SUITES]
    )
    assert all(f"tests/integration/{suite} $(ARGS)" in recipe(makefile, f"test-{suite}") for suite in SUITES)


def test_the_longest_files_of_the_slow_suite_begin() -> None:
    slow = [file for file in LONGEST if "pytest.mark.slow" in (ROOT / file).read_text()]
    assert sorted(slow) == sorted(set(LONGEST)), "each is there, once"
    items = [
        SimpleNamespace(path=ROOT / name, name=name) for name in ("tests/a.py", LONGEST[1], "tests/b.py", LONGEST[0])
    ]
    longest_first(items)
    assert [item.name for item in items] == [LONGEST[0], LONGEST[1], "tests/a.py", "tests/b.py"]
    # Otherwise xdist takes first the files with the most tests: two of the longest have one each.
    assert "--no-loadscope-reorder" in recipe((ROOT / "Makefile").read_text(), "test-slow")


def test_planted_gaps_are_caught() -> None:
    whole = "@pytest.mark.smoke('engine', 'drafts')\ndef test_a(): ...\n"
    other = "CASES = [pytest.param(1, marks=pytest.mark.smoke('update', 'killed')), 2]\n"
    assert missing({"a": whole, "b": other}) == []
    assert missing({"a": whole}) == ["killed", "update"]
    assert missing({"a": whole, "b": other.replace("killed", "kiled")}) == ["kiled", "killed"]
    assert missing({"a": whole, "b": "# pytest.mark.smoke('update', 'killed')"}) == ["killed", "update"]
    assert missing({"a": whole, "b": other, "c": whole}) == ["drafts", "engine"]
    script = "run test\n# run lint\nrun smoke-verl ARGS=-x\nrun -j 2 --output-sync=target smoke-a smoke-b\n"
    assert commands(script) == ["test", "smoke-verl", "smoke-a", "smoke-b"]
    assert recipe("\na: b\n\tc $(ARGS)\n\nd: e\n", "a") == "b\n\tc $(ARGS)"


# ---- processor seconds


def recorder(seconds: Mapping[str, float], budget: Mapping[str, float], loops: Sequence[float]) -> Recorder:
    found = Recorder("quick")
    found.budget, found.reference, found.others = dict(budget), 0.01, True
    found.spent.add(seconds, loops)
    return found


def judged(found: Recorder) -> int:
    """Return the exit status of a run whose tests passed."""
    session = SimpleNamespace(config=SimpleNamespace(), exitstatus=pytest.ExitCode.OK)
    found.pytest_sessionfinish(session)  # type: ignore[arg-type]
    return int(session.exitstatus)


@pytest.mark.parametrize(
    ("budget", "loop", "over"),
    [
        ({"kernels": 10, "total": 1e6, "start": 1e6}, 0.01, []),
        ({"kernels": 8, "total": 1e6, "start": 1e6}, 0.01, ["kernels"]),
        ({"kernels": 8, "total": 1e6, "start": 1e6}, 0.02, []),  # a machine that is half as fast
        ({"total": 1e6}, 0.01, []),
        ({"kernels": 10, "total": 1, "start": 1e6}, 0.01, ["total"]),
    ],
)
def test_a_folder_over_its_budget_fails_the_run(budget: dict[str, float], loop: float, over: list[str]) -> None:
    found = recorder({"kernels": 9.0}, budget, [loop, loop])
    assert judged(found) == bool(over) and found.too_much() == over


def test_seconds_count_for_the_folder_and_with_those_of_children() -> None:
    assert [folder(ROOT / name) for name in ("tests/test_a.py", "tests/recipes/verl/test_b.py")] == [TOP, "recipes"]
    before = processor_seconds()
    subprocess.run([sys.executable, "-c", "for _ in range(10**6): pass"], check=True)
    assert processor_seconds() - before > 0.01


def test_every_folder_of_tests_has_a_budget() -> None:
    folders = {folder(path) for path in (ROOT / "tests").rglob("test_*.py") if "integration" not in path.parts}
    assert {*Recorder("quick").budget} == {*folders, START, "total"} and "total" in Recorder("slow").budget
