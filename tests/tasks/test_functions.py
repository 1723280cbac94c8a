"""Functions in child processes that hang, exit, crash or are killed: one line each, and the next call is served."""

import contextlib
import operator
import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

import bebop.tasks.functions as functions
import bebop.tasks.output as output
from bebop.errors import UserError
from bebop.tasks.functions import Isolated, RewardTimeout, UserFunction, load_file
from bebop.tasks.signatures import Call
from tests.cases import slow_but

MINE = """
import os, signal, subprocess, sys, time
calls = 0
def act(text, item):
    global calls
    calls += 1
    if text == "hang":
        subprocess.Popen(["sleep", "1000"])  # and what it started is ended with it
        time.sleep(1000)
    if text == "spin":
        9 ** 9 ** 9  # one C call that no thread can interrupt
    if text == "sys.exit":
        sys.exit(3)
    if text == "os._exit":
        os._exit(4)
    if text == "interrupt":
        raise KeyboardInterrupt
    if text == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if text == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if text == "print":
        print("noise", flush=True)
    return os.getpid() if text == "pid" else calls
"""


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[UserFunction]:
    (tmp_path / "mine.py").write_text(MINE)
    with contextlib.closing(UserFunction(f"{tmp_path}/mine.py:act", timeout=0.3)) as made:
        yield made


def running(group: int) -> list[str]:
    """The processes of a group that still run; one that ended may wait for somebody to take notice."""
    children = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, own = stat.read_text().rsplit(")", 1)[1].split()[:3]
            children += [stat.parent.name] if int(own) == group and state != "Z" else []
    return children


def ask(function: UserFunction, text: str) -> float:
    [value] = function.values([Call(text=text, item={"answer": "1"})], ["reward mine on prompt 7"])
    if isinstance(value, RewardTimeout):
        raise value
    assert isinstance(value, float)
    return value


def test_it_runs_elsewhere_and_remembers(mine: UserFunction) -> None:
    assert [ask(mine, "x") for _ in range(3)] == [1, 2, 3]
    assert ask(mine, "pid") == ask(mine, "pid") != os.getpid()
    assert ask(mine, "print") == 6  # what it prints does not get in the way


def test_what_it_prints_goes_to_a_file_up_to_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text("import sys\nprint('made')\n" + SAYS)
    monkeypatch.setattr(output, "OUTPUT_BYTES", 1000)
    mine = UserFunction(f"{tmp_path}/mine.py:says", timeout=30, output=tmp_path / "run" / "output.log")
    ask(mine, "before there is a folder")
    time.sleep(0.1)
    (tmp_path / "run").mkdir()
    ask(mine, "after")
    mine.close()
    log = tmp_path / "run" / "output.log"
    assert log.read_text().splitlines() == ["made", "before there is a folder", "to stderr", "after", "to stderr"]
    mine = UserFunction(f"{tmp_path}/mine.py:says", timeout=30, output=log)
    assert [ask(mine, "x" * 5000), ask(mine, "y" * 100_000)] == [1, 1]  # what is left out holds up nobody
    mine.close()
    assert log.stat().st_size < 7000 and log.read_text().endswith(output.LEFT_OUT)


SAYS = """
def says(text, item):
    print(text)
    print("to stderr", file=sys.stderr)
    return 1
"""


@pytest.mark.parametrize("text", ["hang", "spin"])
def test_one_that_hangs_is_ended_with_all_it_started(mine: UserFunction, text: str) -> None:
    group, started = int(ask(mine, "pid")), time.monotonic()
    with pytest.raises(RewardTimeout, match=r"reward mine on prompt 7 took more than task.reward_timeout=0.3 s"):
        ask(mine, text)
    assert time.monotonic() - started < 5
    time.sleep(0.2)
    assert not running(group)
    assert ask(mine, "x") == 1  # a new one


ENDS = [
    ("sys.exit", "raised SystemExit: 3"),
    ("interrupt", "raised KeyboardInterrupt"),
    ("os._exit", "ended its process with exit code 4"),
    ("kill", "was ended by signal 9 (SIGKILL), as when memory is short"),
    ("segfault", "was ended by signal 11 (SIGSEGV)"),
]


@pytest.mark.parametrize(
    ("text", "words"), slow_but([one for one in ENDS if one[0] in ("sys.exit", "os._exit", "kill")], ENDS, several=True)
)
def test_one_that_ends_is_one_line(mine: UserFunction, text: str, words: str) -> None:
    with pytest.raises(UserError) as error:
        ask(mine, text)
    assert f"reward mine on prompt 7 {words}" in str(error.value) and "\n" not in str(error.value)
    assert ask(mine, "x") >= 1


def test_one_that_was_killed_while_idle_costs_nothing(mine: UserFunction) -> None:
    os.kill(int(ask(mine, "pid")), signal.SIGKILL)
    time.sleep(0.1)
    assert ask(mine, "x") == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import sys; sys.exit(5)", "cannot be imported: SystemExit: 5"),
        ("import os; os._exit(6)", "cannot be imported: it ended its process with exit code 6"),
        ("import time; time.sleep(1000)", "takes more than 1 s to import"),
    ],
)
def test_modules_that_cannot_be_imported(
    tmp_path: Path, source: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "LOAD_SECONDS", 1.0 if "sleep" in source else 60.0)
    (tmp_path / "bad.py").write_text(source)
    with pytest.raises(UserError) as error:
        UserFunction(f"{tmp_path}/bad.py:act", timeout=1)
    assert words in str(error.value) and "task.reward=" in str(error.value) and "\n" not in str(error.value)


def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """Not even where it hangs while the parent is killed."""
    (tmp_path / "mine.py").write_text(MINE)
    code = (
        "import bebop.tasks.functions as f, sys; g = f.UserFunction(sys.argv[1], 1000); "
        "ask = lambda text: g.values([f.Call(text=text, item={})], [''])[0]; "
        "print(int(ask('pid')), flush=True); ask('hang')"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, f"{tmp_path}/mine.py:act"], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    group = int(parent.stdout.readline())
    while len(running(group)) < 2:  # the function, and what it started
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + functions.LEAVE_SECONDS + 5
    while running(group) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not running(group)


# ---- verifiers


@pytest.fixture
def child() -> Iterator[Isolated]:
    with contextlib.closing(Isolated(cpu_seconds=0.3)) as made:
        yield made


def identifier(child: Isolated) -> int:
    return int(child.score(os.getpid))


def test_it_is_another_process_and_stays(child: Isolated) -> None:
    assert child.score(operator.add, 1.0, 2.0) == 3.0
    assert identifier(child) == identifier(child) != os.getpid()


def test_what_raises_is_0_and_the_child_serves_on(child: Isolated) -> None:
    before = identifier(child)
    assert child.score(operator.truediv, 1, 0) == 0.0
    assert child.score(operator.mul, "x", 2**40) == 0.0  # more memory than it may have
    assert identifier(child) == before


def test_what_takes_too_long_is_0_and_the_child_replaced(child: Isolated) -> None:
    before, start = identifier(child), time.process_time()
    assert child.score(operator.pow, 9, 9**9) == 0.0  # one C call that no thread and no Python handler can interrupt
    assert child.score(operator.add, 1, 1) == 2.0
    assert identifier(child) != before and time.process_time() - start < 1.0


def test_a_child_that_died_while_idle_costs_no_reward(child: Isolated) -> None:
    os.kill(identifier(child), signal.SIGKILL)
    time.sleep(0.1)
    assert child.score(operator.add, 1, 1) == 2.0


def stop_once(path: str) -> float:
    """In the child: is stopped by a signal the first time, as by a debugger; kills itself the next."""
    done = len(open(path).read())
    with open(path, "a") as file:
        file.write("x")
    if done < 2:
        os.kill(os.getpid(), (signal.SIGSTOP, signal.SIGKILL)[done])
    return 1.0


@pytest.mark.slow
def test_an_answer_whose_child_was_stopped_or_killed_is_asked_once_more(tmp_path: Path) -> None:
    counts = tmp_path / "counts"
    with contextlib.closing(Isolated(still_seconds=0.3)) as child:
        for before, score, after in (("", 0.0, "xx"), ("x", 1.0, "xxx")):  # a third child is not tried
            counts.write_text(before)
            assert child.score(stop_once, str(counts)) == score and counts.read_text() == after


def work(seconds: float) -> float:
    """In the child: computes, with no reply for a long time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return 1.0


@pytest.mark.slow
def test_what_computes_is_not_still() -> None:
    with contextlib.closing(Isolated(still_seconds=0.5)) as child:
        assert child.score(work, 0.8) == 1.0


def test_a_function_that_the_child_cannot_import_is_a_bug_not_a_reward(
    child: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_here = types.ModuleType("only_here")
    exec("def one(): return 1.0", vars(only_here))
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    with pytest.raises(RuntimeError, match="exit code 1"):
        child.score(only_here.one)
    assert child.score(operator.add, 1, 1) == 2.0


# ---- a file of the user's

SOURCE = """
from __future__ import annotations
from dataclasses import dataclass, fields

@dataclass
class Row:
    text: str

WHERE, NAMES = __file__, [field.name for field in fields(Row)]
"""


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of the user's, in a process that would keep its bytecode."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "rows.py").write_text(SOURCE)
    return tmp_path / "rows.py"


def test_nothing_is_left_beside_it(rows: Path) -> None:
    module = load_file(rows, "reward")
    assert (module.__name__, module.WHERE, module.NAMES) == ("bebop_reward_rows", str(rows), ["text"])
    assert [*rows.parent.iterdir()] == [rows]


def test_importlib_alone_would_leave_bytecode(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "_NoBytecode", SourceFileLoader)
    load_file(rows, "reward")
    assert (rows.parent / "__pycache__").exists()


def test_a_file_that_changes_within_a_second_is_read_anew(rows: Path) -> None:
    for number in (1, 2):
        rows.write_text(f"N = {number}\n")
        assert load_file(rows, "reward").N == number


def test_one_that_raises_is_no_module(rows: Path) -> None:
    rows.write_text("raise RuntimeError('no')\n")
    with pytest.raises(RuntimeError, match="no"):
        load_file(rows, "reward")
    assert "bebop_reward_rows" not in sys.modules
