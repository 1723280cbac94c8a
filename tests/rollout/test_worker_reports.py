"""What a worker reports before a whole group is done: single answers where prompts are pulled, and its pace."""

import threading
from collections.abc import Iterator

import pytest

from bebop.protocols import Pace
from bebop.rollout.worker import RolloutWorker
from bebop.trajectory import Prompt
from tests.rollout.test_worker import LAST, SIZE, finish, prompt, submit, tokens, worker


@pytest.fixture
def rewarding() -> Iterator[list[RolloutWorker]]:
    """Workers whose threads are to be stopped at the end, whatever happens."""
    workers: list[RolloutWorker] = []
    yield workers
    for one in workers:
        one.stop()


def test_where_prompts_are_pulled_answers_go_before_the_rest_of_theirs() -> None:
    """So that whoever hands out prompts sees room; each answer is told once."""
    pulled, whole = worker(dispatch="pull", slots=2), worker(slots=2)
    for one in (pulled, whole):
        submit(one, [prompt(0), prompt(1)])
    told: dict[tuple[int, int], list[int]] = {}
    sizes = []
    for _ in range(80):
        pulled.turn()
        for part in pulled.collect(0, LAST).parts:
            sizes.append(len(part.members))
            for member, one_answer in zip(part.members, part.trajectories, strict=True):
                assert (part.prompt.index, member) not in told
                told[part.prompt.index, member] = one_answer.completion.token_ids.tolist()
    every = {i: tokens(group) for i, group in finish(whole, 2).items()}
    assert told == {(i, member): every[i][member] for i in (0, 1) for member in range(SIZE)}
    assert min(sizes) < SIZE


def test_the_pace_of_rewards_is_told(rewarding: list[RolloutWorker]) -> None:
    """A reward that does not come back shows as silence, and stops showing once it does."""
    held, called = threading.Event(), threading.Event()

    def slow(text: str, asked: Prompt) -> float:
        called.set()
        assert held.wait(20)
        return 0.0

    one = worker(slow)
    rewarding.append(one)

    def pace() -> Pace:
        return next(pace for pace in one.collect(0, LAST).paces if pace.name == "reward")

    assert (pace().silent, pace().slowest, pace().limit) == (0.0, 0.0, one.config.task.reward_timeout)
    one.start()
    submit(one, [prompt(0)])
    assert called.wait(20)
    first, second = pace().silent, pace().silent
    assert 0 < first < second
    held.set()
    while not one.collect(5, LAST).parts:
        pass
    assert pace().silent == 0.0 and pace().slowest > first
