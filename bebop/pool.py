"""The rollout workers of a job: each gets its share of the prompts, all get all weights, the dead are replaced."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from bebop.buffer import GroupBuffer
from bebop.clock import Clock
from bebop.config import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.monitor.controller import Health
from bebop.protocols import Assignment, PartialGroup, Trainer, Worker, WorkerDied, WorkerReport
from bebop.trajectory import Group, Prompt, Trajectory

log = logging.getLogger(__name__)


class WorkerPool:
    """N workers; what they finish goes to the buffer, and their seconds to the clock."""

    def __init__(
        self,
        config: JobConfig,
        prompt: Callable[[int], Prompt],
        workers: Sequence[Worker],
        buffer: GroupBuffer,
        clock: Clock,
    ) -> None:
        """``prompt(i)`` gives prompt number i of the stream."""
        self.config, self.prompt, self.workers, self.buffer, self.clock = config, prompt, workers, buffer, clock
        self.restarts = 0
        # Prompts below had been handed out when a worker died, or when the job was resumed: answers that had ended by
        # then were kept and others drawn again, so which tokens became of them depends on the tokens.
        self.disturbed = 0
        self._members = range(config.trainer.group_size)
        self._most_restarts = config.runtime.max_restarts
        self._published: tuple[Any, int] | None = None  # weights and their version
        self._decoding = config.decoding  # what the workers were told last, or started with
        self._heads: dict[int, str] = {}  # version -> fingerprint of the head that belongs to it
        self._sends = [0] * len(workers)  # odd while weights are on their way to worker i
        self._health: dict[int, Health] = {}  # worker -> what it said in this step
        self._in_flight: list[set[tuple[int, int]]] = [set() for _ in workers]  # (prompt, member) of the group
        self._answers: dict[int, dict[int, Trajectory]] = {}  # of groups that are not complete: by prompt and member
        self._seen = [0] * len(workers)  # number of the newest report of each worker's process
        self._locks = [asyncio.Lock() for _ in workers]

    @contextlib.asynccontextmanager
    async def _turn(self, i: int) -> AsyncIterator[Worker]:
        """Worker i to oneself. If it dies, its next collect fails too: the replacement is told what this one was."""
        async with self._locks[i]:
            with contextlib.suppress(WorkerDied):
                yield self.workers[i]

    async def submit(self, indices: Sequence[int]) -> None:
        """Hand out prompts, each worker its share."""
        count = len(self.workers)
        for i in range(count):
            share = [index for index in indices if index % count == i]
            if share:
                async with self._turn(i) as worker:
                    self._in_flight[i].update((index, member) for index in share for member in self._members)
                    await worker.submit([self._assignment(index, self._members) for index in sorted(share)])

    async def publish(self, trainer: Trainer, version: int, *, head: bool = False, fingerprint: bool = False) -> None:
        """Send the trainer's weights to every worker, which swap them in between two decoding cycles.

        ``head``: the MTP head with them, even if it never changed. ``fingerprint``: note which head belongs to them.
        """
        if fingerprint:
            oldest = version - self.config.rollout.staleness
            self._heads = {v: mark for v, mark in self._heads.items() if v >= oldest}
            self._heads[version] = await trainer.head_fingerprint()
        # One assignment: a replacement that starts meanwhile gets the old weights under their own version.
        self._published = (await trainer.weights(head), version)
        self._sends = [sends + 1 for sends in self._sends]
        for i in range(len(self.workers)):
            async with self._turn(i) as worker:
                await worker.set_weights(*self._published)
            self._sends[i] += 1

    async def configure(self, decoding: DecodingConfig) -> None:
        """Have every worker draft as ``decoding`` says."""
        if decoding == self._decoding:
            return
        self._decoding = decoding
        for i in range(len(self.workers)):
            async with self._turn(i) as worker:
                await worker.configure(decoding)

    async def collect(self, i: int) -> None:
        """Take in what worker i finishes, and replace it when it dies; ``UserError`` after too many deaths."""
        while True:
            sends = self._sends[i]
            try:
                report = await self.workers[i].collect(self._seen[i])
            except WorkerDied as death:
                await self._replace(i, death)
                continue
            if report.number <= self._seen[i]:  # told twice
                continue
            self._seen[i] = report.number
            for part in report.parts:
                await self._take(i, part)
            self.clock.add(report)
            if self._sends[i] == sends and sends % 2 == 0:  # else it may speak of what was in use before
                self._examine(i, report)

    async def _replace(self, i: int, death: WorkerDied) -> None:
        """A new worker with the current weights and all prompts that the dead one had not handed over."""
        self.restarts += 1
        self.disturbed = self.buffer.admitted
        if self.restarts > self._most_restarts:
            raise UserError(f"rollout workers died {self.restarts} times, the last time: {death}") from death
        lost: dict[int, list[int]] = {}
        for index, member in sorted(self._in_flight[i]):
            lost.setdefault(index, []).append(member)
        log.warning("rollout worker %d died (%s); %d prompts start again", i, death, len(lost))
        async with self._turn(i) as worker:
            await worker.restart()
            self._seen[i] = 0
            if self._published is not None:  # before that it has nothing to do, and the first publish comes to it
                await worker.set_weights(*self._published)
            if self._decoding != self.config.decoding:
                await worker.configure(self._decoding)
            await worker.submit([self._assignment(index, members) for index, members in lost.items()])

    def _assignment(self, index: int, members: Sequence[int]) -> Assignment:
        return Assignment(prompt=self.prompt(index), members=tuple(members))

    async def _take(self, i: int, part: PartialGroup) -> None:
        """Put what worker i finished to the rest of its group, and hand the group over once it is complete."""
        index = part.prompt.index
        answers = self._answers.setdefault(index, {})
        for member, trajectory in zip(part.members, part.trajectories, strict=True):
            self._in_flight[i].remove((index, member))
            answers[member] = trajectory
        if len(answers) == len(self._members):
            del self._answers[index]
            trajectories = tuple(answers[member] for member in self._members)
            await self.buffer.put(Group(prompt=part.prompt, trajectories=trajectories))

    def _examine(self, i: int, report: WorkerReport) -> None:
        """Hold what worker i says it runs against what it should; a complaint stands until the step is over.

        The version must be at least that of the newest prompt it answered: those weights were sent before.
        """
        size, staleness = self.config.trainer.groups_per_step, self.config.rollout.staleness
        due = max((part.prompt.index // size - staleness for part in report.parts), default=report.version)
        health = Health(
            worker=i,
            version=report.version,
            expected_version=max(report.version, due),
            head_checksum=report.head,
            expected_head_checksum=self._heads.get(report.version),
        )
        if health.complaint() or i not in self._health:
            self._health[i] = health

    def health(self) -> Health | None:
        """The worst that a worker said in this step, which is over with this call; None if none said anything."""
        said, self._health = self._health, {}
        return min(said.values(), key=lambda health: not health.complaint(), default=None)

    def restore(self, restarts: int) -> None:
        """Go on after so many deaths; each run has its own allowance."""
        self.restarts = restarts
        self.disturbed = self.buffer.taken + self.config.rollout.staleness * self.config.trainer.groups_per_step
        self._most_restarts = restarts + self.config.runtime.max_restarts
