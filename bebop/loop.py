"""The loop: generate -> buffer -> update -> publish, over protocols, in plain asyncio.

A staleness of 0 makes it synchronous: prompts are then admitted only after the weights that are to answer them.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from bebop.buffer import GroupBuffer, has_spread
from bebop.clock import Clock
from bebop.config import JobConfig
from bebop.errors import UserError
from bebop.metrics import Metrics
from bebop.monitor.controller import Action
from bebop.monitor.watch import Monitor, NullMonitor
from bebop.past_answers import PastAnswers
from bebop.pool import WorkerPool
from bebop.protocols import Trainer, Worker
from bebop.sinks import Sink
from bebop.trajectory import Batch, Prompt
from bebop.trajectory_log import TrajectoryLog

log = logging.getLogger(__name__)


class Loop:
    """Drives workers and trainer until the job is done or told to stop."""

    def __init__(
        self,
        config: JobConfig,
        prompt: Callable[[int], Prompt],
        workers: Sequence[Worker],
        trainer: Trainer,
        sinks: Sequence[Sink],
        monitor: Monitor | None = None,
        trajectories: TrajectoryLog | None = None,
        past: PastAnswers | None = None,
        now: Callable[[], float] = time.perf_counter,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """``prompt(i)`` gives prompt number i of the stream; ``monitor`` None: nobody asks why acceptance moves.

        ``trajectories`` None: no answers are kept. ``past``: those that workers are told of, None: none. ``now``:
        seconds by which the step is timed. ``progress``: is told how far a step has come.
        """
        self.config, self.trainer, self.sinks = config, trainer, sinks
        self.monitor, self.trajectories = monitor or NullMonitor(config), trajectories
        keeps = has_spread if config.algorithm.dynamic_sampling else None
        self.buffer = GroupBuffer(config.trainer.groups_per_step, config.rollout.staleness, keeps=keeps)
        self.clock = Clock(len(workers), now)
        self.past = past
        self.pool = WorkerPool(config, prompt, workers, self.buffer, self.clock, past)
        self.progress = progress or (lambda what: None)
        self.pool.heard = self._count
        self.stopping = asyncio.Event()
        self._saved: int | None = None  # version of the newest checkpoint

    async def run(self) -> bool:
        """Run to the last step; False if told to stop before. A checkpoint stays, also when a worker fails."""
        collectors = [asyncio.create_task(self.pool.serve(i)) for i in range(len(self.pool.workers))]
        main = asyncio.create_task(self._steps())
        try:
            await asyncio.wait([main, *collectors], return_when=asyncio.FIRST_COMPLETED)
            failed = next((task for task in collectors if task.done()), None)
            if failed is not None and not main.done():
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
        await self.pool.configure(self.monitor.decoding)
        while self.buffer.version < steps and not self.stopping.is_set():
            await self.pool.submit(self.buffer.admit())
            batch = await self._next_batch()
            if batch is None:
                break
            self.clock.waited()
            if not await self._step(batch):
                break
            if every and self.buffer.version % every == 0:
                await self._save()
        if self._saved != self.buffer.version:
            await self._save()
        return self.buffer.version >= steps

    def _count(self) -> None:
        """Say how many completions of the next step there are; some of those beyond may be of a later one."""
        wanted = self.config.trainer.groups_per_step * self.config.trainer.group_size
        self.progress(f"{min(self.pool.finished, wanted)}/{wanted} completions")

    async def _next_batch(self) -> Batch | None:
        """The next batch; None if told to stop while waiting for it."""
        batch, stop = asyncio.create_task(self._take()), asyncio.create_task(self.stopping.wait())
        await asyncio.wait([batch, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        if batch.done():
            return batch.result()
        batch.cancel()
        return None

    async def _take(self) -> Batch:
        """The next batch; where groups were passed over, the next prompts are asked for."""
        while (batch := await self.buffer.take()) is None:
            await self.pool.submit(self.buffer.admit())
        if not batch.trajectories:
            lost = sum(group.lost for group in batch.groups)
            raise UserError(f"environment {self.config.task.name}: all {lost} trajectories of a step were lost")
        return batch

    async def _update(self, batch: Batch) -> Metrics | None:
        """What the trainer learned; None if it was told to stop in time: the batch stays in the buffer."""
        update = asyncio.create_task(self.trainer.update(batch, self.monitor.cotraining))
        stop = asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait([update, stop], return_when=asyncio.FIRST_COMPLETED)
            if not update.done():
                await self.trainer.abandon()
            learned, version = await update
        finally:
            update.cancel()
            stop.cancel()
        return learned if version > self.buffer.version else None

    async def _step(self, batch: Batch) -> bool:
        """One update, published and observed; False if the update was abandoned."""
        timed, version, system = self.clock.timed, self.buffer.version, self.monitor.decoding.system
        filtered = self.buffer.filtered if self.config.algorithm.dynamic_sampling else None
        with timed("monitor"):
            undisturbed = batch.groups[0].prompt.index >= self.pool.disturbed
            reading = await self.monitor.read(version + 1, batch.groups, self.trainer, undisturbed)
        self.progress(f"learning from {len(batch.trajectories)} completions")
        with timed("update"):
            learned = await self._update(batch)
        if learned is None:
            return False
        if self.past is not None:
            self.past.take(batch.groups)
        self.buffer.advance()
        with timed("sync"):
            await self._publish()
        with timed("monitor"):
            seen = self.monitor.observe(version + 1, batch.groups, version, *reading, self.pool.health())
            if self.trajectories is not None:
                found = await self.trainer.logprobs()
                self.trajectories.write(version + 1, batch.groups, version, system, found)
        with timed("sync"):
            await self._carry_out(seen.action)
        row = self.clock.row(batch, version, learned, seen.metrics, self.pool.restarts, filtered)
        for sink in self.sinks:
            sink.write(self.buffer.version, row)
        self.clock.restart()
        return True

    async def _publish(self, head: bool = False) -> None:
        await self.pool.publish(self.trainer, self.buffer.version, head=head, fingerprint=self.monitor.fingerprints)

    async def _carry_out(self, action: Action) -> None:
        """Do what the monitor asks for; co-training is asked for at each update."""
        if action.kind != "none":
            log.warning("step %d: %s (%s)", self.buffer.version, action.kind, action.why)
        if action.kind == "resync":
            await self._publish(head=True)
        await self.pool.configure(self.monitor.decoding)

    async def _save(self) -> None:
        state = {"buffer": self.buffer.state(), "restarts": self.pool.restarts, **self.monitor.state()}
        await self.trainer.save(self.buffer.version, state)
        self._saved = self.buffer.version

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``_save`` handed to the trainer's checkpoint."""
        self.buffer.restore(state["buffer"])
        self.pool.restore(state["restarts"])
        self.monitor.restore(state)
        self._saved = self.buffer.version
