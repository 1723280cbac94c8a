"""Broadcast of published weights from the trainer's machine to the others (``bebop.driver.broadcast``).

The members are rank 0 of the trainer and, on each other machine, the first rollout worker that serves. The other
workers of that machine map the received weights; those of the trainer's machine map what the trainer has written. If
all processes lie on one machine, each worker receives for itself; that is for tests and measurements.

Invariants:

- There is one broadcast at a time. The trainer writes its next publication once the previous one has arrived
  everywhere, or was given up.
- Members of a group are processes. Once a member has ended or a broadcast has failed, the next broadcast forms a new
  group of the workers that serve by then.
- A worker that was not reached (it was replaced, or a failure left it out) gets the same publication from the object
  store, or from the trainer's memory.
- After ``MAX_FAILURES`` failed broadcasts in a row, broadcasting stops for good: machines may be unable to connect to
  each other.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray

from bebop.config.job import JobConfig
from bebop.driver.broadcast import LOOPBACK, Backend, Meeting
from bebop.driver.protocols import TrainerDied, WorkerDied
from bebop.driver.weights import SharedWeights
from bebop.errors import UserError
from bebop.runtime.actor_group import ActorGroup

log = logging.getLogger(__name__)
MAX_FAILURES = 3  # broadcasts in a row
MIB = 1 << 20


@dataclass(slots=True, kw_only=True)
class Publication:
    """Weights of one version, which a broadcast delivers to the machines of a job."""

    sent: SharedWeights  # where the trainer has them
    trainer: ActorGroup
    arrival: "asyncio.Task[Mapping[str, SharedWeights]]"  # by place, see ``WeightBroadcast.place``
    place: Callable[[ActorGroup], str]
    asked: set[str] = field(default_factory=set)  # incarnations of workers that have asked before
    stored: Any = None  # Ray's reference to the weights, once a worker needs it

    async def handle(self, worker: ActorGroup) -> Any:
        """Return a worker's source of weights: their location on its machine, or a reference to the object store.

        A worker that asks again could not read its first source: the process that received the weights may have ended.
        Raises ``TrainerDied`` if the trainer was closed meanwhile.
        """
        again = worker.incarnation in self.asked
        self.asked.add(worker.incarnation)
        await asyncio.wait([self.arrival])  # a worker that is cancelled here must not end the others' broadcast
        if self.arrival.cancelled() or not self.trainer.actors:
            raise TrainerDied("it was closed")
        here = self.arrival.result().get(self.place(worker))
        if here is not None and not again:
            return here
        if worker.nodes[0] == self.trainer.nodes[0]:
            return self.sent
        if self.stored is None:
            self.stored = self.trainer.actors[0].transfer.remote("stored_weights", self.sent)
        return self.stored


class WeightBroadcast:
    """The driver's side of a job's broadcasts."""

    def __init__(
        self, config: JobConfig, trainer: ActorGroup, serving: Callable[[], Sequence[ActorGroup]], backend: Backend
    ) -> None:
        """Set up without a group; ``serving`` returns the rollout workers that currently serve."""
        self.config, self.trainer, self.serving, self.backend = config, trainer, serving, backend
        self.failures = 0  # in a row
        self.reached = 0  # publications that arrived at every member
        self._members: tuple[str, ...] = ()  # incarnations of the group that is open
        self._meeting: Meeting | None = None
        self._arrival: asyncio.Task[Mapping[str, SharedWeights]] | None = None

    @property
    def given_up(self) -> bool:
        """Return whether broadcasting has stopped for good."""
        return self.failures >= MAX_FAILURES

    async def settled(self) -> None:
        """Wait until no broadcast is in progress."""
        if self._arrival is not None:
            await asyncio.wait([self._arrival])

    def publish(self, sent: SharedWeights) -> Publication:
        """Start to broadcast the weights that rank 0 has written."""
        workers = list(self.serving())
        apart = len({self.trainer.nodes[0], *(worker.nodes[0] for worker in workers)}) > 1
        self._arrival = asyncio.create_task(self._broadcast(sent, workers, apart))
        return Publication(
            sent=sent,
            trainer=self.trainer,
            arrival=self._arrival,
            place=_machine if apart else _process,
        )

    def close(self) -> None:
        """Forget the group, since its processes end."""
        if self._arrival is not None:
            self._arrival.cancel()
        self._arrival, self._meeting, self._members = None, None, ()

    async def _broadcast(
        self, sent: SharedWeights, workers: Sequence[ActorGroup], apart: bool
    ) -> Mapping[str, SharedWeights]:
        """Return the locations of an arrived publication, by place; a missing place needs another source."""
        place = _machine if apart else _process
        receivers: dict[str, ActorGroup] = {}
        for worker in workers:
            if not apart or worker.nodes[0] != self.trainer.nodes[0]:
                receivers.setdefault(place(worker), worker)
        if not receivers:
            return {}
        members = (self.trainer.incarnation, *(worker.incarnation for worker in receivers.values()))
        meeting: Meeting | str | None = self._meeting
        if meeting is None or members != self._members:
            meeting = await self._meet(len(members), apart)
        if isinstance(meeting, str):
            failed = [meeting]
            found: dict[str, SharedWeights] = {}
        else:
            asked = [self._ask(self.trainer, "send_weights", meeting, sent)]
            for rank, worker in enumerate(receivers.values(), 1):
                asked.append(self._ask(worker, "receive_weights", meeting, rank, sent))
            failure, *answers = await asyncio.gather(*asked)
            found = {key: one for key, one in zip(receivers, answers, strict=True) if isinstance(one, SharedWeights)}
            failed = [one for one in (failure, *answers) if one and isinstance(one, str)]
        if not failed:
            assert isinstance(meeting, Meeting)
            self._meeting, self._members = meeting, members
            self.failures, self.reached = 0, self.reached + 1
            return found
        self._meeting = None
        self.failures += 1
        log.warning(
            "weights did not reach %d of %d receivers by broadcast (%s): they are sent otherwise%s",
            len(receivers) - len(found), len(receivers), failed[0],
            "; nothing is broadcast any more" if self.given_up else "",
        )  # fmt: skip
        return found

    async def _meet(self, members: int, apart: bool) -> Meeting | str:
        """Open a rendezvous store at the trainer for ``members`` members; return the reason as text if that fails."""
        host, timeout = _address(self.trainer.nodes[0]) if apart else LOOPBACK, self.config.runtime.hang_after
        port = await self._ask(self.trainer, "open_meeting", host, timeout)
        if isinstance(port, str):
            return port
        return Meeting(
            host=host,
            port=port,
            members=members,
            backend=self.backend,
            timeout=timeout,
            bucket=self.config.trainer.broadcast.bucket * MIB,
        )

    async def _ask(self, group: ActorGroup, method: str, *arguments: Any) -> Any:
        """Call a method of the group's first process; if it has ended, return the reason as text."""
        if not group.actors:
            return f"{group.name} is being replaced"
        # A member legitimately waits for the others: at the rendezvous, and for a bucket that does not arrive.
        allowed = 3 * self.config.runtime.hang_after
        try:
            return await group.ask(0, method, group.actors[0].transfer.remote(method, *arguments), allowed)
        except (TrainerDied, WorkerDied) as death:
            return f"{group.name} died: {death}"


def choose_backend(config: JobConfig, gpus: Sequence[float]) -> Backend:
    """Return the backend of broadcasts for processes with these shares of a GPU, the trainer's rank 0 first.

    Raises:
        UserError: NCCL is configured, and a process has no GPU to itself: NCCL refuses two ranks on one.
    """
    asked, alone = config.trainer.broadcast.backend, bool(gpus) and min(gpus) >= 1
    if asked == "nccl" and not alone:
        raise UserError(
            f"trainer.broadcast.backend='nccl' is not possible: each member needs a GPU to itself, and one has "
            f"{min(gpus, default=0):.2g} of one; give gloo or null"
        )
    return asked or ("nccl" if alone else "gloo")


def _address(node: str) -> str:
    """Return the network address of one of Ray's machines."""
    found: str = next(one["NodeManagerAddress"] for one in ray.nodes() if one["NodeID"] == node)
    return found


def _machine(worker: ActorGroup) -> str:
    return worker.nodes[0]


def _process(worker: ActorGroup) -> str:
    return worker.incarnation
