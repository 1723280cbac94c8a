"""Processes for environments that block: started when they are needed, kept when they are not, at most so many."""

import asyncio
from collections.abc import Mapping
from typing import Any

from bebop.tasks.environment import EnvironmentKind, EnvStep, Message
from bebop.tasks.episode_process import EnvironmentProcess
from bebop.tasks.output import Output


class Pool:
    """At most ``most`` processes of one kind; used from one event loop."""

    def __init__(self, kind: EnvironmentKind, args: Mapping[str, Any], most: int, output: Output | None = None) -> None:
        """Start nothing yet; ``args``: of the class; ``output``: where processes print; None: where this one does."""
        self.kind, self.args, self.output = kind, args, output
        self.room = asyncio.Semaphore(most)
        self.idle: list[EnvironmentProcess] = []
        self.all: set[EnvironmentProcess] = set()

    async def take(self) -> EnvironmentProcess:
        """One that nobody uses, once there is one, in the order of asking; ``UserError``, ``EnvironmentLost``."""
        await self.room.acquire()
        try:
            while self.idle:
                process = self.idle.pop()
                if not process.ended():
                    return process
                await self._end(process)
            process = await EnvironmentProcess.started(self.kind.make, self.args, self.kind.name, self.output)
            self.all.add(process)
            return process
        except BaseException:
            self.room.release()
            raise

    async def give_back(self, process: EnvironmentProcess, keep: bool) -> None:
        """Keep it for the next, or kill it."""
        try:
            if keep and not process.ended():
                self.idle.append(process)
            else:
                await self._end(process)
        finally:
            self.room.release()

    async def end(self) -> None:
        """Kill them all."""
        self.idle.clear()
        await asyncio.gather(*[self._end(process) for process in [*self.all]])

    async def _end(self, process: EnvironmentProcess) -> None:
        self.all.discard(process)
        await process.end()


class Apart:
    """An environment in a process of the pool: ``take`` before ``reset``, ``close`` at last."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.process: EnvironmentProcess | None = None

    async def take(self) -> None:
        """Wait for a process."""
        self.process = await self.pool.take()

    async def reset(self, item: Mapping[str, Any], seed: int) -> tuple[Message, ...]:
        """As an environment's."""
        return tuple(await self._ask("reset", item, seed))

    async def step(self, text: str) -> EnvStep:
        """As an environment's."""
        fields = await self._ask("step", text)
        return EnvStep(**{**fields, "messages": tuple(fields["messages"])})

    async def close(self, lost: bool) -> None:
        """Give the process back; it is killed if it is lost, or cannot close its environment."""
        if self.process is not None:
            process, self.process, keep = self.process, None, False
            try:
                if not lost:
                    await process.ask("close")
                    keep = True
            finally:
                await self.pool.give_back(process, keep)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        """A reply; without one, late ones too, the process is killed at once."""
        assert self.process is not None, "it was taken"
        try:
            return await self.process.ask(method, *arguments)
        except BaseException:
            await self.close(lost=True)
            raise
