"""Builds the parts of a job from its configuration and makes them Ray actors. The only file that imports ray."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError
from ray.util.metrics import Gauge
from torch import Tensor

from bebop.config import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.loop import Loop
from bebop.metrics import Metrics
from bebop.model.checkpoint import load_policy, load_tokenizer, require_mtp
from bebop.monitor.bank import BankReading, BankText, Sweep
from bebop.monitor.dashboards.provision import provision
from bebop.monitor.watch import Watch
from bebop.protocols import TrainerDied, WorkerDied
from bebop.rollout.decoding.systems import make_system
from bebop.rollout.torch_engine import TorchEngine
from bebop.rollout.worker import RolloutWorker, WorkerReport
from bebop.sinks import JsonlSink, ProgressLine, Sink, TensorBoardSink, WandbSink
from bebop.tasks.rewards import checked, make_reward
from bebop.tasks.source import PromptSource, chat_encoder, instruction
from bebop.trainer import checkpoint
from bebop.trainer.actor import TrainerWorker
from bebop.trajectory import Batch, Prompt

log = logging.getLogger(__name__)
T = TypeVar("T")
COLLECT_SECONDS = 5.0  # a collect call that finds nothing returns after this long


def make_worker(config: JobConfig) -> RolloutWorker:
    """A rollout worker with the embedded engine, not started."""
    torch.set_num_threads(config.rollout.threads)
    torch.manual_seed(config.runtime.seed)  # a fresh MTP head must be the same everywhere
    system = make_system(config.decoding)
    policy = load_policy(config.model, need_mtp=system.drafter is not None)
    engine = TorchEngine(
        policy,
        system,
        slots=config.rollout.slots,
        max_length=config.rollout.max_length,
        on_update=config.rollout.on_update,
        measure=config.monitor.decode_stats,
        room=config.decoding.draft_tokens + 1 if config.monitor.actions else 0,
    )
    reward = make_reward(config.task)
    return RolloutWorker(engine, lambda text, prompt: checked(reward, text, prompt), config, policy.eos_token_ids)


class RolloutActor:
    """A rollout worker in a process of its own; calls come in on threads beside the decoding thread."""

    def setup(self, config: JobConfig) -> int:
        """Load model and task and start decoding; the process id."""
        self.worker = make_worker(config)
        self.worker.start()
        return os.getpid()

    def submit(self, prompts: Sequence[Prompt]) -> None:
        """See ``RolloutWorker``."""
        self.worker.submit(prompts)

    def collect(self) -> WorkerReport:
        """See ``RolloutWorker``."""
        return self.worker.collect(COLLECT_SECONDS)

    def set_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """See ``RolloutWorker``."""
        self.worker.set_weights(weights, version)

    def set_decoding(self, decoding: DecodingConfig) -> None:
        """See ``RolloutWorker``."""
        self.worker.set_decoding(decoding)


class TrainerActor:
    """One rank of the trainer in a process of its own."""

    def setup(self, config: JobConfig, rank: int, world: int, meeting: str | None) -> int:
        """Load the policy and meet the other ranks; the process id."""
        self.worker = TrainerWorker(config, rank, world, meeting)
        return os.getpid()

    def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        """See ``TrainerWorker``."""
        return self.worker.update(batch, cotrain)

    def read_bank(
        self, texts: Sequence[BankText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[BankReading, Sweep | None]:
        """See ``TrainerWorker``."""
        return self.worker.read_bank(texts, sweep, decoding)

    def version(self) -> int:
        """See ``TrainerWorker``."""
        return self.worker.version()

    def weights(self, head: bool) -> dict[str, Tensor]:
        """See ``TrainerWorker``."""
        return self.worker.weights(head)

    def head_fingerprint(self) -> str:
        """See ``TrainerWorker``."""
        return self.worker.head_fingerprint()

    def save(self, folder: Path, loop_state: dict[str, Any]) -> None:
        """See ``TrainerWorker``."""
        self.worker.save(folder, loop_state)

    def load(self, folder: Path) -> dict[str, Any]:
        """See ``TrainerWorker``."""
        return self.worker.load(folder)


async def _call(death: type[Exception], result: Awaitable[T]) -> T:
    """Await a Ray call; a dead actor becomes ``death``, a ``UserError`` from inside is raised as itself."""
    try:
        return await result
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        raise
    except RayActorError as error:
        raise death(str(error).strip().splitlines()[0]) from error


class RayWorker:
    """A rollout worker behind Ray; see ``protocols.Worker``."""

    def __init__(self, config: JobConfig, gpus: float) -> None:
        options = {"num_cpus": config.rollout.threads, "num_gpus": gpus, "max_concurrency": 8}
        self.config, self.options = config, options
        self.pid = 0
        self.actor: Any = None

    async def restart(self) -> None:
        """Start, or start again after a death."""
        self.close()
        actor = ray.remote(RolloutActor).options(**self.options).remote()
        self.pid = await _call(WorkerDied, actor.setup.remote(self.config))
        self.actor = actor  # not before it can serve: until then it counts as dead

    async def submit(self, prompts: Sequence[Prompt]) -> None:
        """See ``protocols.Worker``."""
        await _call(WorkerDied, self._alive().submit.remote(prompts))

    async def collect(self) -> WorkerReport:
        """See ``protocols.Worker``."""
        return await _call(WorkerDied, self._alive().collect.remote())

    async def set_weights(self, weights: Any, version: int) -> None:
        """See ``protocols.Worker``; ``weights`` is a Ray reference, resolved on the worker's side."""
        await _call(WorkerDied, self._alive().set_weights.remote(weights, version))

    async def set_decoding(self, decoding: DecodingConfig) -> None:
        """See ``protocols.Worker``."""
        await _call(WorkerDied, self._alive().set_decoding.remote(decoding))

    def _alive(self) -> Any:
        if self.actor is None:
            raise WorkerDied("it is being replaced")
        return self.actor

    def close(self) -> None:
        """End the process."""
        if self.actor is not None:
            ray.kill(self.actor)
            self.actor = None


class RayTrainer:
    """All ranks of the trainer behind Ray; see ``protocols.Trainer``."""

    def __init__(self, config: JobConfig, run_dir: Path, gpus: float) -> None:
        self.config, self.run_dir, self.gpus = config, run_dir, gpus
        self.actors: list[Any] = []
        self.pids: list[int] = []

    async def restart(self) -> None:
        """Start all ranks, or start them again after a death."""
        self.close()
        world = self.config.trainer.ranks
        meeting = f"tcp://127.0.0.1:{free_port()}" if world > 1 else None
        options = {"num_cpus": self.config.trainer.threads, "num_gpus": self.gpus}
        self.actors = [ray.remote(TrainerActor).options(**options).remote() for _ in range(world)]
        self.pids = await self._all("setup", [(self.config, rank, world, meeting) for rank in range(world)])

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        """See ``protocols.Trainer``."""
        shared = ray.put(batch)
        return (await self._all("update", [(shared, cotrain)] * len(self.actors)))[0]

    async def read_bank(
        self, texts: Sequence[BankText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[BankReading, Sweep | None]:
        """See ``protocols.Trainer``."""
        return (await self._all("read_bank", [(texts, sweep, decoding)] * len(self.actors)))[0]

    async def head_fingerprint(self) -> str:
        """See ``protocols.Trainer``."""
        mark: str = await _call(TrainerDied, self.actors[0].head_fingerprint.remote())
        return mark

    async def weights(self, head: bool) -> Any:
        """A Ray reference to rank 0's weights, for workers to resolve; they do not pass through this process."""
        references = [actor.weights.remote(head) for actor in self.actors]
        # Ranks serve one call after another: once this one is answered, the weights are there, or the trainer is dead.
        await self._all("version", [()] * len(self.actors))
        return references[0]

    async def save(self, step: int, loop_state: dict[str, Any]) -> None:
        """See ``protocols.Trainer``; the oldest checkpoints beyond ``trainer.keep`` are removed afterwards."""
        folder = checkpoint.folder_of(self.run_dir, step)
        await self._all("save", [(folder, loop_state)] * len(self.actors))
        checkpoint.prune(self.run_dir, self.config.trainer.keep)

    async def load(self, folder: Path) -> dict[str, Any]:
        """Go on from a checkpoint; the loop's state."""
        return (await self._all("load", [(folder,)] * len(self.actors)))[0]

    async def _all(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        calls = [getattr(a, method).remote(*args) for a, args in zip(self.actors, arguments, strict=True)]
        return list(await asyncio.gather(*[_call(TrainerDied, call) for call in calls]))

    def close(self) -> None:
        """End all ranks."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


class RaySink:
    """Every metric as a Ray gauge ``bebop_<name>``, with / as _; Ray exports them to Prometheus."""

    def __init__(self) -> None:
        self._gauges: dict[str, Gauge] = {}

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Set the gauges."""
        for name, value in {"step": float(step), **values}.items():
            key = "bebop_" + name.replace("/", "_")
            if key not in self._gauges:
                self._gauges[key] = Gauge(key, description=name)
            self._gauges[key].set(value)

    def close(self) -> None:
        """Nothing to close: Ray owns the gauges."""


def free_port() -> int:
    """A TCP port that is free on the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def ray_session(config: JobConfig) -> Iterator[None]:
    """Ray for the length of a job: a private one with its own folder and ports, or one that is joined by address."""
    runtime = config.runtime
    if runtime.address is not None:
        try:
            ray.init(address=runtime.address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise UserError(f"runtime.address={runtime.address!r} cannot be joined: {error}") from error
        try:
            yield
        finally:
            ray.shutdown()
        return
    temp = Path(runtime.temp_dir or tempfile.mkdtemp(prefix="bebop-ray-"))
    os.environ["RAY_GCS_SERVER_PORT"] = str(runtime.port or free_port())
    wanted = config.trainer.ranks * config.trainer.threads + config.rollout.workers * config.rollout.threads
    try:
        ray.init(
            address="local",
            num_cpus=max(wanted, os.cpu_count() or 1),
            include_dashboard=runtime.dashboard,
            dashboard_port=runtime.dashboard_port,
            _temp_dir=str(temp),
            _metrics_export_port=runtime.metrics_port or free_port(),
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        if config.monitor.ray_metrics:  # Ray has written its own files by now; ours go beside them
            provision((temp / "session_latest").resolve(), staleness=config.rollout.staleness)
        yield
    finally:
        ray.shutdown()
        if runtime.temp_dir is None:
            shutil.rmtree(temp, ignore_errors=True)


def run_job(config: JobConfig, run_dir: Path, begin: Callable[[], None] = lambda: None) -> bool:
    """Run a job to its end in ``run_dir``; False if it was interrupted (a checkpoint is left behind).

    ``begin`` is called once everything that can be checked beforehand is found to be right.
    """
    tokenizer = load_tokenizer(config.model)
    room = config.rollout.max_length - config.rollout.sampling.max_new_tokens
    source = PromptSource(config.task, chat_encoder(tokenizer, instruction(config.task, tokenizer)), room)
    source.prompt(0)  # a task that cannot be asked fails here, before anything is started
    make_reward(config.task)
    if make_system(config.decoding).drafter is not None or config.cotrain.mode != "off":
        require_mtp(config.model)
    found = checkpoint.latest(run_dir) if config.runtime.resume else None
    if config.runtime.resume and found is None:
        raise UserError(f"runtime.resume=true: {run_dir} holds no finished checkpoint")
    if found is not None:
        checkpoint.verify(found)
    begin()
    with ray_session(config):
        return asyncio.run(_run(config, run_dir, source.prompt, found))


async def _run(config: JobConfig, run_dir: Path, prompt: Callable[[int], Prompt], found: Path | None) -> bool:
    """Run the loop; when the trainer dies, go back to the newest checkpoint with fresh actors."""
    share = _gpu_share(config)
    trainer = RayTrainer(config, run_dir, share)
    workers = [RayWorker(config, share) for _ in range(config.rollout.workers)]
    sinks = _sinks(config, run_dir, _step_of(found))
    loop: Loop | None = None
    watch: Watch | None = None
    stop = asyncio.Event()
    # Ctrl-C (and a polite kill) end the step in progress and leave a checkpoint; a second one ends at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: _interrupt(loop, stop))
    try:
        for deaths in range(config.runtime.max_restarts + 1):
            await asyncio.gather(trainer.restart(), *[w.restart() for w in workers])
            watch = _watch(config, run_dir, _step_of(found))
            loop = Loop(config, prompt, workers, trainer, sinks, watch)
            if stop.is_set():
                loop.stopping.set()
            if found is not None:
                loop.restore(await trainer.load(found))
            _write_pids(run_dir, trainer, workers)
            try:
                return await loop.run()
            except TrainerDied as death:
                if watch is not None:
                    watch.close()
                found = checkpoint.latest(run_dir)
                where = found.name if found else "the start"
                log.warning("the trainer died (%s); going back to %s", death, where)
                if deaths == config.runtime.max_restarts:
                    raise UserError(f"the trainer died {deaths + 1} times, the last time: {death}") from death
        raise AssertionError("unreachable")
    finally:
        for sink in sinks:
            sink.close()
        if watch is not None:
            watch.close()
        trainer.close()
        for worker in workers:
            worker.close()


def _interrupt(loop: Loop | None, stop: asyncio.Event) -> None:
    """Ask the loop to stop; the second time, give up waiting."""
    if stop.is_set():
        raise KeyboardInterrupt
    log.warning("stopping after this step; a checkpoint will be written (once more to stop at once)")
    stop.set()
    if loop is not None:
        loop.stopping.set()


def _step_of(found: Path | None) -> int:
    """The step of a checkpoint; 0 without one."""
    return int(found.name.removeprefix("step_")) if found else 0


def _watch(config: JobConfig, run_dir: Path, start: int) -> Watch | None:
    """The monitor, going on after step ``start``; None if it is off or nothing is drafted."""
    drafts = make_system(config.decoding).drafter is not None
    return Watch(config, run_dir, start) if config.monitor.drift and drafts else None


def _sinks(config: JobConfig, run_dir: Path, start: int) -> list[Sink]:
    """Where metrics go; those that keep files go on after step ``start``."""
    monitor = config.monitor
    sinks: list[Sink] = [JsonlSink(run_dir / "metrics.jsonl", start if start else None)]
    if monitor.tensorboard:
        sinks.append(TensorBoardSink(run_dir / "tensorboard", start + 1 if start else None))
    if monitor.wandb:
        sinks.append(WandbSink(run_dir, dataclasses.asdict(config)))
    if monitor.ray_metrics:
        sinks.append(RaySink())
    if config.runtime.progress:
        sinks.append(ProgressLine(config.trainer.steps, start))
    return sinks


def _gpu_share(config: JobConfig) -> float:
    """The part of a GPU that each process gets: all share those that there are."""
    if config.model.device == "cpu" or not torch.cuda.is_available():
        return 0.0
    processes = config.trainer.ranks + config.rollout.workers
    return min(1.0, torch.cuda.device_count() / processes)


def _write_pids(run_dir: Path, trainer: RayTrainer, workers: Sequence[RayWorker]) -> None:
    """Who is who, for a look with ps or a debugger."""
    lines = [
        f"driver {os.getpid()}",
        *[f"trainer {pid}" for pid in trainer.pids],
        *[f"rollout {w.pid}" for w in workers],
    ]
    (run_dir / "pids.txt").write_text("\n".join(lines) + "\n")
