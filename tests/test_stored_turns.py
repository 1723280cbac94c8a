"""trajectories.sqlite holds trajectories of several turns with what was read between them, and older files are read."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bebop.token_trace import NONE, VERDICTS
from bebop.trajectories import NAME, StoredAnswer, Trajectories
from bebop.trajectory_log import TrajectoryLog
from bebop.trajectory_schema import FORMAT, SCHEMA
from bebop.view.drift_tokens import _tested
from bebop.view.folders import answer, facets, listing
from tests.several_turns import group, trajectory
from tests.stored_answers import SIZE, opened, write

MARKS = [0, 0, 0, 0, -1, -1, -1, 1, 1, 1, -2, -2, -2, -2, -2, 2, 2]
TRAINER = np.array([-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0], dtype=np.float32)


def stored(folder: Path) -> None:
    log = TrajectoryLog(folder / NAME, "all", str, SIZE)
    played = trajectory(traced=True, ended="turns", restarts=2), trajectory(turns=1, reward=0.0)
    log.write(1, [group(0, *played, lost=1)], 2, "bebop", {0: TRAINER})
    log.close()


def both(folder: Path) -> tuple[StoredAnswer, StoredAnswer]:
    with Trajectories(folder / NAME) as found:
        return found.answer(0), found.answer(1)


def test_what_was_read_is_stored_and_is_not_said_to_be_written(tmp_path: Path) -> None:
    stored(tmp_path)
    one, other = both(tmp_path)
    assert one.marks.tolist() == MARKS and other.marks.tolist() == [0] * 4
    assert (one.length, one.written, one.turns, one.ended, one.restarts) == (17, 9, 3, "turns", 2)
    assert (other.length, other.written, other.turns, other.ended, other.restarts) == (4, 4, 1, "done", 0)
    assert one.ids[4:7].tolist() == [150, 151, 152] and one.ids[7:10].tolist() == [110, 111, 112]
    assert one.text == "turn 0\n\nturn 1\n\nturn 2" and one.accept_length == 9 / 6
    assert (one.version_first, one.version_last, one.staleness) == (0, 2, 2)
    written = np.array(MARKS) >= 0
    assert np.isnan(one.logprobs).tolist() == (~written).tolist()
    assert one.trainer_logprobs is not None
    assert np.isnan(one.trainer_logprobs).tolist() == (~written).tolist()
    assert one.trainer_logprobs[written].tolist() == TRAINER.tolist()


def test_the_trace_of_what_was_read_says_nothing(tmp_path: Path) -> None:
    stored(tmp_path)
    trace = both(tmp_path)[0].trace
    assert trace is not None and len(trace) == 17
    read = np.array(MARKS) < 0
    assert set(trace.verdicts[read]) == {VERDICTS.index("unknown")} and np.isnan(trace.overlap[read]).all()
    assert (trace.cycles[read] == NONE).all() and (trace.target_ids[read] == NONE).all()
    assert not np.isnan(trace.overlap[~read]).any()
    # Cycles go on from turn to turn: two of the first, two of the second, one of the third.
    assert trace.cycles[~read].tolist() == [0, 0, 1, 1, 2, 2, 3, 4, 4]
    # A draft's place in its cycle is counted from the cycle's own first token, whatever was read before.
    tested = _tested([both(tmp_path)[0]])
    assert tested.places.place.tolist() == np.flatnonzero(~read).tolist()
    assert tested.position.tolist() == [1, 2, 1, 2, 1, 2, 1, 1, 2]
    assert tested.follows[4] == 152  # the second turn follows what was read, not the first turn


def test_the_viewer_is_told_what_was_read(tmp_path: Path) -> None:
    stored(tmp_path)
    with Trajectories(tmp_path / NAME) as store:
        whole, single = answer(store, 0), answer(store, 1)
        assert whole is not None and single is not None
        assert listing(store, {"min_turns": "2"})["total"] == 1
        assert facets(store)["words"]["ended"] == {"done": 1, "turns": 1}
        assert facets(store)["ranges"]["written"] == [4, 9]
    columns = whole["tokens"]
    assert columns["turns"] == MARKS and single["tokens"]["turns"] is None
    for name in ("logprobs", "trainer_logprobs", "versions"):
        assert [value is None for value in columns[name]] == [mark < 0 for mark in MARKS], name
    assert whole["pieces"]["150"] == "150"
    assert whole["turns"][0] == {"role": "prompt", "text": "123"}  # of its tokens: an environment's has no text


LATER = {  # columns that a format has beside those of the one before
    2: {"answers": ("turns", "written", "ended", "restarts"), "tokens": ("turns",)},
    3: {"answers": ("cycles", "tested"), "prompts": ("question", "epoch")},
    4: {"answers": ("counts",)},
    5: {"prompts": ("gold",)},
}


def as_format(folder: Path, form: int) -> None:
    """Two groups of answers in a file of an older format."""
    log = opened(folder)
    write(log, 1)
    log.close()
    (folder / NAME).rename(folder / "new")
    with closing(sqlite3.connect(folder / NAME)) as file, file:
        file.executescript(re.sub("--.*", "", SCHEMA))  # comments would be cut in two
        for later in range(form + 1, FORMAT + 1):
            for table, names in LATER[later].items():
                for name in names:
                    file.execute(f"ALTER TABLE {table} DROP COLUMN {name}")
        file.execute("ATTACH ? AS new", (str(folder / "new"),))
        for table in ("meta", "prompts", "answers", "tokens", "pieces"):
            names = ", ".join(row[1] for row in file.execute(f"PRAGMA main.table_info({table})"))
            file.execute(f"INSERT INTO main.{table} SELECT {names} FROM new.{table}")
        file.execute("UPDATE main.meta SET value = ? WHERE key = 'format'", (str(form),))


@pytest.mark.parametrize("form", LATER)
def test_a_file_of_an_older_format_is_read(form: int, tmp_path: Path) -> None:
    as_format(tmp_path, form - 1)
    with Trajectories(tmp_path / NAME) as store:
        found = store.answers(range(1, 2))
        assert [(one.turns, one.written, one.ended, one.restarts) for one in found] == [
            (1, one.length, "answered", 0) for one in found
        ]
        assert len(found) == 4 and all(not one.marks.any() for one in found)
        known = (2, 4) if form >= 4 else (None, None)
        assert {(one.question, one.epoch, one.cycles, one.tested) for one in found} == {(None, 0, *known)}
        assert {row["counts"] for row in store.query("SELECT counts FROM answers")} == {"{}" if form == 5 else None}
        assert {one.gold for one in found} == {None}
        assert facets(store)["ranges"]["question"] == [None, None]
        assert listing(store, {"sort": "written", "min_turns": "1"})["total"] == 4
        shown = answer(store, 0)
        assert shown is not None and shown["answer"]["ended"] == "answered"


@pytest.mark.parametrize("form", LATER)
def test_a_run_goes_on_in_a_file_of_an_older_format(form: int, tmp_path: Path) -> None:
    as_format(tmp_path, form - 1)
    log = opened(tmp_path, resume_from=1)
    write(log, 2)
    log.write(3, [group(9, trajectory())], 2, "bebop", {})
    log.close()
    with Trajectories(tmp_path / NAME) as store:
        assert store.query("SELECT value FROM meta WHERE key = 'format'")[0][0] == str(FORMAT)
        assert [one.turns for one in store.answers(range(1, 4))] == [1] * 8 + [3]
        assert all(one.written == one.length for one in store.answers(range(1, 3)))
        assert [one.cycles for one in store.answers(range(1, 3))] == [2 if form >= 4 else None] * 4 + [2] * 4
        kept = ["{}" if form == 5 else None] * 4 + ["{}"] * 5
        assert [row["counts"] for row in store.query("SELECT counts FROM answers")] == kept


def columns(file: sqlite3.Connection, table: str) -> set[tuple[str, str, int, str | None]]:
    return {
        (name, kind, needed, default)
        for _, name, kind, needed, default, _ in file.execute(f"PRAGMA table_info({table})")
    }


@pytest.mark.parametrize("form", LATER)
def test_an_older_file_that_was_gone_on_with_has_the_tables_of_a_new_one(form: int, tmp_path: Path) -> None:
    as_format(tmp_path, form - 1)
    opened(tmp_path, resume_from=1).close()
    with closing(sqlite3.connect(":memory:")) as new, closing(sqlite3.connect(tmp_path / NAME)) as old:
        new.executescript(SCHEMA)
        for table in ("prompts", "answers", "tokens"):
            assert columns(old, table) == columns(new, table)
