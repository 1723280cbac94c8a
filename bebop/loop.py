"""The loop: generate -> buffer -> update -> publish, over protocols, in plain asyncio.

One loop for both modes: a staleness of 0 makes it synchronous, since prompts are then admitted only after the weights
that they are to be answered with have been published.
"""

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bebop.buffer import GroupBuffer
from bebop.config import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.metrics import Metrics, Sum, merge, values
from bebop.monitor.controller import Action, Health
from bebop.monitor.estimators import rollout_metrics
from bebop.monitor.probe_set import ProbeReading, Sweep
from bebop.monitor.watch import Watch
from bebop.protocols import Trainer, Worker, WorkerDied, WorkerReport
from bebop.sinks import Sink
from bebop.trajectory import Batch, Prompt

log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Clock:
    """Seconds within the current step."""

    started: float = dataclasses.field(default_factory=time.perf_counter)
    idle: float = 0.0  # the trainer waits for answers
    update: float = 0.0
    sync: float = 0.0
    monitor: float = 0.0
    rollout: float = 0.0  # decoding, summed over workers
    swap: float = 0.0
    tokens: int = 0


@contextlib.contextmanager
def _timed(clock: _Clock, name: str) -> Iterator[None]:
    """Add the seconds within to a field of the clock."""
    started = time.perf_counter()
    yield
    setattr(clock, name, getattr(clock, name) + time.perf_counter() - started)


class Loop:
    """Drives workers and trainer until the job is done or told to stop."""

    def __init__(
        self,
        config: JobConfig,
        prompt: Callable[[int], Prompt],
        workers: Sequence[Worker],
        trainer: Trainer,
        sinks: Sequence[Sink],
        watch: Watch | None = None,
    ) -> None:
        """``prompt(i)`` gives prompt number i of the stream; ``watch`` None: nobody asks why acceptance moves."""
        self.config, self.prompt, self.workers, self.trainer, self.sinks = config, prompt, workers, trainer, sinks
        self.buffer = GroupBuffer(config.trainer.groups_per_step, config.rollout.staleness)
        self.stopping = asyncio.Event()
        self.restarts = 0
        self._most_restarts = config.runtime.max_restarts
        self.watch = watch
        self._published: tuple[Any, int] | None = None  # weights and their version
        self._decoding = config.decoding  # what the workers were told last, or started with
        self._heads: dict[int, str] = {}  # version -> fingerprint of the head that belongs to it
        self._sends = [0] * len(workers)  # odd while weights are on their way to worker i
        self._health: dict[int, Health] = {}  # worker -> what it said in this step
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
        if self.watch is not None:
            await self._set_decoding(self.watch.decoding)
        while self.buffer.version < steps and not self.stopping.is_set():
            await self._admit()
            batch = await self._next_batch()
            if batch is None:
                break
            self._clock.idle = time.perf_counter() - self._clock.started
            await self._step(batch)
            if every and self.buffer.version % every == 0:
                await self._save()
        if self._saved != self.buffer.version:
            await self._save()
        return self.buffer.version >= steps

    async def _step(self, batch: Batch) -> None:
        """One update, published and watched."""
        clock, version = self._clock, self.buffer.version
        with _timed(clock, "monitor"):
            bank, sweep = await self._read_bank(batch)
        with _timed(clock, "update"):
            learned, _ = await self.trainer.update(batch, self._cotraining())
        self.buffer.advance()
        with _timed(clock, "sync"):
            await self._publish()
        with _timed(clock, "monitor"):
            drift, action = self._observe(batch, version, bank, sweep)
        with _timed(clock, "sync"):
            await self._act(action)
        self._write(batch, version, learned, drift)

    def _cotraining(self) -> bool:
        if self.watch is None:
            return self.config.cotrain.mode == "always"
        return self.watch.cotraining

    async def _read_bank(self, batch: Batch) -> tuple[ProbeReading | None, Sweep | None]:
        """The monitor's fixed texts under the weights before this update, where it wants them read."""
        due = self.watch.probe_due(self.buffer.version + 1, batch.groups) if self.watch is not None else None
        if due is None or self.watch is None:
            return None, None
        return await self.trainer.read_probe_set(*due, self.watch.decoding)

    def _observe(
        self, batch: Batch, version: int, bank: ProbeReading | None, sweep: Sweep | None
    ) -> tuple[dict[str, float], Action]:
        """What the monitor makes of a step; ``version`` is the one that was trained on."""
        if self.watch is None:
            return {}, Action()
        health, self._health = self._health, {}
        worst = min(health.values(), key=lambda h: not h.complaint(), default=None)
        seen = self.watch.observe(self.buffer.version, batch.groups, version, bank=bank, sweep=sweep, health=worst)
        return seen.metrics, seen.action

    async def _act(self, action: Action) -> None:
        """Carry out what the monitor asks for; co-training is asked for at each update."""
        if action.kind != "none":
            log.warning("step %d: %s (%s)", self.buffer.version, action.kind, action.why)
        if action.kind == "resync":
            await self._publish(head=True)
        elif self.watch is not None:
            await self._set_decoding(self.watch.decoding)

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

    async def _publish(self, head: bool = False) -> None:
        """Send the trainer's weights to every worker, which swap them in between two decoding cycles.

        ``head``: the MTP head with them, even if it never changed.
        """
        version = self.buffer.version
        if self.watch is not None:
            self._heads = {v: mark for v, mark in self._heads.items() if v >= version - self.config.rollout.staleness}
            self._heads[version] = await self.trainer.head_fingerprint()
        # One assignment: a replacement that starts meanwhile gets the old weights under their own version.
        self._published = (await self.trainer.weights(head), version)
        self._sends = [sends + 1 for sends in self._sends]
        for i, worker in enumerate(self.workers):
            async with self._locks[i]:
                try:
                    await worker.set_weights(*self._published)
                except WorkerDied:
                    pass  # the replacement gets them from _replace
            self._sends[i] += 1

    async def _set_decoding(self, decoding: DecodingConfig) -> None:
        """Have every worker draft as ``decoding`` says."""
        if decoding == self._decoding:
            return
        self._decoding = decoding
        for i, worker in enumerate(self.workers):
            async with self._locks[i]:
                try:
                    await worker.set_decoding(decoding)
                except WorkerDied:
                    pass  # the replacement is told by _replace

    async def _collect(self, i: int) -> None:
        """Take in what worker i finishes, and replace it when it dies."""
        while True:
            sends = self._sends[i]
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
            if self._sends[i] == sends and sends % 2 == 0:  # else it may speak of what was in use before
                self._examine(i, report)

    def _examine(self, i: int, report: WorkerReport) -> None:
        """Hold what worker i says it runs against what it should; a complaint stands until the step is over.

        The version must be at least that of the newest prompt it answered: those weights were sent before.
        """
        size, staleness = self.config.trainer.groups_per_step, self.config.rollout.staleness
        due = max((group.prompt.index // size - staleness for group in report.groups), default=report.version)
        health = Health(
            worker=i,
            version=report.version,
            expected_version=max(report.version, due),
            head_checksum=report.head,
            expected_head_checksum=self._heads.get(report.version),
        )
        if health.complaint() or i not in self._health:
            self._health[i] = health

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
                if self._decoding != self.config.decoding:
                    await self.workers[i].set_decoding(self._decoding)
                await self.workers[i].submit([self.prompt(index) for index in sorted(self._in_flight[i])])
            except WorkerDied:
                pass  # the next collect fails too and counts this death

    async def _save(self) -> None:
        state = {"buffer": self.buffer.state(), "restarts": self.restarts}
        if self.watch is not None:
            state["bank"] = self.watch.state()
        await self.trainer.save(self.buffer.version, state)
        self._saved = self.buffer.version

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what ``_save`` handed to the trainer's checkpoint."""
        self.buffer.restore(state["buffer"])
        self.restarts = state["restarts"]
        self._most_restarts = self.restarts + self.config.runtime.max_restarts  # each run has its own allowance
        self._saved = self.buffer.version
        if self.watch is not None:
            self.watch.restore(state.get("bank", ()))

    def _write(self, batch: Batch, version: int, learned: Metrics, drift: dict[str, float]) -> None:
        """Send the metrics of a step to the sinks; ``version`` is the one that was trained on."""
        now, clock, workers = time.perf_counter(), self._clock, len(self.workers)
        step = now - clock.started
        times = {
            "time/step": step,
            "time/rollout": clock.rollout / workers,
            "time/update": clock.update,
            "time/sync": clock.sync + clock.swap / workers,
            "time/monitor": clock.monitor,
            "time/idle": clock.idle,
            "time/rollout_idle": max(0.0, step - (clock.rollout + clock.swap) / workers),
            "rollout/tokens_per_s": clock.tokens / step,
            "rollout/restarts": float(self.restarts),
            "samples/trained": float(self.buffer.taken * self.config.trainer.group_size),
            "samples/prompts": float(self.buffer.taken),
            "version": float(self.buffer.version),
        }
        count: Metrics = {"response/tokens": Sum(float(sum(len(t.completion.token_ids) for t in batch.trajectories)))}
        row = values(merge(rollout_metrics(batch.groups, version), learned, count)) | drift | times
        for sink in self.sinks:
            sink.write(self.buffer.version, row)
        self._clock = _Clock()
