"""What the page on an alarm is told, of answers whose traces are made by hand."""

import dataclasses
import json
import sqlite3
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from bebop.errors import UserError
from bebop.trajectory import Group, Trajectory
from bebop.trajectory_db.reader import NAME
from bebop.trajectory_db.writer import TrajectoryLog
from bebop.view.drift_tokens import explain
from bebop.view.folders import alarms
from tests.stored_answers import SIZE, group

COUNT = 40  # tokens of an answer
LOST, OTHERS = 7, (3, 4, 5)  # tokens that the target expects


def batch(step: int, lost: float) -> list[Group]:
    """Two groups, whose traced answers have their overlap at LOST less ``lost``; cycles of three tokens."""
    made = []
    for index in (2 * step - 2, 2 * step - 1):
        whole = group(index, tokens=COUNT)
        completion = whole.trajectories[0].completion
        assert completion.trace is not None
        random = np.random.default_rng(index)
        expects = random.choice([LOST, *OTHERS], COUNT).astype(np.int32)
        entropy = random.gamma(2, 0.2, COUNT)
        overlap = 0.9 - 0.3 * entropy - lost * (expects == LOST)
        overlap[::5] = np.nan  # no draft was tested there
        trace = dataclasses.replace(
            completion.trace,
            overlap=overlap.clip(0, 1).astype(np.float32),
            target_entropy=entropy.astype(np.float32),
            target_ids=np.column_stack([expects, np.full((COUNT, 7), 9)]).astype(np.int32),
            cycles=(np.arange(COUNT) // 3).astype(np.int32),
        )
        own = dataclasses.replace(completion, trace=trace, token_ids=expects + 10)
        first = Trajectory.single(own, whole.trajectories[0].reward)
        made.append(dataclasses.replace(whole, trajectories=(first, whole.trajectories[1])))
    return made


def a_run(folder: Path, steps: int = 9, spoiled: int = 7, restart: int | None = None) -> Path:
    folder.mkdir()
    log = TrajectoryLog(folder / NAME, "all", lambda number: f"<{number}>", SIZE)
    for step in range(1, steps + 1):
        log.write(step, batch(step, 0.5 if step >= spoiled else 0.0), step - 1, "bebop", {})
    log.close()
    row = {"step": steps, "state": "mismatch-driven", "evidence": "it fell", "action": {"kind": "none"}}
    (folder / "controller.jsonl").write_text(json.dumps(row) + "\n")
    lines = [{"step": s, **({"restart": True} if s == restart else {})} for s in range(1, steps + 1)]
    (folder / "drift.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_the_token_that_lost_comes_first_with_places_to_look_at(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    assert [row["step"] for row in alarms(run)] == [9]
    told = explain(run, 9)
    assert (told["state"], told["before"], told["after"], told["note"]) == ("mismatch-driven", [1, 5], [7, 9], "")
    first, *rest = told["tokens"]
    assert (first["id"], first["piece"]) == (LOST, f"<{LOST}>") and {row["id"] for row in rest} == {*OTHERS}
    assert first["share"] > 0.9 and first["loss"][1] > 0.05
    assert all(abs(row["share"]) < 0.1 for row in rest)
    assert first["overlap_after"] == pytest.approx(first["overlap_before"] - 0.5, abs=0.08)
    assert first["expected"] == pytest.approx(first["overlap_before"], abs=0.08)
    assert told["change"] == pytest.approx(told["explained"] - told["loss"][0])
    assert told["answers"] == [10, 6]
    json.dumps(told, allow_nan=False)


def test_examples_point_at_real_places(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run")
    written = {
        2 * step - 2 + i: made.trajectories[0].completion
        for step in range(1, 10)
        for i, made in enumerate(batch(step, 0.5 if step >= 7 else 0.0))
    }
    for example in explain(run, 9)["tokens"][0]["examples"]:
        completion = written[example["answer"] // SIZE]
        assert completion.trace is not None and completion.trace.target_ids[example["place"], 0] == LOST
        assert completion.trace.overlap[example["place"]] == pytest.approx(example["overlap"])
        before = completion.token_ids[max(0, example["place"] - 12) : example["place"]]
        assert example["context"] == "".join(f"<{number}>" for number in before)
        assert example["token"] == f"<{completion.token_ids[example['place']]}>" and example["step"] >= 7


def test_the_token_before_and_the_draft_s_place_are_told_too(tmp_path: Path) -> None:
    told = explain(a_run(tmp_path / "run"), 9)
    assert {row["id"] for row in told["previous"]} <= {-1, *(t + 10 for t in (LOST, *OTHERS))}
    assert sorted(row["piece"] for row in told["positions"]) == ["draft 1", "draft 2", "draft 3"]
    for table in ("previous", "positions"):  # the loss has nothing to do with either
        assert sum(row["share"] for row in told[table]) == pytest.approx(1)
        assert max(row["share"] for row in told[table]) < 0.7


def test_steps_before_a_restart_are_no_reference(tmp_path: Path) -> None:
    told = explain(a_run(tmp_path / "run", steps=12, spoiled=10, restart=4), 12)
    assert (told["before"], told["after"]) == ([4, 8], [10, 12]) and told["tokens"][0]["id"] == LOST


def test_what_cannot_be_told_is_said(tmp_path: Path) -> None:
    early = explain(a_run(tmp_path / "early", steps=5), 5)
    assert "within the first steps" in early["note"] and early["tokens"] == []
    with pytest.raises(UserError, match="has no alarm: there are 5"):
        explain(tmp_path / "early", 3)
    bare = tmp_path / "bare"
    bare.mkdir()
    log = TrajectoryLog(bare / NAME, "sample", str, SIZE)
    log.write(1, [group(0, traced=False)], 0, "bebop", {})
    log.close()
    (bare / "controller.jsonl").write_text(json.dumps({"step": 9, "state": "broken", "evidence": "x"}) + "\n")
    assert "No tested drafts were traced" in explain(bare, 9)["note"]
    mixed = a_run(tmp_path / "mixed")
    with closing(sqlite3.connect(mixed / NAME)) as file, file:
        file.execute("UPDATE answers SET system = 'bebop_history'")
    assert "head and history mixed" in explain(mixed, 9)["note"] and not explain(mixed, 9)["tokens"]
