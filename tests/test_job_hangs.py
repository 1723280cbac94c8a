"""The real job on Ray with parts that are alive and silent: each is noticed, named, ended and replaced."""

import json
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bebop.runtime.processes import descendants, lives, status
from tests.commands import HANGING
from tests.test_job import counted, finish, pids, rows, start, wait_for_step

pytestmark = pytest.mark.slow

# On the path of every process of a job: once the file TRIGGER names a process, its decoding thread stands still.
STAND_STILL = """
import os, sys, threading, time

def wait():
    while True:
        time.sleep(0.2)
        if os.path.exists(TRIGGER) and open(TRIGGER).read() == str(os.getpid()):
            engine = sys.modules["bebop.rollout.torch_engine"].TorchEngine
            engine.step = lambda self: threading.Event().wait()
            return

if any("default_worker" in argument for argument in sys.orig_argv):
    threading.Thread(target=wait, daemon=True).start()
"""


def events(folder: Path) -> list[dict[str, Any]]:
    path = folder / "events.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(what: Callable[[], bool], process: Any) -> None:
    deadline = time.time() + HANGING
    while not what():
        assert process.poll() is None, process.stderr.read()
        assert time.time() < deadline, "no progress"
        time.sleep(0.1)


@pytest.mark.exhaustive("a job of minutes; chaos/test_short.py stops a worker, and test_watchdog.py has every deadline")
def test_a_stopped_worker_a_standing_decode_thread_and_a_stopped_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, trigger = tmp_path / "run", tmp_path / "trigger"
    (tmp_path / "sitecustomize.py").write_text(STAND_STILL.replace("TRIGGER", repr(str(trigger))))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    temporary = Path(tempfile.mkdtemp(prefix="b-"))  # short, for Ray's sockets
    monkeypatch.setenv("TMPDIR", str(temporary))
    run = start(
        folder, "trainer.steps=1000", "trainer.save_every=2", "trainer.ranks=2", "rollout.workers=2",
        "runtime.hang_after=5", "runtime.max_restarts=4",
    )  # fmt: skip
    wait_for_step(folder, 2, run)

    os.kill(pids(folder, "rollout")[0], signal.SIGSTOP)
    until(lambda: [event["kind"] for event in events(folder)] == ["hang", "replaced"], run)

    steps = len(rows(folder))
    trigger.write_text(str(pids(folder, "rollout")[1]))
    until(lambda: len(events(folder)) == 4, run)
    wait_for_step(folder, steps + 2, run)

    ranks = pids(folder, "trainer")
    os.kill(ranks[1], signal.SIGSTOP)
    until(lambda: len(events(folder)) == 6, run)
    wait_for_step(folder, len(rows(folder)) + 2, run)
    run.send_signal(signal.SIGINT)
    code, errors = finish(run)
    assert code == 130, errors

    worker, decoding, rank = events(folder)[::2]
    assert worker["who"] == "rollout worker 0" and "stopped by a signal" in worker["why"]
    assert decoding["who"] == "rollout worker 1" and "in decoding, at engine_thread.py" in decoding["why"]
    assert rank["who"] == "trainer" and f"rank 1 (process {ranks[1]})" in rank["why"] and "rank 0" not in rank["why"]
    assert all(event["notice_s"] < 30 for event in (worker, rank)) and decoding["notice_s"] < 60
    assert [event["kind"] for event in events(folder)] == ["hang", "replaced"] * 3
    dumps = sorted(path.read_text() for path in (folder / "hangs").iterdir())
    assert len(dumps) == 3 and any("in turn" in dump for dump in dumps)
    assert errors.count("prompts start again") == 2 and errors.count("going back to step_0000") == 1
    assert not any(map(lives, ranks)), "all ranks are replaced"
    steps = range(1, len(rows(folder)) + 1)
    assert counted(folder) == dict.fromkeys(steps, (16, 4)), "every prompt was trained on once"
    temporary.rmdir()  # fails if anything was left there, such as the folders where ranks meet


@pytest.mark.exhaustive("a job of minutes; chaos/test_short.py stops a worker, and test_watchdog.py has every deadline")
def test_a_job_goes_on_when_a_server_of_rays_is_gone(tmp_path: Path) -> None:
    run = start(tmp_path, "trainer.steps=25", "trainer.save_every=2", "runtime.hang_after=3")
    seen, named = set[int](), list[int]()
    for server, signal_ in (("gcs_server", signal.SIGKILL), ("raylet", signal.SIGSTOP)):
        wait_for_step(tmp_path, len(rows(tmp_path)) + 3, run)  # the second step was written
        before = descendants(run.pid)
        seen.update(before)
        named += [pid for pid in before if (of := status(pid)) is not None and of.name == server]
        told = len(events(tmp_path)) + 2
        os.kill(named[-1], signal_)
        until(lambda told=told: len(events(tmp_path)) == told, run)  # type: ignore[misc]
    code, errors = finish(run)
    assert code == 0, errors
    assert f"Ray's gcs_server (process {named[0]})" in errors and f"Ray's raylet (process {named[1]})" in errors
    assert errors.count("going back to step_0000") == 2
    for gone, again in zip(events(tmp_path)[::2], events(tmp_path)[1::2], strict=True):
        assert (gone["kind"], gone["who"], again["kind"]) == ("session", "ray", "replaced")
        assert gone["notice_s"] < 30 and again["recover_s"] > 0
    assert counted(tmp_path) == dict.fromkeys(range(1, 26), (16, 4))
    until(lambda: not any(map(lives, seen)), _Nothing())


class _Nothing:
    """A process that runs for ever."""

    def poll(self) -> None: ...
