"""Workers and trainer as Ray actors, behind the protocols of the loop; how their deaths reach it."""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError

from bebop.actors import RolloutActor, TrainerActor
from bebop.config import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.metrics import Metrics
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.protocols import TrainerDied, WorkerDied
from bebop.rollout.engine import EngineDied
from bebop.rollout.worker import WorkerReport
from bebop.trainer import checkpoint
from bebop.trajectory import Batch, Prompt

T = TypeVar("T")
Options = Mapping[str, Any]  # of an actor, from ``placement.reserve``


async def _call(death: type[Exception], result: Awaitable[T]) -> T:
    """Await a Ray call; a dead actor or engine becomes ``death``, a ``UserError`` from inside is raised as itself."""
    try:
        return await result
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise UserError(str(error.cause)) from None
        if isinstance(error.cause, EngineDied):
            raise death(str(error.cause)) from error
        raise
    except RayActorError as error:
        raise death(str(error).strip().splitlines()[0]) from error


class RayWorker:
    """A rollout worker behind Ray; see ``protocols.Worker``."""

    def __init__(self, config: JobConfig, options: Options) -> None:
        self.config, self.options = config, {**options, "max_concurrency": 8}
        self.pid = 0
        self.actor: Any = None

    async def restart(self) -> None:
        """Start, or start again after a death. What the engine started goes with its process."""
        self.close()
        actor = ray.remote(RolloutActor).options(**self.options).remote()
        try:
            self.pid = await _call(WorkerDied, actor.setup.remote(self.config))
        except BaseException:
            ray.kill(actor)
            raise
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

    def __init__(self, config: JobConfig, run_dir: Path, options: Sequence[Options]) -> None:
        """``options`` of each rank."""
        self.config, self.run_dir, self.options = config, run_dir, options
        self.actors: list[Any] = []
        self.pids: list[int] = []

    async def restart(self) -> None:
        """Start all ranks, or start them again after a death."""
        self.close()
        world = len(self.options)
        self.actors = [ray.remote(TrainerActor).options(**options).remote() for options in self.options]
        meeting = None
        if world > 1:
            port = await _call(TrainerDied, self.actors[0].free_port.remote())
            meeting = f"tcp://127.0.0.1:{port}"
        self.pids = await self._all("setup", [(self.config, rank, world, meeting) for rank in range(world)])

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        """See ``protocols.Trainer``."""
        shared = ray.put(batch)
        return (await self._all("update", [(shared, cotrain)] * len(self.actors)))[0]

    async def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        """See ``protocols.Trainer``."""
        return (await self._all("read_probe_set", [(texts, sweep, decoding)] * len(self.actors)))[0]

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
        checkpoints = checkpoint.store(self.run_dir)
        staged = checkpoints.staging(step)
        await self._all("save", [(staged, loop_state)] * len(self.actors))
        checkpoints.prune(self.config.trainer.keep, checkpoints.publish(staged, step))

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
