"""Rollout workers and trainer as Ray actors behind the loop's protocols (``bebop.driver.protocols``)."""

from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from bebop.config.job import DecodingConfig, JobConfig
from bebop.driver.protocols import Assignment, TrainerDied, WorkerDied, WorkerReport
from bebop.errors import UserError
from bebop.metrics.metrics import Metrics
from bebop.monitor.certified import Certified
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.run_dir.checkpoints import link_model
from bebop.runtime.actor_group import ActorGroup, Options
from bebop.runtime.broadcast import Publication, WeightBroadcast, choose_backend
from bebop.runtime.events import EventLog
from bebop.trainer import checkpoint
from bebop.trajectory import Batch, Group

COLLECT_SECONDS = 5.0  # a collect call without results returns after this time


def make_worker(config: JobConfig) -> Any:
    """Create a rollout worker in its own process, so that the driver imports neither engine nor rewards."""
    from bebop.rollout.worker import make_worker as make

    return make(config)


def make_rank(config: JobConfig, rank: int, world: int, meeting: str | None) -> Any:
    """Create a rank of the trainer in its own process, so that the driver imports no trainer and no model code."""
    from bebop.trainer.rank import TrainerRank

    return TrainerRank(config, rank, world, meeting)


class RayWorker:
    """Rollout worker in a Ray actor."""

    def __init__(self, config: JobConfig, options: Options, number: int = 0, events: EventLog | None = None) -> None:
        """Describe worker ``number`` of the job; ``restart`` starts it."""
        self.config = config
        self.group = ActorGroup(
            f"rollout worker {number}",
            WorkerDied,
            [{**options, "max_concurrency": 8}],
            config.runtime.hang_after,
            events or EventLog(None),
        )
        self._ready = False  # it counts as dead until it can serve

    @property
    def pid(self) -> int:
        """Return the worker's process id."""
        return self.group.pids[0]

    @property
    def ready(self) -> bool:
        """Return whether the worker can serve, as far as is known."""
        return self._ready

    async def restart(self) -> None:
        """Start the worker, or start it again after a death; processes of its engine end with its process."""
        self._ready = False

        async def make(actors: Sequence[Any]) -> list[Awaitable[Any]]:
            await self.group.ask(0, "start", actors[0].make.remote(make_worker, self.config))
            return [actors[0].call.remote("start")]

        await self.group.start(make)
        self._ready = True

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        await self._ask("submit", assignments)

    async def collect(self, seen: int) -> WorkerReport:
        report: WorkerReport = await self._ask("collect", COLLECT_SECONDS, seen, allowed=COLLECT_SECONDS)
        self.group.watchdog.threads.update(report.paces, self.group.watchdog.clock.read())
        return report

    async def set_weights(self, weights: Any, version: int) -> None:
        """Send a Ray reference, which the worker resolves, or the location of weights that a broadcast delivered."""
        if isinstance(weights, Publication):
            weights = await weights.handle(self.group)
        await self._ask("set_weights", weights, version)

    async def configure(self, decoding: DecodingConfig) -> None:
        await self._ask("configure", decoding)

    async def _ask(self, method: str, *arguments: Any, allowed: float = 0.0) -> Any:
        if not self._ready:
            raise WorkerDied("it is being replaced")
        return await self.group.ask(0, method, self.group.actors[0].call.remote(method, *arguments), allowed)

    def close(self) -> None:
        """End the worker's process."""
        self._ready = False
        self.group.close()


class RayTrainer:
    """Trainer with all its ranks in Ray actors."""

    def __init__(
        self,
        config: JobConfig,
        run_dir: Path,
        options: Sequence[Options],
        events: EventLog | None = None,
        workers: Sequence[RayWorker] = (),
    ) -> None:
        """Describe a trainer with Ray's ``options`` of each rank; ``restart`` starts it.

        ``workers`` are the rollout workers that receive its weights.
        """
        self.config, self.run_dir, self.workers = config, run_dir, workers
        self.group = ActorGroup("trainer", TrainerDied, options, config.runtime.hang_after, events or EventLog(None))
        gpus = [
            one.get("num_gpus", 0.0) for group in (self.group, *(w.group for w in workers)) for one in group.options
        ]
        self.broadcast = WeightBroadcast(
            config,
            self.group,
            lambda: [worker.group for worker in self.workers if worker.ready],
            choose_backend(config, gpus),
        )

    @property
    def pids(self) -> list[int]:
        """Return the process ids of all ranks."""
        return self.group.pids

    def close(self) -> None:
        """End the processes of all ranks and everything that they started."""
        self.broadcast.close()
        self.group.close()

    async def restart(self) -> None:
        """Start all ranks, or start them again after a death."""
        self.close()

        async def make(actors: Sequence[Any]) -> list[Awaitable[Any]]:
            world, meeting = len(actors), None
            if world > 1:  # the first rank's process makes the file: this one may be on another machine
                meeting = await self.group.ask(0, "start", actors[0].meeting.remote())
            return [a.make.remote(make_rank, self.config, rank, world, meeting) for rank, a in enumerate(actors)]

        await self.group.start(make)

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        return (await self._all("update", ray.put(batch), cotrain))[0]

    async def abandon(self) -> None:
        await self.group.tell_all("abandon")

    async def logprobs(self) -> dict[int, NDArray[np.float32]]:
        """Return the log-probabilities of all ranks by completion; the ranks share the completions of a batch."""
        return {place: found for part in await self._all("logprobs") for place, found in part.items()}

    async def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        return (await self._all("read_probe_set", texts, sweep, decoding))[0]

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        certified: Certified | None = (await self._all("certify", groups, since))[0]
        return certified

    async def head_fingerprint(self) -> str:
        found = self.group.actors[0].call.remote("head_fingerprint")
        mark: str = await self.group.ask(0, "head_fingerprint", found)
        return mark

    async def weights(self, head: bool) -> Any:
        """Return the weights as a Ray reference, a shared-memory location or a publication that is being broadcast;
        they do not pass through this process.
        """
        way = self._way()
        if way == "broadcast":
            await self.broadcast.settled()
        references = [actor.call.remote("weights", head, way != "store") for actor in self.group.actors]
        # Ranks serve one call after another: once this call returns, the weights are ready, or the trainer is dead.
        await self.group.ask_all("weights", "version")
        if way != "broadcast":
            return references[0]
        return self.broadcast.publish(await self.group.ask(0, "weights", references[0]))

    def _way(self) -> str:
        """Return how weights reach the workers: shared, broadcast or store."""
        nodes = {*self.group.nodes, *(node for worker in self.workers for node in worker.group.nodes)}
        way = self.config.trainer.publish or ("broadcast" if len(nodes) > 1 else "shared")
        if way == "shared" and len(nodes) > 1:
            raise UserError(
                f"trainer.publish='shared' is not possible: the job's processes lie on {len(nodes)} machines; give "
                "broadcast, store or null"
            )
        if way == "broadcast" and self.broadcast.given_up:
            return "store" if len(nodes) > 1 else "shared"
        return way

    async def save(self, step: int, loop_state: dict[str, Any], best: int | None = None) -> None:
        """Write a checkpoint, then remove the oldest ones beyond ``trainer.keep``, except that of step ``best``."""
        checkpoints = checkpoint.store(self.run_dir)
        staged = checkpoints.staging(step)
        await self._all("save", staged, loop_state)
        written = checkpoints.publish(staged, step)
        link_model(self.run_dir, written)  # before pruning removes the checkpoint to which the link pointed
        checkpoints.prune(self.config.trainer.keep, written, best)
        if (renamed := checkpoints.rename(written)) != written:
            link_model(self.run_dir, renamed)

    async def load(self, folder: Path) -> dict[str, Any]:
        """Load a checkpoint into all ranks and return the loop's state."""
        return (await self._all("load", folder))[0]

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank and return the results."""
        return await self.group.ask_all(method, method, *arguments)
