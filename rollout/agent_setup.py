"""The agent loop of a job, and checks of its settings before anything starts."""

import asyncio
import dataclasses
from pathlib import Path

from bebop.config.job import ModelConfig, TaskConfig
from bebop.errors import UserError
from bebop.model.checkpoint import load_tokenizer, stop_tokens
from bebop.rollout.agent_loop import AgentLoop
from bebop.rollout.engine_thread import EngineThread
from bebop.tasks.chat_delta import ChatDelta, GivenTokens
from bebop.tasks.environment import EnvironmentLost, check_command, find_kind, seed
from bebop.tasks.episodes import Episodes
from bebop.trajectory import Prompt, same_beginning


def make_episodes(task: TaskConfig, output: Path | None = None) -> Episodes:
    """Return the episodes of a task's environment; raise ``UserError`` if it is unknown or its limits clash.

    ``output`` is the file for the output of environments in processes; None: they print where this process does.
    """
    limits, kind = task.environment, find_kind(task.name)
    check_command(kind, task.args, limits.step_seconds)
    return Episodes(
        kind,
        task.args,
        reset_seconds=limits.reset_seconds,
        step_seconds=limits.step_seconds,
        processes=limits.processes,
        output=output,
    )


def make_agent_loop(
    model: ModelConfig,
    task: TaskConfig,
    max_length: int,
    thread: EngineThread,
    eos: tuple[int, ...],
    output: Path | None = None,
) -> AgentLoop:
    """Return the agent loop of an environment task; raise ``UserError`` if the chat template does not allow turns."""
    return AgentLoop(thread, task, max_length, make_delta(model, task, eos), make_episodes(task, output))


def make_delta(model: ModelConfig, task: TaskConfig, eos: tuple[int, ...]) -> ChatDelta | GivenTokens:
    """Return the converter from messages to tokens, or a check of the tokens that an environment makes itself.

    Raises:
        UserError: The chat template does not allow turns.
    """
    tokenizer = load_tokenizer(model)
    return GivenTokens(len(tokenizer)) if find_kind(task.name).tokens else ChatDelta.checked(tokenizer, eos)


def check_environment(
    model: ModelConfig, task: TaskConfig, max_length: int, prompt: Prompt, setting: str = "rollout.max_length"
) -> None:
    """Raise ``UserError`` unless the template allows turns and two resets of the environment give the same prompt.

    The prompt has to leave room for a completion. ``setting`` is the name of ``max_length`` in messages.
    """
    delta = make_delta(model, task, stop_tokens(model))
    episodes = make_episodes(task)

    async def begin() -> Prompt:
        episode = episodes.open()
        try:
            messages = await episode.reset(prompt.item, seed(task.seed, prompt.number))
        finally:
            await episode.close()
        return dataclasses.replace(prompt, token_ids=tuple(delta.first(messages)))

    async def twice() -> tuple[Prompt, Prompt]:
        try:
            return await begin(), await begin()
        finally:
            await episodes.shutdown()

    try:
        one, other = asyncio.run(twice())
    except EnvironmentLost as lost:
        raise UserError(f"task.name={task.name!r} cannot begin: {lost}") from lost
    same_beginning(one, other)
    if len(one.token_ids) >= max_length:
        raise UserError(
            f"{setting}={max_length} is not possible: the first prompt of environment "
            f"{task.name} takes {len(one.token_ids)} tokens, and a completion needs room"
        )
