"""Builds the parts of a job from its configuration, runs it on Ray, and brings a dead trainer back."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import ray
from ray.util.metrics import Gauge

from bebop.command import writing
from bebop.config import JobConfig
from bebop.dashboards.provision import provision
from bebop.decoding import SYSTEMS
from bebop.errors import UserError
from bebop.loop import Loop
from bebop.model.checkpoint import load_tokenizer
from bebop.monitor.watch import Monitor, NoMonitor, Watch
from bebop.placement import pools, reserve
from bebop.preflight import LONGEST_FOLDER
from bebop.protocols import TrainerDied, WorkerDied
from bebop.remote import RayTrainer, RayWorker, free_port
from bebop.sinks import JsonlSink, ProgressLine, Sink, TensorBoardSink, WandbSink
from bebop.trainer import checkpoint
from bebop.trajectories import NAME
from bebop.trajectory import Prompt
from bebop.trajectory_log import TrajectoryLog, piece_of

log = logging.getLogger(__name__)


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


@contextlib.contextmanager
def ray_session(config: JobConfig) -> Iterator[Callable[[], None]]:
    """Ray for the length of a job: a private one with its own folder and ports, or one that is joined by address.

    What is handed out closes Ray's folder to others, once more after its processes have come up: they make parts of it.
    """
    runtime = config.runtime
    if runtime.address is not None:
        try:
            ray.init(address=runtime.address, log_to_driver=False)
        except (ConnectionError, ValueError) as error:
            raise UserError(f"runtime.address={runtime.address!r} cannot be joined: {error}") from error
        try:
            yield lambda: None
        finally:
            ray.shutdown()
        return
    os.environ["RAY_GCS_SERVER_PORT"] = str(runtime.port or free_port())
    wanted = config.trainer.ranks * config.trainer.threads + config.rollout.workers * config.rollout.threads
    with private_folder() as private:
        temp = Path(runtime.temp_dir).absolute() if runtime.temp_dir else private / "ray"
        temp.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = temp.stat().st_mode
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
            session = (temp / "session_latest").resolve()
            temp.chmod(mode)
            shut(session)
            if config.monitor.ray_metrics:  # Ray has written its own files by now; ours go beside them
                provision(session, staleness=config.rollout.staleness)
            yield lambda: shut(session)
        finally:
            with unhurried():
                ray.shutdown()


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A folder that nobody else may enter, for the temporary files of every process of a job; gone afterwards."""
    before = os.environ.get("TMPDIR")
    folder = Path(tempfile.mkdtemp(prefix="bebop-", dir=_short(tempfile.gettempdir())))
    (folder / "files").mkdir(mode=0o700)
    os.environ["TMPDIR"] = str(folder / "files")  # Ray's processes inherit it
    try:
        yield folder
    finally:
        os.environ.pop("TMPDIR") if before is None else os.environ.update(TMPDIR=before)
        with unhurried():
            for _ in range(50):  # processes that are ending may still write
                shutil.rmtree(folder, ignore_errors=True)
                if not folder.exists():
                    break
                time.sleep(0.1)


def _short(folder: str) -> str:
    """``folder``, or, as Ray does, the system's own where sockets below it would have too long a name."""
    return folder if len(folder) + len("/bebop-12345678/ray") <= LONGEST_FOLDER else "/tmp"


def shut(folder: Path) -> None:
    """Take from others what Ray gives to everybody: it makes its folders writable for the whole machine."""
    for place, _, _ in os.walk(folder):
        with contextlib.suppress(FileNotFoundError):
            os.chmod(place, os.stat(place).st_mode & ~0o077)


@contextlib.contextmanager
def unhurried() -> Iterator[None]:
    """Ctrl-C and a polite kill are not heard while the block puts things away."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_job(config: JobConfig, run_dir: Path, prompt: Callable[[int], Prompt], begin: Callable[[], None]) -> bool:
    """Run a job that ``preflight`` has checked to its end in ``run_dir``; False if it was interrupted.

    An interrupted job leaves a checkpoint. ``prompt(i)`` gives prompt number i.
    ``begin`` is called once all parts run: nothing is written to ``run_dir`` before.
    """
    checkpoints = checkpoint.store(run_dir)
    newest = checkpoints.newest_sound() if config.runtime.resume else None
    if config.runtime.resume and newest is None:
        raise UserError(f"runtime.resume=true: {run_dir} holds no finished checkpoint")
    with ray_session(config) as close_to_others:

        def started() -> None:
            close_to_others()
            begin()

        ranks, places = (reserve(pool) for pool in pools(config, ray.cluster_resources().get("GPU", 0.0)))
        trainer, workers = RayTrainer(config, run_dir, ranks), [RayWorker(config, place) for place in places]
        return asyncio.run(_run(config, run_dir, prompt, newest, trainer, workers, started))


async def _run(
    config: JobConfig,
    run_dir: Path,
    prompt: Callable[[int], Prompt],
    newest: Path | None,
    trainer: RayTrainer,
    workers: Sequence[RayWorker],
    begin: Callable[[], None],
) -> bool:
    """Run the loop; when the trainer dies, go back to the newest checkpoint with fresh actors."""
    checkpoints = checkpoint.store(run_dir)
    sinks: list[Sink] = []
    trajectories: TrajectoryLog | None = None
    loop: Loop | None = None
    monitor: Monitor = NoMonitor(config)
    stop = asyncio.Event()
    # Ctrl-C (and a polite kill) end the step in progress and leave a checkpoint; a second one ends at once.
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, lambda: _interrupt(loop, stop))
    try:
        for deaths in range(config.runtime.max_restarts + 1):
            await _start(trainer, workers)
            start = checkpoints.step(newest) if newest else 0
            if not deaths:
                begin()
                checkpoints.set_aside(newest)
                sinks = _sinks(config, run_dir, start)
                trajectories = _trajectories(config, run_dir, start)
            monitor = _monitor(config, run_dir, start)
            loop = Loop(config, prompt, workers, trainer, sinks, monitor, trajectories)
            if stop.is_set():
                loop.stopping.set()
            if newest is not None:
                loop.restore(await trainer.load(newest))
            _write_pids(run_dir, trainer, workers)
            try:
                return await loop.run()
            except TrainerDied as death:
                monitor.close()
                newest = checkpoints.newest_sound()
                checkpoints.set_aside(newest)
                where = newest.name if newest else "the start"
                log.warning("the trainer died (%s); going back to %s", death, where)
                if deaths == config.runtime.max_restarts:
                    raise UserError(f"the trainer died {deaths + 1} times, the last time: {death}") from death
        raise AssertionError("unreachable")
    finally:
        with contextlib.ExitStack() as closing:  # all are closed, whatever one of them raises
            kept = [] if trajectories is None else [trajectories.close]
            for close in [*(w.close for w in workers), trainer.close, *(s.close for s in sinks), monitor.close, *kept]:
                closing.callback(close)


async def _start(trainer: RayTrainer, workers: Sequence[RayWorker]) -> None:
    """Start all parts; what cannot even start is no death to recover from."""
    try:
        await asyncio.gather(trainer.restart(), *[worker.restart() for worker in workers])
    except (TrainerDied, WorkerDied) as death:
        raise UserError(f"a part of the job did not start: {death}") from death


def _interrupt(loop: Loop | None, stop: asyncio.Event) -> None:
    """Ask the loop to stop; the second time, give up waiting."""
    if stop.is_set():
        raise KeyboardInterrupt
    log.warning("stopping after this step; a checkpoint will be written (once more to stop at once)")
    stop.set()
    if loop is not None:
        loop.stopping.set()


def _monitor(config: JobConfig, run_dir: Path, start: int) -> Monitor:
    """The monitor, going on after step ``start``; it does nothing if it is off or nothing is drafted."""
    drafts = SYSTEMS[config.decoding.system].drafts
    return Watch(config, run_dir, start) if config.monitor.drift and drafts else NoMonitor(config)


def _trajectories(config: JobConfig, run_dir: Path, start: int) -> TrajectoryLog | None:
    """Where answers are kept, going on after step ``start``; None: they are not.

    What a run has kept so far stays when it goes on without, up to that step.
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


def _write_pids(run_dir: Path, trainer: RayTrainer, workers: Sequence[RayWorker]) -> None:
    """Who is who, for a look with ps or a debugger."""
    lines = [
        f"driver {os.getpid()}",
        *[f"trainer {pid}" for pid in trainer.pids],
        *[f"rollout {w.pid}" for w in workers],
    ]
    with writing(run_dir / "pids.txt"):
        (run_dir / "pids.txt").write_text("\n".join(lines) + "\n")
