"""trajectories.sqlite holds trajectories of several turns with what was read between them."""

import dataclasses
from pathlib import Path

import numpy as np

from bebop.trajectory import NONE, VERDICTS, join_traces
from bebop.trajectory_db.reader import NAME, StoredAnswer, Trajectories
from bebop.trajectory_db.writer import TrajectoryLog
from bebop.view.drift_tokens import _tested
from bebop.view.folders import answer, facets, listing, siblings
from tests.several_turns import group, trajectory
from tests.stored_answers import SIZE, trace

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


def test_cycles_go_on_and_what_is_not_known_stays_so() -> None:
    known = trace(4)  # cycles 0, 0, 1, 1
    unknown = dataclasses.replace(known, cycles=np.full(4, NONE, dtype=np.int32))
    assert join_traces([known, unknown, known]).cycles.tolist() == [0, 0, 1, 1, *[NONE] * 4, 2, 2, 3, 3]


def test_drafters_keep_their_names() -> None:
    one = dataclasses.replace(trace(2), names=("mtp",), drafters=np.array([0, NONE], dtype=np.int8))
    other = dataclasses.replace(trace(2), names=("block", "mtp"), drafters=np.array([0, 1], dtype=np.int8))
    whole = join_traces([one, other])
    assert whole.names == ("mtp", "block") and whole.drafters.tolist() == [0, NONE, 1, 0]


def test_completions_of_an_environments_question_are_compared_with_no_other(tmp_path: Path) -> None:
    log = TrajectoryLog(tmp_path / NAME, "all", str, SIZE)
    log.write(1, [group(n, trajectory(turns=1), trajectory(turns=1)) for n in (0, 1)], 2, "bebop", {})
    log.close()
    with Trajectories(tmp_path / NAME) as store:
        assert {row["prompt"] for row in siblings(store, 0, "")} == {0} and len(siblings(store, 1, "")) == 2
