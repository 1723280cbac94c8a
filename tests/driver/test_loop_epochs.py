"""A job on a finite set of questions: which it asks, also after a resume in the middle of an epoch, and its metric."""

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from bebop.config.job import JobConfig, TaskConfig
from bebop.driver.loop import Loop
from bebop.driver.protocols import PartialGroup, WorkerReport
from bebop.metrics.metrics import values
from bebop.monitor.estimators import rollout_metrics
from bebop.tasks.source import PromptSource
from bebop.trajectory import Group, Prompt
from tests.fakes import GROUPS, FakeSink, FakeTrainer, FakeWorker, answer, go, job
from tests.fakes import prompt as endless
from tests.tasks.test_source import letters

QUESTIONS, STEPS = 5, 7  # of three prompts each: every other batch lies across two epochs


def finite() -> Callable[[int], Prompt]:
    return PromptSource(TaskConfig(name="gcd", size=QUESTIONS), letters, 10_000).prompt


def remembering() -> Callable[[int], Prompt]:
    """A stream that is wrong: what it asks depends on how often it was asked."""
    inner, shuffle, left = PromptSource(TaskConfig(name="gcd"), letters, 10_000), random.Random(0), list[int]()

    def prompt(index: int) -> Prompt:
        left[:] = left or shuffle.sample(range(QUESTIONS), QUESTIONS)
        asked = inner.prompt(left.pop())
        return replace(asked, index=index, question=asked.index, epoch=index // QUESTIONS)

    return prompt


def questions(trainer: FakeTrainer) -> list[tuple[int | None, int, tuple[int, ...]]]:
    """Return question, epoch and tokens of all prompts that it learned from."""
    prompts = [group.prompt for batch in trainer.seen for group in batch.groups]
    return [(prompt.question, prompt.epoch, prompt.token_ids) for prompt in prompts]


def config(staleness: int, dynamic: bool) -> JobConfig:
    return job(STEPS, staleness, 1, algorithm={"dynamic_sampling": dynamic}, monitor={"certify_every": 0})


class Uneven(FakeWorker):
    """Questions of an odd number are answered alike by all, so that ``dynamic_sampling`` passes them over."""

    def _report(self, parts: tuple[PartialGroup, ...], busy: float) -> WorkerReport:
        return super()._report(tuple(map(rewarded, parts)), busy)


def rewarded(part: PartialGroup) -> PartialGroup:
    odd, pairs = part.prompt.number % 2, zip(part.members, part.trajectories, strict=True)
    given = tuple(replace(t, reward=1.0 if odd else float(member)) for member, t in pairs if t is not None)
    return replace(part, trajectories=given)


def ran(
    config: JobConfig, prompt: Callable[[int], Prompt], found: FakeTrainer | None = None, after: int = 0
) -> tuple[FakeTrainer, FakeSink]:
    """A run, or one that goes on from what ``found`` has saved ``after`` so many steps."""
    trainer, sink = FakeTrainer(version=after), FakeSink()
    loop = Loop(config, prompt, [Uneven()], trainer, [sink])
    if found is not None:
        loop.restore(found.saved[after])
    assert go(loop)
    return trainer, sink


def differs(config: JobConfig, stream: Callable[[], Callable[[int], Prompt]]) -> bool:
    """Whether a run that was resumed after any of its steps asks otherwise than an uninterrupted one."""
    whole, _ = ran(config, stream())
    asked = questions(whole)
    assert len(asked) == STEPS * GROUPS
    return any(
        questions(ran(config, stream(), whole, after)[0]) != asked[after * GROUPS :] for after in range(1, STEPS)
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_resume_in_the_middle_of_an_epoch_asks_what_would_have_been_asked(staleness: int, dynamic: bool) -> None:
    assert not differs(config(staleness, dynamic), finite)


def test_a_stream_with_a_memory_is_noticed() -> None:
    assert differs(config(0, False), remembering)


def test_every_question_is_learned_from_once_an_epoch() -> None:
    trainer, sink = ran(config(1, False), finite())
    numbers = [question for question, _, _ in questions(trainer)]
    epochs = [numbers[i : i + QUESTIONS] for i in range(0, len(numbers) - QUESTIONS, QUESTIONS)]
    assert len(epochs) == 4 and all({*epoch} == {*range(QUESTIONS)} for epoch in epochs)
    assert len({tokens for *_, tokens in questions(trainer)}) == QUESTIONS
    assert [row["samples/epoch"] for _, row in sink.rows] == [(3 * step - 1) // QUESTIONS for step in range(1, 8)]


def test_groups_without_spread_are_passed_over_in_every_epoch() -> None:
    trainer, sink = ran(config(0, True), finite())
    assert {question for question, _, _ in questions(trainer)} == {0, 2, 4}
    assert [epoch for _, epoch, _ in questions(trainer)] == [i // 3 for i in range(STEPS * GROUPS)]
    assert sum(row["rollout/filtered_groups"] for _, row in sink.rows) > STEPS


def test_endless_questions_have_no_epoch() -> None:
    groups = [answer(endless(index), 0) for index in range(3)]
    assert "samples/epoch" not in values(rollout_metrics(groups))
    again: list[Group] = [replace(g, prompt=replace(g.prompt, question=1, epoch=i)) for i, g in enumerate(groups)]
    assert values(rollout_metrics(again))["samples/epoch"] == 2.0
