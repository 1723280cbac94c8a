"""What the viewer opens and what it refuses, how it sees a running job, and how its command ends."""

import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from contextlib import closing
from pathlib import Path

import pytest

from bebop.errors import UserError
from bebop.trajectory_db.reader import NAME
from bebop.view import __main__ as view
from bebop.view.folders import HOST, PORT, Folder, folders
from tests.commands import error_of, on_disk
from tests.tree import ROOT
from tests.view.made_up import write_run
from tests.view.serving import held


def test_a_run_is_running_while_its_lock_is_held(tmp_path: Path) -> None:
    seen = Folder(path=tmp_path / "run", name="run")
    with held(seen.path):
        assert seen.state == "waiting"
        write_run(seen.path, answers=4)
        assert seen.state == "running" and seen.counts()["answers"] == 4
    assert seen.state == "ended"


def test_looking_at_a_lock_does_not_take_it(tmp_path: Path) -> None:
    """A job that starts while somebody looks must not be told that its folder is in use."""
    seen = Folder(path=write_run(tmp_path / "run", answers=4), name="run")
    (seen.path / "metrics.jsonl").unlink()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            assert seen.state in ("running", "ended")

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            with held(seen.path):
                pass
    finally:
        stop.set()
        looking.join()


def test_another_lock_is_not_the_runs(tmp_path: Path) -> None:
    """Of the same process, in another folder."""
    seen = Folder(path=write_run(tmp_path / "run", answers=4), name="run")
    (seen.path / ".lock").write_text(f"process {os.getpid()} on here\n")
    with held(tmp_path / "other"):
        assert seen.state == "ended"


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("", "RUN"), ("missing", "missing is not a folder"), ("empty", "is no run"), ("rows.txt", "rows.txt"),
        ("run --foo", "--foo"), ("old", NAME), ("untraced", "monitor.trace=off"), ("damaged", "damaged"),
        ("run --port x", "'x'"), ("run --port 0", "--port: 0"), ("run --port 70000", "70000"),
        ("run missing", "missing"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_nothing_is_written(
    given: str, names: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "run", answers=4)
    (tmp_path / "rows.txt").write_text("text\n")
    for name, file, text in (
        ("empty", "notes", ""), ("old", "metrics.jsonl", '{"step": 1}\n'), ("damaged", NAME, "nonsense\n" * 500),
        ("untraced", "config.yaml", "monitor:\n  trace: 'off'\n"),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    monkeypatch.chdir(tmp_path)
    before = on_disk(tmp_path)
    line = error_of(view.main, given.split(), capsys)
    assert names in line and "Traceback" not in line
    assert on_disk(tmp_path) == before


def test_what_cannot_be_shown_is_said_in_one_line(tmp_path: Path) -> None:
    old, newer = tmp_path / "old", write_run(tmp_path / "newer", answers=4)
    old.mkdir()
    (old / "metrics.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(UserError, match=rf"{NAME} .* kept no completions"):
        folders([old])
    (old / "config.yaml").write_text("monitor:\n  trace: off\n")  # which YAML reads as False
    with pytest.raises(UserError, match=r"monitor\.trace=off"):
        folders([old])
    with closing(sqlite3.connect(newer / NAME)) as store, store:
        store.execute("UPDATE meta SET value = '7' WHERE key = 'format'")
    with pytest.raises(UserError, match="format '7'"):
        folders([newer])


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    paths = [write_run(tmp_path / place / "run", answers=4) for place in "ab"]
    assert [folder.name for folder in folders(paths)] == [str(path) for path in paths]
    assert [folder.name for folder in folders(paths[:1])] == ["run"]


def test_a_port_that_is_taken_is_named_and_the_default_goes_on_to_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", answers=4)
    with view._listening(None) as first, view._listening(None) as second:
        a, b = (listening.getsockname() for listening in (first, second))
        assert a[0] == b[0] == HOST and PORT <= a[1] < b[1]
        line = error_of(view.main, [str(run), "--no-browser", "--port", str(a[1])], capsys)
    assert f"--port {a[1]}" in line


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_interrupted_and_ends_quietly(tmp_path: Path, number: signal.Signals) -> None:
    run = write_run(tmp_path / "run", answers=4)
    before = on_disk(run)
    command = [sys.executable, "-m", "bebop.view", str(run), "--no-browser"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        assert process.stdout is not None and process.stderr is not None
        address = process.stdout.readline().split()[0]
        with urllib.request.urlopen(f"{address}api/runs", timeout=30) as answer:
            assert json.load(answer)["runs"][0]["answers"] == 4
        port = int(address.rstrip("/").rpartition(":")[2])
        with socket.socket() as outside:  # loopback alone: nothing listens on other addresses
            outside.settimeout(1)
            assert outside.connect_ex(("127.0.0.2", port)) != 0
        process.send_signal(number)
        assert process.wait(30) == 0
        assert process.stdout.read() == "" and process.stderr.read() == ""
    assert on_disk(run) == before
