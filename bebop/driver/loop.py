"""The main loop: generate -> buffer -> update -> publish, over protocols, in plain asyncio.

Invariants:

- *Versions.* The version counts updates. Step n makes version n of the weights from a batch of group_size completions
  to each of groups_per_step prompts, and publishes it.
- *Order.* Batches are made in the order of prompts, whichever finish first (``bebop.driver.buffer``), and every prompt
  is trained on or skipped once.
- *Staleness.* A token that is trained on comes from weights that lag by at most ``rollout.staleness`` updates. A
  staleness of 0 makes the job synchronous: prompts are admitted after the weights that decode them.
- *Published before read.* Workers get the new weights before the monitor looks at the step, so they never wait for it.
- *Evaluated at rest.* An evaluation uses the newest version, which the trainer still holds: the next update waits for
  it. Workers decode training prompts meanwhile, except in a synchronous job, whose tokens then stay the same.
- *Restartable.* A checkpoint is written between two steps. A resumed loop goes on with the same prompts in the same
  order; completions in flight are lost and decoded again.

The loop knows neither Ray nor an engine: a worker, a trainer and a sink are protocols (``bebop.driver.protocols``).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from bebop.config.job import JobConfig
from bebop.driver.buffer import GroupBuffer, has_spread
from bebop.driver.evaluation import Evaluation
from bebop.driver.past_completions import PastCompletions
from bebop.driver.pool import WorkerPool
from bebop.driver.protocols import Trainer, Worker
from bebop.driver.step_timer import StepTimer
from bebop.errors import UserError
from bebop.metrics.metrics import Metrics
from bebop.metrics.sinks import Sample, SampleSink, Sink
from bebop.monitor.controller import Action
from bebop.monitor.watch import Monitor, NullMonitor
from bebop.trajectory import Batch, Group, Prompt
from bebop.trajectory_db.writer import TrajectoryLog

log = logging.getLogger(__name__)
SAMPLES = 4  # completions shown for a step
T = TypeVar("T")


class Loop:
    """Drives workers and trainer until the job is done or ``stopping`` is set."""

    def __init__(
        self,
        config: JobConfig,
        prompt: Callable[[int], Prompt],
        workers: Sequence[Worker],
        trainer: Trainer,
        sinks: Sequence[Sink],
        monitor: Monitor | None = None,
        trajectories: TrajectoryLog | None = None,
        past: PastCompletions | None = None,
        now: Callable[[], float] = time.perf_counter,
        progress: Callable[[str], None] | None = None,
        evaluation: Evaluation | None = None,
    ) -> None:
        """Make a loop that stands before its first step, or before ``restore``.

        Args:
            config: configuration of the job.
            prompt: ``prompt(i)`` returns prompt i of the stream.
            workers: rollout workers.
            trainer: the trainer.
            sinks: receivers of the metrics of each step.
            monitor: explains changes of acceptance; None: no monitor.
            trajectories: stores the completions of each step; None: no log.
            past: completions of earlier steps that workers draft from; None if they do not.
            now: clock in seconds for the times of steps.
            progress: callback with a text about the progress of a step.
            evaluation: evaluation on held-out questions; None: no evaluation.
        """
        self.config, self.trainer, self.sinks = config, trainer, sinks
        self.monitor, self.trajectories = monitor or NullMonitor(config), trajectories
        keeps = has_spread if config.algorithm.dynamic_sampling else None
        self.buffer = GroupBuffer(config.trainer.groups_per_step, config.rollout.staleness, keeps=keeps)
        self.timer = StepTimer(len(workers), now)
        self.past, self.evaluation = past, evaluation
        self.pool = WorkerPool(config, prompt, workers, self.buffer, self.timer, past, evaluation)
        self.progress = progress or (lambda what: None)
        self.pool.on_completions = self._report_progress
        self.stopping = asyncio.Event()
        self._saved: int | None = None  # version of the newest checkpoint
        self._evaluated: dict[str, Any] | None = None  # state of earlier evaluations, for a loop without evaluations

    async def run(self) -> bool:
        """Run to the last step and return True, or False if it was stopped. A worker's failure leaves a checkpoint."""
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
        """Generate, buffer, update and publish, step after step."""
        steps, every = self.config.trainer.steps, self.config.trainer.save_every
        await self._publish()
        await self.pool.configure(self.monitor.decoding)
        await self._evaluate_first()
        self.timer.restart()
        while self.buffer.version < steps and not self.stopping.is_set():
            await self.pool.submit(self.buffer.admit())  # workers generate meanwhile, and go on with later prompts
            batch = await self._next_batch()
            if batch is None:
                break
            self.timer.end_wait()
            if not await self._step(batch):  # update, publish, observe
                break
            improved = self.evaluation is not None and self.evaluation.improved(self.buffer.version)
            if improved or (every and self.buffer.version % every == 0):
                with self.timer.measure("save"):  # its row is written: the next step counts it
                    await self._save()
        if self._saved != self.buffer.version:
            await self._save()
        return self.buffer.version >= steps and (self.evaluation is None or self.evaluation.pending is None)

    async def _evaluate_first(self) -> None:
        """Evaluate the initial weights of the job, or repeat an interrupted evaluation."""
        evaluation, version = self.evaluation, self.buffer.version
        if evaluation is None or (version and evaluation.pending is None):
            return
        row = evaluation.pending or {}
        if (found := await self._evaluate(evaluation)) is not None:
            evaluation.pending, self._saved = None, None  # no checkpoint has this state yet
            for sink in self.sinks:
                sink.write(version, {**row, **self.timer.evaluation(), **found})

    async def _evaluate(self, evaluation: Evaluation) -> Mapping[str, float] | None:
        """Evaluate the newest weights and return the metrics; None if the job was stopped meanwhile."""
        evaluation.begin(self.buffer.version)
        self.pool.on_completions = lambda: self.progress(evaluation.progress)
        with self.timer.measure("eval"):
            self.pool.evaluate(evaluation)
            more = self.buffer.version < self.config.trainer.steps
            if self.config.rollout.staleness and more:  # else training waits, so its tokens stay bitwise the same
                await self.pool.submit(self.buffer.admit())
            whole = await self._unless_stopped(evaluation.whole())
        self.pool.on_completions = self._report_progress
        return evaluation.finish() if whole else None

    async def _evaluate_step(self) -> Mapping[str, float] | None:
        """Return the metrics of the evaluation after this step, empty if none is due; None if it was interrupted."""
        if self.evaluation is None or not self.evaluation.due(self.buffer.version):
            return {}
        return await self._evaluate(self.evaluation)

    def _report_progress(self) -> None:
        """Report how many completions of the next step have arrived; some may belong to a later one."""
        wanted = self.config.trainer.groups_per_step * self.config.trainer.group_size
        self.progress(f"{min(self.pool.finished, wanted)}/{wanted} completions")

    async def _next_batch(self) -> Batch | None:
        """Wait for the next batch; return None if the job is stopped meanwhile."""
        return await self._unless_stopped(self._take())

    async def _unless_stopped(self, work: Coroutine[Any, Any, T]) -> T | None:
        """Return the result of ``work``; None if the job is stopped before it is done."""
        task, stop = asyncio.create_task(work), asyncio.create_task(self.stopping.wait())
        try:
            await asyncio.wait([task, stop], return_when=asyncio.FIRST_COMPLETED)
            return task.result() if task.done() else None
        finally:
            task.cancel()
            stop.cancel()

    async def _take(self) -> Batch:
        """Wait for the next batch, and submit further prompts to replace skipped groups."""
        while (batch := await self.buffer.take()) is None:
            await self.pool.submit(self.buffer.admit())
        if not batch.trajectories:
            lost = sum(group.lost for group in batch.groups)
            raise UserError(f"environment {self.config.task.name}: all {lost} trajectories of a step were lost")
        return batch

    async def _update(self, batch: Batch) -> Metrics | None:
        """Update on a batch and return the metrics; None if the job was stopped in time: the batch stays buffered."""
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
        """Update on a batch, publish the weights, observe the step and write its row; False if it was abandoned."""
        measure, version, system = self.timer.measure, self.buffer.version, self.monitor.decoding.system
        filtered = self.buffer.filtered if self.config.algorithm.dynamic_sampling else None
        with measure("monitor"):
            undisturbed = batch.groups[0].prompt.index >= self.pool.disturbed
            reading = await self.monitor.read(version + 1, batch.groups, self.trainer, undisturbed)
        self.progress(f"learning from {len(batch.trajectories)} completions")
        with measure("update"):
            learned = await self._update(batch)
        if learned is None:
            return False
        if self.past is not None:
            self.past.take(batch.groups)
        self.buffer.advance()
        with measure("sync"):
            await self._publish()
        with measure("monitor"):
            seen = self.monitor.observe(version + 1, batch.groups, version, *reading, self.pool.health())
            if self.trajectories is not None:
                logprobs = await self.trainer.logprobs()
                self.trajectories.write(version + 1, batch.groups, version, system, logprobs)
        with measure("sync"):
            await self._carry_out(seen.action)
        found = await self._evaluate_step()
        row = self.timer.row(batch, version, learned, seen.metrics, self.pool.restarts, filtered)
        if self.evaluation is not None:
            row |= self.timer.evaluation() | dict(found or {})
            self.evaluation.pending = row if found is None else None
        for sink in self.sinks:
            sink.write(self.buffer.version, row)
        self._show_samples(batch)
        self.timer.restart()
        return True

    def _show_samples(self, batch: Batch) -> None:
        """Show one completion of each of the first groups, after step 1 and then every ``sample_every`` steps."""
        step, every = self.buffer.version, self.config.runtime.sample_every
        if every and (step == 1 or step % every == 0):
            groups = [group for group in batch.groups if group.trajectories][:SAMPLES]
            samples = [_sample(group) for group in groups]
            for sink in self.sinks:
                if isinstance(sink, SampleSink):
                    sink.write_samples(step, samples)

    async def _publish(self, head: bool = False) -> None:
        await self.pool.publish(self.trainer, self.buffer.version, head=head, fingerprint=self.monitor.fingerprints)

    async def _carry_out(self, action: Action) -> None:
        """Carry out the monitor's action. Each update reads by itself whether the head learns."""
        if action.kind != "none":
            log.warning("step %d: %s (%s)", self.buffer.version, action.kind, action.why)
        if action.kind == "resync":
            await self._publish(head=True)
        await self.pool.configure(self.monitor.decoding)

    async def _save(self) -> None:
        state = {"buffer": self.buffer.state(), **self.pool.state(), **self.monitor.state()}
        best = None
        if self.evaluation is not None:
            state["evaluation"], best = self.evaluation.state(), self.evaluation.protected
        elif self._evaluated is not None:
            state["evaluation"] = self._evaluated
            if self._evaluated["best"] is not None and self.config.evaluation.keep_best:
                best = int(self._evaluated["best"][0])
        await self.trainer.save(self.buffer.version, state, best)
        self._saved = self.buffer.version

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state that ``_save`` wrote into a checkpoint."""
        self.buffer.restore(state["buffer"])
        self.pool.restore(state)
        self.monitor.restore(state)
        if self.evaluation is not None and "evaluation" in state and self.buffer.version:
            self.evaluation.restore(state["evaluation"])
        if self.evaluation is None and "evaluation" in state:
            self._evaluated = {**state["evaluation"], "pending": None}  # that step is over before the next checkpoint
        self._saved = self.buffer.version


def _sample(group: Group) -> Sample:
    """Return the first completion of a group, which ``monitor.trace=sample`` traces in the first group of a batch."""
    first = group.trajectories[0]
    text = "\n\n".join(turn.completion.text for turn in first.turns)
    return Sample(prompt=group.prompt.text, completion=text, number=group.prompt.index, reward=first.reward)
