"""Builds the parts of a job from its configuration, runs it on Ray, and recovers from deaths.

Recovery has three levels. The pool replaces a dead rollout worker within a step. ``Job`` returns to the newest intact
checkpoint when the trainer dies, with new actors. ``run_job`` does the same on a new Ray session when Ray's own servers
die. Each gives up after ``runtime.max_restarts`` deaths.
"""

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from bebop.command import writing
from bebop.config.job import JobConfig
from bebop.driver.evaluation import EVALUATIONS, Evaluation
from bebop.driver.loop import Loop
from bebop.driver.past_completions import PastCompletions
from bebop.driver.protocols import TrainerDied, WorkerDied
from bebop.errors import UserError
from bebop.metrics.catalogue import tracker_layout
from bebop.metrics.sinks import JsonlSink, ProgressLine, Sink, StepLog, TensorBoardSink, TrackioSink, WandbSink
from bebop.model.checkpoint import load_tokenizer
from bebop.monitor.watch import JobMonitor, Monitor, NullMonitor, can_monitor
from bebop.rollout.engines import engine_module
from bebop.run_dir.checkpoints import link_model
from bebop.runtime.actors import RayTrainer, RayWorker
from bebop.runtime.broadcast import choose_backend
from bebop.runtime.events import EventLog
from bebop.runtime.gauges import RaySink
from bebop.runtime.preflight import check_evaluation
from bebop.runtime.session import Dashboard, Session, SessionDied, ray_session
from bebop.runtime.terminal import memory_beside_trainer
from bebop.tasks.held_out import HeldOut
from bebop.trainer import checkpoint
from bebop.trajectory import Prompt
from bebop.trajectory_db.reader import NAME
from bebop.trajectory_db.writer import TrajectoryLog, piece_of

log = logging.getLogger(__name__)
WAIT_SECONDS = 60.0  # time limit for a reservation of CPUs and GPUs


def run_job(
    config: JobConfig,
    run_dir: Path,
    prompt: Callable[[int], Prompt],
    begin: Callable[[Dashboard | None], None],
    held_out: HeldOut | None = None,
) -> bool:
    """Run a job that ``preflight`` has checked to its end in ``run_dir``; return False if it was interrupted.

    An interrupted job leaves a checkpoint. ``prompt(i)`` returns prompt i of the stream. ``begin`` is called with Ray's
    dashboard when all parts run for the first time; nothing is written to ``run_dir`` before. ``held_out``: the
    questions of its evaluations, if they are known already.
    """
    checkpoints, events = checkpoint.store(run_dir), EventLog(run_dir)
    newest = checkpoints.newest_sound() if config.runtime.resume else None
    held_out = held_out or check_evaluation(config)
    if config.runtime.resume and newest is None:
        raise UserError(f"runtime.resume=true: {run_dir} holds no finished checkpoint")
    if config.runtime.address is None:
        pools(config, torch.cuda.device_count())  # reports errors before Ray starts
    stopping = begun = False
    ended: float | None = None  # when Ray's servers died
    for deaths in range(config.runtime.max_restarts + 1):
        with ray_session(config, events) as session:
            gpus = ray.cluster_resources().get("GPU", 0.0)
            serving = share_memory(config, gpus)
            ranks, places = (reserve(pool) for pool in pools(config, gpus))
            workers = [RayWorker(serving, place, i, events) for i, place in enumerate(places)]
            trainer = RayTrainer(config, run_dir, ranks, events, workers)
            job = Job(config, run_dir, prompt, trainer, workers, stopping, held_out, shares_gpu(config, gpus))

            def started(session: Session = session, ended: float | None = ended) -> None:
                nonlocal begun
                session.close_to_others()
                if not begun:  # also in a second session, if Ray died while the parts of the first one started
                    begin(session.dashboard)
                    begun = True
                if ended is not None:
                    events.write("replaced", "ray", "a new session", recover_s=time.monotonic() - ended)

            try:
                return asyncio.run(_run_in(session, job, newest, started))
            except SessionDied as death:
                ended, stopping = time.monotonic(), job.stop.is_set()
                events.write("session", "ray", str(death), silent_s=death.silent, notice_s=death.silent)
                newest = checkpoints.newest_sound()
                log.warning("%s; starting Ray again and going back to %s", death, _name(newest))
                if deaths == config.runtime.max_restarts:
                    raise UserError(f"Ray died {deaths + 1} times, the last time: {death}") from death
    raise AssertionError("unreachable")


async def _run_in(session: Session, job: "Job", newest: Path | None, begin: Callable[[], None]) -> bool:
    """Run a job; raise ``SessionDied`` once Ray's servers are dead, whatever else fails because of that."""
    running, watch = asyncio.create_task(job.run(newest, begin)), asyncio.create_task(session.watch())
    try:
        await asyncio.wait([running, watch], return_when=asyncio.FIRST_COMPLETED)
        if watch.done():
            job.trainer.group.ray_lives = False
            for worker in job.workers:
                worker.group.ray_lives = False
            raise watch.result()
        if running.exception() is not None and (death := session.death()) is not None:
            raise death from running.exception()
        return running.result()
    finally:
        for task in (running, watch):
            task.cancel()
        await asyncio.gather(running, watch, return_exceptions=True)


class Job:
    """Training loop with all its parts, restarted whenever the trainer dies."""

    def __init__(
        self,
        config: JobConfig,
        run_dir: Path,
        prompt: Callable[[int], Prompt],
        trainer: RayTrainer,
        workers: Sequence[RayWorker],
        stopping: bool = False,
        held_out: HeldOut | None = None,
        in_turn: bool = False,
    ) -> None:
        """Store the parts; ``stopping`` says that the user has already interrupted the job.

        ``held_out``: the questions of its evaluations, if it has any. ``in_turn``: start one part after the other.
        """
        self.in_turn = in_turn
        self.config, self.run_dir, self.prompt, self.trainer, self.workers = config, run_dir, prompt, trainer, workers
        self.held_out = held_out
        self.evaluations: StepLog | None = None
        self.sinks: list[Sink] = []
        self.trajectories: TrajectoryLog | None = None
        self.loop: Loop | None = None
        self.monitor: Monitor = NullMonitor(config)
        self.stop = asyncio.Event()
        if stopping:
            self.stop.set()

    async def run(self, newest: Path | None, begin: Callable[[], None]) -> bool:
        """Run the loop from checkpoint ``newest``, and again from the newest checkpoint whenever the trainer dies."""
        checkpoints, most = checkpoint.store(self.run_dir), self.config.runtime.max_restarts
        # Ctrl-C and SIGTERM drop or end the step in progress and leave a checkpoint; a second one ends at once.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._interrupt)
        try:
            for deaths in range(most + 1):
                try:
                    await self._start()
                    if self.loop is None:
                        begin()
                        self._go_back(newest)
                    return await (await self._loop(newest)).run()
                except (TrainerDied, WorkerDied) as death:
                    if self.loop is None:  # a part that never started is no death to recover from
                        raise UserError(f"a part of the job did not start: {death}") from death
                    self.monitor.close()
                    newest = checkpoints.newest_sound()
                    self._go_back(newest)
                    log.warning("the trainer died (%s); going back to %s", death, _name(newest))
                    if deaths == most:
                        raise UserError(f"the trainer died {deaths + 1} times, the last time: {death}") from death
            raise AssertionError("unreachable")
        finally:
            self._close()

    async def _start(self) -> None:
        """Start trainer and workers: side by side, or in turn if engines measure the memory that others leave them."""
        starts = [self.trainer.restart, *(worker.restart for worker in self.workers)]
        if self.in_turn:
            for start in starts:
                await start()
        else:
            await _gather([start() for start in starts])

    def _go_back(self, newest: Path | None) -> None:
        """Set aside everything written after checkpoint ``newest``, so that ``RUN/model`` points to that checkpoint
        again.
        """
        checkpoint.store(self.run_dir).set_aside(newest)
        link_model(self.run_dir, newest)

    async def _loop(self, newest: Path | None) -> Loop:
        """Create the loop in the state of checkpoint ``newest``."""
        start = checkpoint.store(self.run_dir).step(newest) if newest else 0
        if self.loop is None:
            self.sinks = _sinks(self.config, self.run_dir, start)
            self.trajectories = _trajectories(self.config, self.run_dir, start)
            if self.held_out is not None:
                self.evaluations = StepLog(self.run_dir / EVALUATIONS, start or None)
        # In a thread: it replays the log of every step up to ``start``, about 6 ms each, while the driver must answer.
        self.monitor = await asyncio.to_thread(_monitor, self.config, self.run_dir, start)
        past = PastCompletions.wanted(self.config)
        if past is not None and start:
            past.recall(self.run_dir / NAME, start)
        line = next((sink for sink in self.sinks if isinstance(sink, ProgressLine)), None)
        self.loop = Loop(
            self.config, self.prompt, self.workers, self.trainer, self.sinks, self.monitor, self.trajectories, past,
            progress=None if line is None else line.under_way,
            evaluation=None if self.held_out is None else Evaluation(self.config, self.held_out, self.evaluations),
        )  # fmt: skip
        if self.stop.is_set():
            self.loop.stopping.set()
        if newest is not None:
            self.loop.restore(await self.trainer.load(newest))
        _write_pids(self.run_dir, self.trainer, self.workers)
        return self.loop

    def _interrupt(self) -> None:
        """Ask the loop to stop; the second time, end at once."""
        if self.stop.is_set():
            raise KeyboardInterrupt
        log.warning("stopping; a checkpoint of all finished steps will be written (once more to stop at once)")
        self.stop.set()
        if self.loop is not None:
            self.loop.stopping.set()

    def _close(self) -> None:
        """Close all parts, even if one of them raises."""
        with contextlib.ExitStack() as closing:
            parts = [*self.workers, self.trainer, *self.sinks, self.monitor]
            logs = [log for log in (self.trajectories, self.evaluations) if log is not None]
            for close in [*(part.close for part in parts), *(log.close for log in logs)]:
                closing.callback(close)


async def _gather(works: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Await all works; if one fails, cancel the others before raising its error."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _name(newest: Path | None) -> str:
    return newest.name if newest else "the start"


def _monitor(config: JobConfig, run_dir: Path, start: int) -> Monitor:
    """Create the monitor, which continues after step ``start``; it is a no-op if monitoring is off or impossible."""
    return JobMonitor(config, run_dir, start) if can_monitor(config) else NullMonitor(config)


def _trajectories(config: JobConfig, run_dir: Path, start: int) -> TrajectoryLog | None:
    """Open the file that stores completions, continuing after step ``start``; None if they are not stored.

    Completions stored up to that step stay, also if the run continues without storing more.
    """
    path, mode = run_dir / NAME, config.monitor.trace
    if mode == "off" and not (start and path.exists()):
        return None
    piece = piece_of(load_tokenizer(config.model))
    kept = TrajectoryLog(path, mode, piece, config.trainer.group_size, start or None)
    if mode != "off":
        return kept
    kept.close()
    return None


def _sinks(config: JobConfig, run_dir: Path, start: int) -> list[Sink]:
    """Create the sinks for metrics; sinks that write files continue after step ``start``."""
    monitor = config.monitor
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", start if start else None)]
    if monitor.tensorboard:
        purge = start + 1 if start else None
        sinks.append(TensorBoardSink(run_dir / "tensorboard", purge, dataclasses.asdict(config), tracker_layout()))
    if monitor.wandb:
        sinks.append(WandbSink(run_dir, dataclasses.asdict(config)))
    if monitor.trackio:
        sinks.append(TrackioSink(run_dir, dataclasses.asdict(config)))
    if monitor.ray_metrics:
        sinks.append(RaySink())
    if config.runtime.progress:
        sinks.append(ProgressLine(config.trainer.steps, start))
    return sinks


def _write_pids(run_dir: Path, trainer: RayTrainer, workers: Sequence[RayWorker]) -> None:
    """Write the process id of each part to ``pids.txt``, for ps or a debugger."""
    lines = [
        f"driver {os.getpid()}",
        *[f"trainer {pid}" for pid in trainer.pids],
        *[f"rollout {w.pid}" for w in workers],
    ]
    with writing(run_dir / "pids.txt"):
        (run_dir / "pids.txt").write_text("\n".join(lines) + "\n")


# ---- CPUs and GPUs of the actors: a Ray placement group for the trainer and one for the rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """Equal shares of a cluster, one per actor; a share lies on one machine."""

    name: str
    count: int
    cpus: int
    gpus: float
    strategy: str  # Ray's; STRICT_PACK puts all shares on one machine


def pools(config: JobConfig, gpus: float) -> tuple[Pool, Pool]:
    """Return the pools of trainer and rollout for a cluster with ``gpus`` GPUs.

    Engines that span several GPUs share them with nobody. Each of several ranks has a GPU to itself, since NCCL refuses
    two ranks on one GPU; workers share the rest.
    """
    rollout, trainer = config.rollout, config.trainer
    each, left = engine_module(config).gpus(config), gpus
    if config.model.device == "cpu" or not gpus:
        each = share = 0.0
    elif each >= 1 and gpus - each * rollout.workers >= 1:
        left = gpus - each * rollout.workers
        share = _share(left, trainer.ranks)
    elif each > 1:
        wanted = each * rollout.workers + 1
        raise UserError(f"rollout.sglang.tensor_parallel={each:.0f} is not possible: {wanted:.0f} of {gpus:.0f} GPUs")
    elif each:
        each = share = _share(gpus, trainer.ranks + rollout.workers)
        left = gpus - 1
        if share < 1 < trainer.ranks <= left:
            share, each = 1.0, _share(gpus - trainer.ranks, rollout.workers)
    else:
        share = _share(gpus, trainer.ranks)
    if 0 < share < 1 < trainer.ranks:
        raise UserError(
            f"trainer.ranks={trainer.ranks} is not possible: each of several ranks needs a GPU to itself, and "
            f"{left:.0f} of {gpus:.0f} are there for them beside rollout.workers={rollout.workers}; give "
            f"{'1 rank' if left < 2 else f'1 to {left:.0f} ranks'}, or fewer workers"
        )
    choose_backend(config, [share, each])
    return (
        Pool(name="trainer", count=trainer.ranks, cpus=trainer.threads, gpus=share, strategy="STRICT_PACK"),
        Pool(name="rollout", count=rollout.workers, cpus=rollout.threads, gpus=each, strategy="PACK"),
    )


FRACTIONS = {"vllm": "gpu_memory_utilization", "sglang": "mem_fraction_static"}  # in ``extra``, under their own names


def shares_gpu(config: JobConfig, gpus: float) -> bool:
    """Return whether engines that size their caches by a GPU's free memory share GPUs with the trainer."""
    name, each = config.rollout.engine, engine_module(config).gpus(config)
    apart = gpus - each * config.rollout.workers >= 1
    return not (name not in FRACTIONS or each < 1 or apart or config.model.device == "cpu" or not gpus)


def share_memory(config: JobConfig, gpus: float) -> JobConfig:
    """Return the job's configuration for its workers: an engine beside the trainer uses the memory that the trainer
    leaves.

    By default engines would take nine tenths of a GPU. Raises ``UserError`` if the job has to set the amount itself.
    """
    rollout, name = config.rollout, config.rollout.engine
    if not shares_gpu(config, gpus):
        return config
    own = getattr(rollout, name)
    if own.memory_fraction is not None or FRACTIONS[name] in own.extra:
        return config
    if gpus > 1 or not torch.cuda.is_available():
        raise UserError(
            f"rollout.{name}.memory_fraction=null is not possible: {rollout.workers} engines and "
            f"{config.trainer.ranks} ranks of the trainer share {gpus:.0f} GPUs; give the part of one for each engine"
        )
    fraction, line = memory_beside_trainer(config)
    log.warning("%s", line)
    shared: dict[str, Any] = {name: replace(own, memory_fraction=fraction)}
    return replace(config, rollout=replace(rollout, **shared))


def reserve(pool: Pool) -> list[dict[str, Any]]:
    """Reserve a pool and return Ray's options for each of its actors; raise ``UserError`` if there is no room."""
    bundle = {"CPU": float(pool.cpus)} | ({"GPU": pool.gpus} if pool.gpus else {})
    group = placement_group([bundle] * pool.count, strategy=pool.strategy)
    if not group.wait(WAIT_SECONDS):
        offered = {name: value for name, value in ray.available_resources().items() if name in bundle}
        where = "on one machine" if pool.strategy == "STRICT_PACK" else "in the cluster"
        raise UserError(f"the {pool.name} needs {pool.count} times {bundle} {where}; free in all are {offered}")
    return [
        {
            "num_cpus": pool.cpus,
            "num_gpus": pool.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, place),
        }
        for place in range(pool.count)
    ]


def _share(gpus: float, processes: int) -> float:
    """Return each process's share of a GPU."""
    return 1 / max(1, math.ceil(processes / gpus))
