"""Steps of trajectories.sqlite are there whole or not at all, whoever resumes, dies, reads or fills the disk."""

import logging
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bebop.errors import UserError
from bebop.trajectory import TOP
from bebop.trajectory_db import writer as trajectory_log
from bebop.trajectory_db.reader import NAME, Trajectories
from bebop.trajectory_db.writer import prompt_row
from tests.run_dir.test_full_disk import at_most
from tests.stored_answers import group, opened, same, steps, write, written


def test_going_on_after_a_step_drops_the_later_ones(tmp_path: Path) -> None:
    written(tmp_path, *range(1, 6))
    again = opened(tmp_path, resume_from=3)
    assert steps(tmp_path) == [1, 2, 3]
    write(again, 4, first=100)  # a crash, then other prompts
    again.close()
    with Trajectories(tmp_path / NAME) as stored:
        assert {row["step"]: row["prompt"] for row in stored.query("SELECT step, prompt FROM answers")}[4] == 101
        for table, count in (("prompts", 8), ("answers", 16), ("tokens", 16)):
            assert stored.query(f"SELECT count(*) FROM {table}")[0][0] == count


def test_going_back_in_flight_replaces_steps(tmp_path: Path) -> None:
    log = opened(tmp_path)
    for step in (1, 2, 3, 4, 3):  # the trainer died after step 4, and its checkpoint was of step 2
        write(log, step)
    assert steps(tmp_path) == [1, 2, 3]
    write(log, 4)
    log.close()
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_new_run_begins_with_an_empty_file(tmp_path: Path) -> None:
    written(tmp_path, 1)
    opened(tmp_path).close()
    assert steps(tmp_path) == []


@pytest.mark.parametrize(
    ("item", "gold"),
    [
        ({}, None),
        ({"answer": "4"}, "4"),
        ({"answer": 4}, "4"),
        ({"answer": None}, None),
        ({"answer": ["ä"]}, '["ä"]'),
        ({"answer": "a\ud800"}, "a?"),
    ],
)
def test_the_right_answer_is_kept_as_text(item: dict[str, Any], gold: str | None) -> None:
    asked = group(0)
    assert prompt_row(replace(asked, prompt=replace(asked.prompt, item=item)))["gold"] == gold


def test_a_run_that_kept_nothing_may_begin_to(tmp_path: Path) -> None:
    written(tmp_path, 7, resume_from=6)
    assert steps(tmp_path) == [7]
    with Trajectories(tmp_path / NAME) as stored:
        meta = {row["key"]: row["value"] for row in stored.query("SELECT * FROM meta")}
    assert meta == {"format": "6", "mode": "all", "top": str(TOP)}


KILLED = """
import sys
from pathlib import Path
from tests.stored_answers import group, opened, write
log = opened(Path(sys.argv[1]))
for step in range(1, 10**6):
    write(log, step, groups=8)
    print(step, flush=True)
"""


def test_a_kill_leaves_whole_steps(tmp_path: Path) -> None:
    writer = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    while int(writer.stdout.readline()) < 20:
        pass
    os.kill(writer.pid, signal.SIGKILL)
    said = [20, *map(int, writer.communicate()[0].split())][-1]
    with Trajectories(tmp_path / NAME) as stored:
        counts = stored.query("SELECT step, count(*) FROM answers JOIN tokens ON answer = id GROUP BY step")
    assert [tuple(row) for row in counts] == [(step, 16) for step in range(1, len(counts) + 1)]
    assert len(counts) - said in (0, 1)
    log = opened(tmp_path, resume_from=10)
    write(log, 11, groups=8)
    log.close()
    assert steps(tmp_path) == list(range(1, 12))


HALF = """
import os, sqlite3, sys
file = sqlite3.connect(sys.argv[1], isolation_level=None)
file.execute("PRAGMA cache_size = 1")  # so that pages reach the file before the commit
file.execute("BEGIN IMMEDIATE")
file.execute("DELETE FROM tokens")
file.executemany("INSERT INTO pieces VALUES (?, ?)", [(n, "x" * 500) for n in range(1000, 3000)])
os._exit(9)
"""


def test_a_reader_takes_back_half_a_step(tmp_path: Path) -> None:
    (batch,) = written(tmp_path, 1)
    before = Trajectories(tmp_path / NAME)
    assert subprocess.run([sys.executable, "-c", HALF, str(tmp_path / NAME)]).returncode == 9
    assert (tmp_path / f"{NAME}-journal").exists()
    same(before.answer(0), batch[0], 0)
    before.close()
    assert subprocess.run([sys.executable, "-c", HALF, str(tmp_path / NAME)]).returncode == 9
    with Trajectories(tmp_path / NAME) as stored:
        assert stored.pieces(range(1000, 3000)) == {}
        same(stored.answer(0), batch[0], 0)


def test_a_reader_sees_whole_steps_while_they_are_written(tmp_path: Path) -> None:
    log = opened(tmp_path)
    done, seen = threading.Event(), []

    def watch() -> None:
        while not done.is_set():
            with Trajectories(tmp_path / NAME) as stored:
                sql = "SELECT step, count(*) FROM answers JOIN tokens ON answer = id GROUP BY step"
                seen.append([tuple(row) for row in stored.query(sql)])

    watcher = threading.Thread(target=watch)
    watcher.start()
    for step in range(1, 500):
        before = len(seen)
        write(log, step)
        if len({len(found) for found in seen}) > 4:
            break
        while len(seen) == before and watcher.is_alive():  # else a writer that never rests may keep the reader out
            time.sleep(0.001)
    done.set()
    watcher.join()
    log.close()
    assert all(found == [(step, 4) for step in range(1, len(found) + 1)] for found in seen)
    assert len({len(found) for found in seen}) > 4, "the reader was there meanwhile"


def test_who_holds_the_file_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trajectory_log, "WAIT", 0.05)
    log = opened(tmp_path)
    for step in (1, 2, 3):
        write(log, step)
    holder = sqlite3.connect(tmp_path / NAME, isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    with caplog.at_level(logging.WARNING):
        write(log, 2)
    assert "step 2 is left out" in caplog.text
    with pytest.raises(UserError, match="held by another process"):
        opened(tmp_path, resume_from=2)
    holder.execute("ROLLBACK")
    write(log, 3)
    log.close()
    assert steps(tmp_path) == [1, 3], "the step 2 of before is of another past"


# ---- what can be wrong with the file


def test_a_full_disk_is_one_line_and_leaves_whole_steps(tmp_path: Path) -> None:
    log = opened(tmp_path)
    write(log, 1)
    with at_most((tmp_path / NAME).stat().st_size + 8192), pytest.raises(UserError, match="raise the limit") as caught:
        for step in range(2, 200):
            write(log, step)
    assert str(caught.value).startswith(f"'{tmp_path / NAME}' cannot be written: ")
    found = steps(tmp_path)
    assert found == list(range(1, len(found) + 1))
    again = write(log, found[-1] + 1)  # there is space again
    log.close()
    assert steps(tmp_path) == [*found, found[-1] + 1]
    with Trajectories(tmp_path / NAME) as stored:
        ids = {int(i) for group in again for t in group.trajectories for i in t.completion.token_ids}
        assert set(stored.pieces(ids)) == ids


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        opened(tmp_path / "file")
    (tmp_path / NAME).mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        opened(tmp_path, resume_from=1)


def test_files_that_are_not_ours_are_one_line(tmp_path: Path) -> None:
    path = tmp_path / NAME
    with pytest.raises(UserError, match="is not there"):
        Trajectories(path)
    for content in (b"", b"step,reward\n" * 1000):
        path.write_bytes(content)
        with pytest.raises(UserError, match="is damaged or no file of bebop's"):
            Trajectories(path)
        with pytest.raises(UserError, match="is damaged or no file of bebop's"):
            opened(tmp_path, resume_from=1)
    written(tmp_path, 1)
    good = path.read_bytes()
    path.write_bytes(good[:8192] + b"\xff" * (len(good) - 8192))
    with pytest.raises(UserError, match="is damaged"), Trajectories(path) as stored:
        stored.answer(0)
    path.write_bytes(good)
    file = sqlite3.connect(path)
    with file:
        file.execute("UPDATE tokens SET verdicts = x'00'")
    with pytest.raises(UserError, match="is damaged"), Trajectories(path) as stored:
        stored.answer(0)
    with file:
        file.execute("UPDATE meta SET value = '7' WHERE key = 'format'")
    file.close()
    for open_it in (lambda: Trajectories(path), lambda: opened(tmp_path, resume_from=1)):
        with pytest.raises(UserError, match="format '7' is not known, this version of bebop reads format 6"):
            open_it()


def test_what_may_not_be_written_can_be_read(tmp_path: Path) -> None:
    (batch,) = written(tmp_path, 1)
    assert [path.name for path in tmp_path.iterdir()] == [NAME], "one file, to be copied as it is"
    stamp = (tmp_path / NAME).stat()
    (tmp_path / NAME).chmod(0o400)
    tmp_path.chmod(0o500)
    try:
        with Trajectories(tmp_path / NAME) as stored:
            same(stored.answer(0), batch[0], 0)
            with pytest.raises(UserError, match="readonly"):
                stored.query("DELETE FROM answers")
    finally:
        tmp_path.chmod(0o700)
    assert (tmp_path / NAME).stat().st_mtime_ns == stamp.st_mtime_ns
