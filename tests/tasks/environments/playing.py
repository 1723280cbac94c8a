"""Plays an environment with a scripted policy."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from bebop.tasks.environment import Environment, EnvStep, Message

Policy = Callable[[Sequence[Message]], str]  # of all that was read so far


def play(
    environment: Environment, item: dict[str, Any], policy: Policy, seed: int = 0
) -> tuple[list[Message], list[EnvStep]]:
    """All messages and all steps, up to the one that ends it."""

    async def run() -> tuple[list[Message], list[EnvStep]]:
        heard, steps = list(await environment.reset(item, seed)), list[EnvStep]()
        while not (steps and steps[-1].done):
            steps.append(await environment.step(policy(heard)))
            heard += steps[-1].messages
            assert len(steps) < 2000, "it has to end by itself"
        await environment.close()
        await environment.close()
        return heard, steps

    return asyncio.run(run())


def reward(steps: Sequence[EnvStep]) -> float:
    return sum(step.reward for step in steps)


def count(steps: Sequence[EnvStep], name: str) -> float:
    return sum(step.counts.get(name, 0.0) for step in steps)
