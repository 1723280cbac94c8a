import operator
import os
import signal
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from bebop.tasks.functions import Isolated


@pytest.fixture
def child() -> Iterator[Isolated]:
    made = Isolated(cpu_seconds=0.3)
    yield made
    made.close()


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
    child, counts = Isolated(still_seconds=0.3), tmp_path / "counts"
    counts.write_text("")
    try:
        assert child.score(stop_once, str(counts)) == 0.0, "a third child is not tried"
        assert counts.read_text() == "xx"
        counts.write_text("x")
        assert child.score(stop_once, str(counts)) == 1.0
        assert counts.read_text() == "xxx"
    finally:
        child.close()


def work(seconds: float) -> float:
    """In the child: computes, with no reply for a long time."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return 1.0


@pytest.mark.slow
def test_what_computes_is_not_still() -> None:
    child = Isolated(still_seconds=0.5)
    try:
        assert child.score(work, 0.8) == 1.0
    finally:
        child.close()


def test_a_function_that_the_child_cannot_import_is_a_bug_not_a_reward(
    child: Isolated, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_here = types.ModuleType("only_here")
    exec("def one(): return 1.0", vars(only_here))
    monkeypatch.setitem(sys.modules, "only_here", only_here)
    with pytest.raises(RuntimeError, match="exit code 1"):
        child.score(only_here.one)
    assert child.score(operator.add, 1, 1) == 2.0
