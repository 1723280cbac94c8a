"""A real job on Ray whose answers are trajectories of several turns: deaths, resume, co-training, what is stored."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from bebop.trajectory_db.reader import NAME, Trajectories
from tests.test_job import finish, pids, rows, start, wait_for_step

pytestmark = pytest.mark.slow

GUESS = ("task=environment", "task.name=guess", "rollout.sampling.max_new_tokens=24", "trainer.save_every=2")


def test_a_job_with_an_environment_survives_and_goes_on(tmp_path: Path) -> None:
    held_out = ("evaluation.every=3", "evaluation.size=5", "evaluation.samples=1")
    run = start(tmp_path, *GUESS, *held_out, "trainer.steps=4", "cotrain=always", "rollout.staleness=1")
    wait_for_step(tmp_path, 1, run)
    os.kill(pids(tmp_path, "rollout")[0], signal.SIGKILL)
    code, errors = finish(run)
    assert code == 0 and "prompts start again" in errors, errors
    code, errors = finish(start(tmp_path, *GUESS, "trainer.steps=6", "cotrain=always", "runtime.resume=true"))
    assert code == 0, errors
    before, *found = rows(tmp_path)
    assert [row["step"] for row in found] == list(range(1, 7)) and before["step"] == 0
    evaluated = [before, *(row for row in found if "eval/reward" in row)]
    assert [row["step"] for row in evaluated] == [0, 3, 4, 6], "step 4 was the last one of the first run"
    assert all(row["eval/lost"] == 0 and row["eval/length"] > 0 for row in evaluated)
    for row in found:
        assert row.get("rollout/logprob_diff_current", 0.0) < 1e-4 and row["staleness/max"] <= 1
        assert row["turn/count"] >= 1 and row["turn/lost"] == 0
    assert max(row["turn/count"] for row in found) > 1.2, "the game asks on"
    assert any(row.get("head/loss", np.nan) > 0 for row in found)
    with Trajectories(tmp_path / NAME) as stored:
        (answers,) = stored.query("SELECT count(*) FROM answers")[0]
    assert answers == 6 * 16


@pytest.mark.exhaustive("starts a job; the other test of this file is a slow one")
def test_what_cannot_be_played_is_one_line(tmp_path: Path) -> None:
    mistakes = {
        "task.name=chess": "task.name='chess' is not possible for an environment: give guess",
        "+task.args.depth=3": "task.args.depth=3: environment guess has no such argument",
        "rollout.max_length=6 rollout.sampling.max_new_tokens=4": "rollout.max_length=6 is not possible",
        "rollout.sampling.stop=['.']": "rollout.sampling.stop=['.'] is not possible",
    }
    for number, (mistake, line) in enumerate(mistakes.items()):
        folder = tmp_path / str(number)
        code, errors = finish(start(folder, *GUESS, *mistake.split()))
        assert code == 2 and line in errors and len(errors.splitlines()) == 1, errors
        assert not folder.exists()
