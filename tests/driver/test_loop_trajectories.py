"""The loop hands every batch that was trained on to the file of answers, once, with what the trainer said of it."""

import asyncio
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop.config.compose import job_config
from bebop.config.job import JobConfig
from bebop.driver.loop import Loop
from bebop.monitor.watch import NullMonitor, Observation
from bebop.runtime.actors import RayTrainer
from bebop.runtime.job import _trajectories
from bebop.trajectory_db.reader import NAME, Trajectories
from bebop.trajectory_db.writer import TrajectoryLog
from tests.fakes import GROUPS, SIZE, FakeSink, FakeTrainer, FakeWorker, go, job, make, prompt
from tests.stored_answers import group, steps


def kept(folder: Path) -> TrajectoryLog:
    return TrajectoryLog(folder / NAME, "sample", str, SIZE)


def test_every_answer_that_was_trained_on_is_kept_with_its_step(tmp_path: Path) -> None:
    log = kept(tmp_path)
    loop, trainer, sink = make(job(steps=6, staleness=2), FakeWorker(), FakeWorker(), kept=log, slow=50)
    assert go(loop)
    log.close()
    with Trajectories(tmp_path / NAME) as stored:
        answers = [stored.answer(number) for number in range(6 * GROUPS * SIZE)]
        assert stored.query("SELECT count(*) FROM answers")[0][0] == len(answers)
    assert [a.prompt for a in answers[::SIZE]] == [prompt for batch in trainer.batches for prompt in batch]
    assert all(a.step == a.prompt // GROUPS + 1 and a.system == loop.config.decoding.system for a in answers)
    assert max(a.staleness for a in answers) == max(trainer.lags) > 0
    assert [a.staleness for a in answers[::SIZE]] == trainer.lags
    # The fake's log-probs are those of the first answer of the update that has just been made: minus its number.
    for answer in answers:
        said = None if answer.id % (GROUPS * SIZE) else [-answer.step] * 3
        assert (None if answer.trainer_logprobs is None else answer.trainer_logprobs.tolist()) == said
    assert all(row["time/monitor"] > 0 for _, row in sink.rows)


def test_answers_are_of_the_system_that_decoded_them(tmp_path: Path) -> None:
    class Switch(NullMonitor):
        def observe(self, step: int, *seen: Any) -> Observation:
            self.decoding = dataclasses.replace(self.decoding, system="ngram" if step == 2 else self.decoding.system)
            return super().observe(step, *seen)

    config, log, sink = job(steps=4, staleness=0), kept(tmp_path), FakeSink()
    worker = FakeWorker()
    worker.configure = lambda decoding: asyncio.sleep(0)  # type: ignore[method-assign,assignment]
    assert go(Loop(config, prompt, [worker], FakeTrainer(), [sink], Switch(config), log))
    log.close()
    before = config.decoding.system
    with Trajectories(tmp_path / NAME) as stored:
        found = dict(map(tuple, stored.query("SELECT DISTINCT step, system FROM answers")))
    assert found == {1: before, 2: before, 3: "ngram", 4: "ngram"}


def test_every_rank_is_asked_for_its_answers() -> None:
    class Ranks(RayTrainer):
        async def _all(self, method: str, *arguments: Any) -> list[Any]:
            assert method == "logprobs"
            return [{0: np.zeros(1)}, {}, {5: np.ones(2), 2: np.ones(1)}]

    assert sorted(asyncio.run(Ranks(job(), Path(), ()).logprobs())) == [0, 2, 5]


def test_a_run_that_goes_back_keeps_each_step_once(tmp_path: Path) -> None:
    log = kept(tmp_path)
    first, before, _ = make(job(steps=4, staleness=0, save_every=2), FakeWorker(), kept=log)
    assert go(first) and steps(tmp_path) == [1, 2, 3, 4]
    second, _, _ = make(job(steps=3, staleness=0), FakeWorker(), kept=log, version=2)
    second.restore(before.saved[2])
    assert go(second) and steps(tmp_path) == [1, 2, 3]
    log.close()


@pytest.mark.parametrize("start", [0, 3])
def test_off_keeps_nothing(tmp_path: Path, start: int) -> None:
    assert _trajectories(job_config(["monitor.trace=off"]), tmp_path, start) is None
    assert list(tmp_path.iterdir()) == []


def answers(config: JobConfig, folder: Path, start: int, first: int, last: int) -> None:
    """What the steps from ``first`` to ``last`` leave behind, in a run that goes on after ``start``."""
    log = _trajectories(config, folder, start)
    assert log is not None
    for step in range(first, last + 1):
        log.write(step, [group(step)], step - 1, "bebop", {})
    log.close()


def test_a_run_that_goes_on_without_leaves_what_was_kept_up_to_there(tmp_path: Path) -> None:
    config = job_config(["monitor.trace=all"])
    answers(config, tmp_path, 0, 1, 5)
    assert _trajectories(job_config(["monitor.trace=off"]), tmp_path, 3) is None
    assert steps(tmp_path) == [1, 2, 3], "steps 4 and 5 of before are of another past"
    answers(config, tmp_path, 6, 7, 7)
    assert steps(tmp_path) == [1, 2, 3, 7]
    with Trajectories(tmp_path / NAME) as stored:
        assert stored.answer(7 * config.trainer.group_size).prompt == 7
        pieces = stored.pieces(range(100))
    assert len(pieces) > 20 and all(pieces.values()) and "\ufffd" not in "".join(pieces.values())
