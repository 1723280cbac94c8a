"""Workers and trainer as Ray actors, behind the protocols of the loop; how their deaths reach it."""

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from numpy.typing import NDArray
from ray.exceptions import RayActorError, RayTaskError

from bebop.config import DecodingConfig, JobConfig
from bebop.errors import UserError
from bebop.metrics import Metrics
from bebop.monitor.certified import Certified
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.protocols import Assignment, TrainerDied, WorkerDied, WorkerReport
from bebop.rollout.engine import EngineDied
from bebop.rollout.worker import make_worker
from bebop.trainer import checkpoint
from bebop.trainer.rank import TrainerRank
from bebop.trajectory import Batch, Group

T = TypeVar("T")
Options = Mapping[str, Any]  # of an actor, from ``placement.reserve``
COLLECT_SECONDS = 5.0  # a collect call that finds nothing returns after this long


class _Process:
    """A process of its own for one part of a job, whose methods are called by name.

    The part is made by a call: of what a constructor raises, Ray keeps the text alone, and a mistake in the settings
    would look like a death.
    """

    def make(self, part: Callable[..., Any], *arguments: Any) -> int:
        """Make the part; the process id."""
        self.part = part(*arguments)
        return os.getpid()

    def call(self, method: str, *arguments: Any) -> Any:
        """One of the part's methods."""
        return getattr(self.part, method)(*arguments)

    def free_port(self) -> int:
        """A port of this machine, before there is a part."""
        return free_port()


def free_port() -> int:
    """A TCP port that is free on the loopback address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


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
        actor = ray.remote(_Process).options(**self.options).remote()
        try:
            self.pid = await _call(WorkerDied, actor.make.remote(make_worker, self.config))
            await _call(WorkerDied, actor.call.remote("start"))
        except BaseException:
            ray.kill(actor)
            raise
        self.actor = actor  # not before it can serve: until then it counts as dead

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        """See ``protocols.Worker``."""
        await self._ask("submit", assignments)

    async def collect(self, seen: int) -> WorkerReport:
        """See ``protocols.Worker``."""
        report: WorkerReport = await self._ask("collect", COLLECT_SECONDS, seen)
        return report

    async def set_weights(self, weights: Any, version: int) -> None:
        """See ``protocols.Worker``; ``weights`` is a Ray reference, resolved on the worker's side."""
        await self._ask("set_weights", weights, version)

    async def configure(self, decoding: DecodingConfig) -> None:
        """See ``protocols.Worker``."""
        await self._ask("configure", decoding)

    async def _ask(self, method: str, *arguments: Any) -> Any:
        if self.actor is None:
            raise WorkerDied("it is being replaced")
        return await _call(WorkerDied, self.actor.call.remote(method, *arguments))

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
        self.actors = [ray.remote(_Process).options(**options).remote() for options in self.options]
        meeting = None
        if world > 1:
            port = await _call(TrainerDied, self.actors[0].free_port.remote())
            meeting = f"tcp://127.0.0.1:{port}"
        made = [a.make.remote(TrainerRank, self.config, rank, world, meeting) for rank, a in enumerate(self.actors)]
        self.pids = await asyncio.gather(*[_call(TrainerDied, pid) for pid in made])

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        """See ``protocols.Trainer``."""
        return (await self._all("update", ray.put(batch), cotrain))[0]

    async def logprobs(self) -> dict[int, NDArray[np.float32]]:
        """See ``protocols.Trainer``; ranks share the answers."""
        return {place: found for part in await self._all("logprobs") for place, found in part.items()}

    async def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        """See ``protocols.Trainer``."""
        return (await self._all("read_probe_set", texts, sweep, decoding))[0]

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        """See ``protocols.Trainer``."""
        certified: Certified | None = (await self._all("certify", groups, since))[0]
        return certified

    async def head_fingerprint(self) -> str:
        """See ``protocols.Trainer``."""
        mark: str = await _call(TrainerDied, self.actors[0].call.remote("head_fingerprint"))
        return mark

    async def weights(self, head: bool) -> Any:
        """A Ray reference to rank 0's weights, for workers to resolve; they do not pass through this process."""
        references = [actor.call.remote("weights", head) for actor in self.actors]
        # Ranks serve one call after another: once this one is answered, the weights are there, or the trainer is dead.
        await self._all("version")
        return references[0]

    async def save(self, step: int, loop_state: dict[str, Any]) -> None:
        """See ``protocols.Trainer``; the oldest checkpoints beyond ``trainer.keep`` are removed afterwards."""
        checkpoints = checkpoint.store(self.run_dir)
        staged = checkpoints.staging(step)
        await self._all("save", staged, loop_state)
        checkpoints.prune(self.config.trainer.keep, checkpoints.publish(staged, step))

    async def load(self, folder: Path) -> dict[str, Any]:
        """Go on from a checkpoint; the loop's state."""
        return (await self._all("load", folder))[0]

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Every rank is asked the same; their answers."""
        calls = [actor.call.remote(method, *arguments) for actor in self.actors]
        return list(await asyncio.gather(*[_call(TrainerDied, call) for call in calls]))

    def close(self) -> None:
        """End all ranks."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []
