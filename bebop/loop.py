"""The loop: generate -> buffer -> update -> publish, over protocols, in plain asyncio.

One loop for both modes: a staleness of 0 makes it synchronous, since prompts are then admitted only after the weights
that they are to be answered with have been published.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from bebop.buffer import GroupBuffer
from bebop.config import JobConfig
from bebop.errors import UserError
from bebop.metrics import Metrics, Sum, merge, values
from bebop.monitor.estimators import rollout_metrics
from bebop.sinks import Sink
from bebop.trajectory import Batch, Group, Prompt

log = logging.getLogger(__name__)


class WorkerDied(Exception):
    """A rollout worker is gone; it is replaced and its prompts start again."""


class TrainerDied(Exception):
    """The trainer is gone; the job goes back to its last checkpoint."""


class Report(Protocol):
    """What a worker hands over; see ``rollout.worker.WorkerReport``."""

    @property
    def groups(self) -> Sequence[Group]:
        """Finished groups."""
        ...

    @property
    def tokens(self) -> int:
        """Answer tokens in those groups."""
        ...

    @property
    def busy(self) -> float:
        """Seconds spent decoding."""
        ...

    @property
    def swap(self) -> float:
        """Seconds spent taking in weights."""
        ...


class Worker(Protocol):
    """A rollout worker as the loop sees it; every call raises ``WorkerDied`` if it is gone."""

    async def submit(self, prompts: Sequence[Prompt]) -> None:
        """Queue prompts."""
        ...

    async def collect(self) -> Report:
        """What was finished since the last call; waits a while if there is nothing."""
        ...

    async def set_weights(self, weights: Any, version: int) -> None:
        """Swap weights in flight, before any prompt that is submitted later."""
        ...

    async def restart(self) -> None:
        """Replace a worker that died."""
        ...


class Trainer(Protocol):
    """The trainer as the loop sees it; every call raises ``TrainerDied`` if it is gone."""

    async def update(self, batch: Batch) -> tuple[Metrics, int]:
        """Learn from a batch; metrics and the new version."""
        ...

    async def weights(self) -> Any:
        """A handle to the current weights that workers can take."""
        ...

    async def save(self, step: int, loop_state: dict[str, Any]) -> None:
        """Write a checkpoint."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class _Clock:
    """Seconds within the current step."""

    started: float = dataclasses.field(default_factory=time.perf_counter)
    rollout: float = 0.0  # decoding, summed over workers
    swap: float = 0.0
    tokens: int = 0


class Loop:
    """Drives workers and trainer until the job is done or told to stop."""

    def __init__(
        self,
        config: JobConfig,
        prompt: Callable[[int], Prompt],
        workers: Sequence[Worker],
        trainer: Trainer,
        sinks: Sequence[Sink],
    ) -> None:
        """``prompt(i)`` gives prompt number i of the stream."""
        self.config, self.prompt, self.workers, self.trainer, self.sinks = config, prompt, workers, trainer, sinks
        self.buffer = GroupBuffer(config.trainer.groups_per_step, config.rollout.staleness)
        self.stopping = asyncio.Event()
        self.restarts = 0
        self._most_restarts = config.runtime.max_restarts
        self._published: tuple[Any, int] | None = None  # weights and their version
        self._saved: int | None = None  # version of the newest checkpoint
        self._in_flight: list[set[int]] = [set() for _ in workers]
        self._locks = [asyncio.Lock() for _ in workers]
        self._clock = _Clock()

    async def run(self) -> bool:
        """Run to the last step; False if told to stop before. A checkpoint is left behind in both cases."""
        collectors = [asyncio.create_task(self._collect(i)) for i in range(len(self.workers))]
        main = asyncio.create_task(self._steps())
        try:
            await asyncio.wait([main, *collectors], return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in collectors if task.done()), None)
            if failed is not None and not main.done():
                # Nothing is lost: what stopped a worker does not cost the updates made so far.
                self.stopping.set()
                await main
                failed.result()
            return await main
        finally:
            for task in (main, *collectors):
                task.cancel()
            await asyncio.gather(main, *collectors, return_exceptions=True)

    async def _steps(self) -> bool:
        """Update after update: the paper's figure."""
        steps, every = self.config.trainer.steps, self.config.trainer.save_every
        await self._publish()
        while self.buffer.version < steps and not self.stopping.is_set():
            await self._admit()
            batch = await self._next_batch()
            if batch is None:
                break
            began = time.perf_counter()
            learned, _ = await self.trainer.update(batch)
            updated = time.perf_counter()
            version = self.buffer.version
            self.buffer.advance()
            await self._publish()
            self._write(batch, version, learned, began, updated)
            if every and self.buffer.version % every == 0:
                await self._save()
        if self._saved != self.buffer.version:
            await self._save()
        return self.buffer.version >= steps

    async def _admit(self) -> None:
        """Hand out the prompts that the staleness bound allows, each worker its share."""
        count = len(self.workers)
        admitted = self.buffer.admit()
        for i in range(count):
            share = [index for index in admitted if index % count == i]
            if share:
                await self._submit(i, share)

    async def _submit(self, i: int, indices: Sequence[int]) -> None:
        async with self._locks[i]:
            self._in_flight[i].update(indices)
            try:
                await self.workers[i].submit([self.prompt(index) for index in sorted(indices)])
            except WorkerDied:
                pass  # its collector notices too and submits all that is in flight to the replacement

    async def _next_batch(self) -> Batch | None:
        """The next batch; None if told to stop while waiting for it."""
        batch = asyncio.create_task(self.buffer.take())
        stop = asyncio.create_task(self.stopping.wait())
        await asyncio.wait([batch, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if batch.done():
            return batch.result()
        batch.cancel()
        return None

    async def _publish(self) -> None:
        """Send the trainer's weights to every worker, which swap them in between two decoding cycles."""
        # One assignment: a replacement that starts meanwhile gets the old weights under their own version.
        self._published = (await self.trainer.weights(), self.buffer.version)
        for i, worker in enumerate(self.workers):
            async with self._locks[i]:
                try:
                    await worker.set_weights(*self._published)
                except WorkerDied:
                    pass  # the replacement gets them from _replace

    async def _collect(self, i: int) -> None:
        """Take in what worker i finishes, and replace it when it dies."""
        while True:
            try:
                report = await self.workers[i].collect()
            except WorkerDied as death:
                await self._replace(i, death)
                continue
            for group in report.groups:
                self._in_flight[i].discard(group.prompt.index)
                await self.buffer.put(group)
            self._clock.tokens += report.tokens
            self._clock.rollout += report.busy
            self._clock.swap += report.swap

    async def _replace(self, i: int, death: WorkerDied) -> None:
        """A new worker with the current weights and all prompts that the dead one had not handed over."""
        self.restarts += 1
        if self.restarts > self._most_restarts:
            raise UserError(f"rollout workers died {self.restarts} times, the last time: {death}") from death
        log.warning("rollout worker %d died (%s); %d prompts start again", i, death, len(self._in_flight[i]))
        async with self._locks[i]:
            try:
                await self.workers[i].restart()
                if self._published is not None:  # before that it has nothing to do, and the first publish comes to it
                    await self.workers[i].set_weights(*self._published)
                await self.workers[i].submit([self.prompt(index) for index in sorted(self._in_flight[i])])
            except WorkerDied:
                pass  # the next collect fails too and counts this death

    async def _save(self) -> None:
        await self.trainer.save(self.buffer.version, {"buffer": self.buffer.state(), "restarts": self.restarts})
        self._saved = self.buffer.version

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``_save`` handed to the trainer's checkpoint."""
        self.buffer.restore(state["buffer"])
        self.restarts = state["restarts"]
        self._most_restarts = self.restarts + self.config.runtime.max_restarts  # each run has its own allowance
        self._saved = self.buffer.version

    def _write(self, batch: Batch, version: int, learned: Metrics, began: float, updated: float) -> None:
        """Send the metrics of a step to the sinks; ``version`` is the one that was trained on."""
        now, clock, workers = time.perf_counter(), self._clock, len(self.workers)
        step = now - clock.started
        times = {
            "time/step": step,
            "time/rollout": clock.rollout / workers,
            "time/update": updated - began,
            "time/sync": now - updated + clock.swap / workers,
            "time/idle": began - clock.started,  # the trainer waits for answers
            "time/rollout_idle": max(0.0, step - (clock.rollout + clock.swap) / workers),
            "rollout/tokens_per_s": clock.tokens / step,
            "rollout/restarts": float(self.restarts),
            "samples/trained": float(self.buffer.taken * self.config.trainer.group_size),
            "samples/prompts": float(self.buffer.taken),
            "version": float(self.buffer.version),
        }
        count: Metrics = {"response/tokens": Sum(float(sum(len(t.completion.token_ids) for t in batch.trajectories)))}
        row = values(merge(rollout_metrics(batch.groups, version), learned, count)) | times
        for sink in self.sinks:
            sink.write(self.buffer.version, row)
        self._clock = _Clock()
