"""Which past answers go along with a prompt: the newest, within a bound, the same after a resume."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.driver.loop import Loop
from bebop.driver.past_completions import PastCompletions
from bebop.driver.protocols import Assignment
from bebop.trajectory import Completion, Group, Prompt, Trajectory
from bebop.trajectory_db.reader import NAME
from bebop.trajectory_db.writer import TrajectoryLog
from tests.fakes import GROUPS, SIZE, FakeSink, FakeTrainer, FakeWorker, go, job

SAID = st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 9), min_size=1, max_size=5)), max_size=30)


def plainly(said: Sequence[tuple[int, list[int]]], tokens: int, answers: int, prompt: int) -> list[list[int]]:
    """The longest newest part of all that was said that fits; of it, a prompt's newest."""
    start = len(said)
    while start and sum(len(answer) for _, answer in said[start - 1 :]) <= tokens:
        start -= 1
    return [answer for asked, answer in said[start:] if asked == prompt][-answers:]


@settings(max_examples=150, deadline=None)
@given(SAID, st.integers(1, 25), st.integers(1, 4))
def test_what_is_known_is_a_function_of_what_was_said_last(
    said: list[tuple[int, list[int]]], tokens: int, answers: int
) -> None:
    past = PastCompletions(tokens, answers)
    for prompt, answer in said:
        past.add([prompt], answer)
        assert past.tokens <= tokens
    for prompt in range(4):
        found = [answer.tolist() for answer in past.of([prompt])]
        assert found == plainly(said, tokens, answers, prompt)


def test_the_driver_keeps_more_than_a_worker() -> None:
    """Of questions that are asked in turns nothing is there any more when they come again, if less than two epochs fit:
    an answer from the beginning of one may be wanted at the end of the next."""
    kept = PastCompletions.wanted(from_dict(JobConfig, {"decoding": {"system": "history", "options": {"tokens": 100}}}))
    assert kept is not None
    for question in [*range(20), *range(19)]:
        kept.add([question], [question] * 10)
    assert len(kept.of([19])) == 1 and kept.tokens == 390


def group(index: int, texts: Sequence[Sequence[int]], question: tuple[int, ...] | None = None) -> Group:
    """Answers to a question, or to one of three."""
    prompt = Prompt(index=index, task="test", text="", token_ids=question or (index % 3, 7), item={})
    answers = [
        Completion(token_ids=np.array(ids), logprobs=np.zeros(len(ids), np.float32), versions=np.zeros(len(ids), int))
        for ids in texts
    ]
    return Group(prompt=prompt, trajectories=tuple(Trajectory.single(completion=one, reward=0.0) for one in answers))


@pytest.mark.parametrize("tokens", [7, 24, 1000])
def test_a_resumed_run_knows_what_it_knew(tmp_path: Path, tokens: int) -> None:
    """Whatever came after the checkpoint, and wherever in a step the bound falls."""
    rng = np.random.default_rng(0)
    groups = [group(i, [rng.integers(0, 9, rng.integers(1, 6)).tolist() for _ in range(2)]) for i in range(12)]
    log = TrajectoryLog(tmp_path / NAME, "off", str, 2)
    for step in range(1, 7):
        log.write(step, groups[2 * step - 2 : 2 * step], step - 1, "history", {})
    log.close()
    for step in (0, 1, 4, 6):
        whole, resumed = PastCompletions(tokens, 3), PastCompletions(tokens, 3)
        whole.take(groups[: 2 * step])
        resumed.recall(tmp_path / NAME, step)
        for question in range(3):
            known, again = ([a.tolist() for a in one.of((question, 7))] for one in (whole, resumed))
            assert known == again and (step < 4 or tokens < 1000 or len(known) == 3)
        assert whole.tokens == resumed.tokens


def test_a_run_that_kept_nothing_begins_with_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    past = PastCompletions(10, 3)
    past.recall(tmp_path / NAME, 5)
    assert past.tokens == 0 and "monitor.trace=off" in caplog.text


@pytest.mark.parametrize(
    ("decoding", "task", "wanted"),
    [
        ({"system": "bebop_history", "draft_tokens": 4, "options": {"past_tokens": 9, "completions": 2}}, {}, True),
        ({"system": "bebop"}, {}, False),
        ({"system": "history"}, {"source": "environment", "name": "guess"}, False),
    ],
)
def test_only_who_drafts_from_them_keeps_them(decoding: dict[str, Any], task: dict[str, Any], wanted: bool) -> None:
    past = PastCompletions.wanted(from_dict(JobConfig, {"decoding": decoding, "task": task}))
    assert (past is not None) == wanted
    assert past is None or (past.limit, past.answers) == (9, 2)


class Listening(FakeWorker):
    """Notes what comes along with each prompt."""

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        self.told = [*getattr(self, "told", ()), *((a.prompt.index, [p.tolist() for p in a.past]) for a in assignments)]
        await super().submit(assignments)


def test_workers_are_told_what_was_trained_on_before() -> None:
    """The three questions of each step are asked again in the next; both workers know what either of them heard."""
    workers = [Listening(), Listening()]
    past = PastCompletions(1000, 3)

    def prompt(index: int) -> Prompt:
        return Prompt(index=index, task="test", text="", token_ids=(index % GROUPS,), item={})

    loop = Loop(job(steps=3, staleness=0), prompt, workers, FakeTrainer(), [FakeSink()], past=past)
    assert go(loop)
    told = dict(one for worker in workers for one in worker.told)
    for index, answers in told.items():
        before = [index - GROUPS * back for back in (2, 1) if index >= GROUPS * back]
        assert answers == [[one, 1, 2] for one in before for _ in range(SIZE)][-3:]
    assert len(told) == 3 * GROUPS
