"""Rewards of a rollout worker: errors that rise, and calls that hang."""

import threading
import time
from pathlib import Path

import pytest

from bebop.config import DecodingConfig, TaskConfig
from bebop.errors import UserError
from bebop.metrics import values
from bebop.monitor.estimators import rollout_metrics
from bebop.rollout.worker import RolloutWorker
from bebop.tasks.functions import RewardTimeout
from bebop.tasks.rewards import checked, make_reward
from bebop.trajectory import Group, Prompt
from tests.rollout.test_worker import LAST, SIZE, collect, prompt, started, submit, worker

__all__ = ["started"]  # a fixture


def test_what_a_reward_raises_is_raised_by_collect(started: list[RolloutWorker]) -> None:
    def fails(text: str, asked: Prompt) -> float:
        raise UserError(f"reward on prompt {asked.index}")

    one = worker(fails)
    started.append(one)
    one.start()
    submit(one, [prompt(2)])
    for _ in range(2):  # every time: the worker does nothing any more
        with pytest.raises(UserError, match="reward on prompt 2"):
            one.collect(10, LAST)


def test_a_reward_that_hangs_holds_up_nobody_and_is_counted(started: list[RolloutWorker]) -> None:
    """Decoding goes on while a reward is computed; one that hung gives 0, marked, and the metric counts it."""
    release, waiting = threading.Event(), threading.Event()

    def slow(text: str, asked: Prompt) -> float:
        if asked.index == 0:
            waiting.set()
            release.wait(20)
            raise RewardTimeout("reward mine on prompt 0 took more than task.reward_timeout=1 s")
        return 1.0

    one = worker(slow)
    started.append(one)
    one.start()
    submit(one, [prompt(0)])
    assert waiting.wait(20)
    submit(one, [prompt(1)])
    one.thread.configure(DecodingConfig(draft_tokens=2)).result(20)  # after the second prompt
    for _ in range(200):
        if not one.engine.unfinished:
            break
        time.sleep(0.05)
    assert not one.engine.unfinished and collect(one, 0) == {}  # all is decoded, and nothing rewarded yet
    release.set()
    done: dict[int, Group] = {}
    while len(done) < 2:
        done |= collect(one, 10)
    assert [(t.reward, t.timed_out) for t in done[0].trajectories] == [(0.0, True)] * SIZE
    assert [(t.reward, t.timed_out) for t in done[1].trajectories] == [(1.0, False)] * SIZE
    assert values(rollout_metrics(list(done.values())))["reward/timeouts"] == SIZE


def test_rewards_that_all_hang_end_the_job_in_one_line(started: list[RolloutWorker], tmp_path: Path) -> None:
    """With the function in its real process."""
    (tmp_path / "mine.py").write_text("import time\ndef hang(text, item): time.sleep(1000)")
    hangs = make_reward(TaskConfig(reward=f"{tmp_path}/mine.py:hang", reward_timeout=0.1))
    one = worker(lambda text, asked: checked(hangs, text, asked))
    started.append(one)
    one.start()
    submit(one, [prompt(0), prompt(1), prompt(2)])
    with pytest.raises(
        UserError, match=r"0.1 s, like the 5 answers before it: mend the function, or raise task"
    ) as end:
        while True:
            one.collect(10, LAST)
    assert "\n" not in str(end.value)
