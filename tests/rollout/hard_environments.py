"""Environments of the tests that are killed at work, or wait until very many are open."""

import asyncio
import os
import random
import signal
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bebop.tasks.environment import EnvStep, Message


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
