"""Environments of the tests: they answer with what they were told, break when they are told to, are killed at work, or
wait until very many are open.
"""

import asyncio
import os
import random
import signal
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bebop.tasks.environment import EnvStep, Message
from bebop.trajectory import Completion


class Echo:
    """Says the question's number, then how long the turn was; a reward of 1 a turn, done after ``turns``."""

    blocking = False

    resets = 0  # of all of them

    def __init__(
        self, turns: int = 3, breaks: Sequence[int] = (), alike: bool = True, reward: float = 1.0, together: int = 0
    ) -> None:
        """``breaks``: numbers of the resets, counted from 1, after whose first step it is lost.

        ``together``: nothing breaks before so many resets, so that what begins again has a later number than all that
        begin with it, however slow they are.
        """
        self.turns, self.breaks, self.alike, self.reward, self.step_number = turns, breaks, alike, reward, 0
        self.together = together

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        type(self).resets += 1
        self.number = type(self).resets
        own = "" if self.alike else "b" * self.number
        return ({"role": "user", "content": f"question {item['index']} of {seed}{own}"},)

    async def step(self, text: str) -> EnvStep:
        self.step_number += 1
        if self.number in self.breaks:
            while type(self).resets < self.together:
                await asyncio.sleep(0.01)
            raise RuntimeError("the environment broke")
        done = self.step_number >= self.turns
        said = ({"role": "tool", "content": f"you wrote {len(text)}"},)
        return EnvStep(
            messages=() if done else said, reward=self.reward, done=done, counts={"letters": float(len(text))}
        )

    async def close(self) -> None:
        self.step_number = -1


class Spelled(Echo):
    """Its numbers are spelled in letters, which the tokenizer of the tests tells apart."""

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        [message] = await super().reset(item, seed)
        return ({**message, "content": message["content"].translate(str.maketrans("0123456789", "abcdefghij"))},)


class TokenEcho:
    """Says how many tokens there were so far, as a token; done after three turns."""

    tokens = True

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[int, ...]:
        self.seen, self.turns = 3, 0
        return (3, 4, item["index"])

    async def step(self, completion: Completion) -> EnvStep:
        self.seen += len(completion.token_ids)
        self.turns += 1
        done, said = self.turns == 3, (5, self.seen % 11)
        self.seen += len(said)
        return EnvStep(messages=() if done else said, done=done, counts={"sum": float(completion.token_ids.sum())})

    async def close(self) -> None:
        self.turns = -1


class Fragile:
    """Its process is killed at every tenth step, and leaves a file in ``folder`` for it."""

    blocking = True

    def __init__(self, folder: str, share: float = 0.1) -> None:
        self.folder, self.share, self.steps = Path(folder), share, 0

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        return ({"role": "user", "content": "abc" + "d" * item["index"]},)

    async def step(self, text: str) -> EnvStep:
        if random.SystemRandom().random() < self.share:
            (self.folder / uuid.uuid4().hex).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1
        return EnvStep(messages=({"role": "user", "content": "e"},), reward=1.0, done=self.steps == 3)

    async def close(self) -> None:
        pass


class Gate:
    """Answers nobody before ``wanted`` of them are open."""

    blocking = False
    opened = most = 0  # now, and ever at a time

    def __init__(self, wanted: int) -> None:
        self.wanted = wanted

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        type(self).opened += 1
        type(self).most = max(self.most, self.opened)
        return ({"role": "user", "content": "abc"},)

    async def step(self, text: str) -> EnvStep:
        while self.most < self.wanted:
            await asyncio.sleep(0.01)
        type(self).opened -= 1
        return EnvStep(reward=1.0, done=True)

    async def close(self) -> None:
        pass
