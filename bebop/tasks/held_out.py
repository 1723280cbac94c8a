"""Held-out questions of a job: found before it starts, and asked again in each evaluation.

Questions of a generated task come from a stream with another seed. Questions that training also asks, compared by their
text, are left out: a data set of few different questions repeats them whatever its seed. Questions of a file are used
as they are, and a warning gives the number that training also asks. Environments get other seeds than in training.
"""

import json
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.tasks.environment import find_kind, question
from bebop.tasks.files import FileItems
from bebop.tasks.rewards import check_reward
from bebop.tasks.source import EnvironmentSource, Items, PromptSource, chat_encoder, instruction, open_items
from bebop.trajectory import Prompt

log = logging.getLogger(__name__)
# Training questions compared with the held-out ones before the start: 100,000 take 3 to 10 s to generate. The metric
# ``eval/seen`` counts those that a longer training asks.
COMPARED = 100_000
LOOKED = 8  # questions of an environment that are compared with training's: making one may take its time
TRIES = 20  # candidates for each held-out question before the task counts as too small
OWN_NUMBERS = 1 << 31  # added to a question's number, which seeds environments: training has lower numbers


class Source(Protocol):
    """Source of prompts by number."""

    def prompt(self, index: int) -> Prompt:
        """Return prompt ``index`` >= 0."""
        ...


class HeldOut:
    """Held-out questions of a job, each identified by its number in its own stream."""

    def __init__(self, source: Source, numbers: Sequence[int]) -> None:
        """Use the questions ``numbers`` [Q] of a stream."""
        self.source, self.numbers = source, numbers

    def prompt(self, index: int) -> Prompt:
        """Return the prompt of held-out question ``-1 - index``; ``index`` is below 0."""
        number = self.numbers[-1 - index]
        return replace(self.source.prompt(number), index=index, question=OWN_NUMBERS + number, epoch=0)


def find_held_out(config: JobConfig, tokenizer: Any) -> HeldOut | None:
    """Return the held-out questions of a job, checked against their reward; None for a job without evaluations.

    Args:
        config: configuration of the job.
        tokenizer: tokenizer of its model.

    Raises:
        UserError: The task, its file or its reward has a fault, or it has too few questions that training does not ask.
    """
    if not config.evaluation.every:
        return None
    task, size = config.held_out_task, config.evaluation.size
    if task.turns and find_kind(task.name).listed:
        raise UserError(
            f"evaluation.every={config.evaluation.every} is not possible with task.name={task.name!r}: its tasks are a "
            "list, of which training asks all; give 0"
        )
    try:
        if task.turns:
            return HeldOut(_of_environment(config, size), range(size))
        items = open_items(task)
        check_reward(task, items)
        room = config.rollout.max_length - config.rollout.sampling.max_new_tokens
        source = PromptSource(task, chat_encoder(tokenizer, instruction(task, tokenizer)), room, items)
        asked = set(_training_questions(config))
        if isinstance(items, FileItems):
            return HeldOut(source, _of_file(source, items, size, asked, config))
        return HeldOut(source, _fresh(source, size, asked))
    except UserError as error:
        text = str(error)
        if text.startswith("task.path=") and config.evaluation.path is not None:
            text = text.removeprefix("task.")
            raise UserError(f"evaluation.{text}") from None
        raise UserError(f"evaluation.{text}" if text.startswith("task.") else text) from None


def _training_questions(config: JobConfig) -> Iterator[str]:
    """Yield the questions that training asks, up to ``COMPARED``.

    A question that is too long for a prompt is yielded instead of its replacement.
    """
    items: Items = open_items(config.task)
    steps = config.trainer.steps * config.trainer.groups_per_step
    for index in range(min(steps, COMPARED)):
        yield _text(items.item(index))


def _text(item: dict[str, Any]) -> str:
    """Return an item's question, a text or messages, as one text."""
    question = item["question"]
    return question if isinstance(question, str) else json.dumps(question, sort_keys=True)


def _fresh(source: PromptSource, size: int, asked: Collection[str]) -> list[int]:
    """Return the numbers of the first ``size`` questions [Q] that differ from each other and from ``asked``."""
    numbers, seen = list[int](), set(asked)
    for number in range(TRIES * size):
        text = _text(source.prompt(number).item)
        if text not in seen:
            seen.add(text)
            numbers.append(number)
        if len(numbers) == size:
            return numbers
    raise UserError(
        f"evaluation.size={size} is not possible: of {TRIES * size} questions of {source.config.name} only "
        f"{len(numbers)} are new to training: give at most that many, other evaluation.task.args, or a file as "
        "evaluation.path"
    )


def _of_file(source: PromptSource, items: FileItems, size: int, asked: Collection[str], config: JobConfig) -> list[int]:
    """Return the numbers [Q] of the first ``size`` questions of a shuffled file, each at most once.

    It warns of questions that training also asks, and of those left out because they are too long for a prompt: the
    source would replace them by other rows of the file.
    """
    numbers, name, long, known = list[int](), config.held_out_task.path, 0, 0
    for number in range(len(items.rows)):
        if len(numbers) == size:
            break
        prompt = source.prompt(number)
        if prompt.question != items.asked(number)[1]:
            long += 1
            continue
        numbers.append(number)
        known += _text(prompt.item) in asked
    if long:
        log.warning("%d questions in %s are too long for a prompt: evaluations leave them out", long, name)
    if known:
        log.warning("%d of %d evaluation questions in %s are asked in training as well", known, len(numbers), name)
    return numbers


def _of_environment(config: JobConfig, size: int) -> EnvironmentSource:
    """Return the source of an environment's questions; warn if the first of them have the items of training."""
    task, training = config.held_out_task, config.task
    kind, looked = find_kind(task.name), min(size, LOOKED)
    if kind == find_kind(training.name):
        known = sum(
            question(kind, number, task.seed, task.args) == question(kind, number, training.seed, training.args)
            for number in range(looked)
        )
        if known:
            log.warning(
                "%d of the first %d evaluation questions of %s have the same item in training: its item(index, seed) "
                "should use the seed, unless reset makes another question of each seed",
                known, looked, task.name,
            )  # fmt: skip
    return EnvironmentSource(task)
