"""What the loop needs of its parts: rollout workers and a trainer, wherever they run, and how they die."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bebop.config import DecodingConfig
from bebop.metrics import Metrics
from bebop.monitor.certified import Certified
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.trajectory import Batch, Group, Prompt, Trajectory

LINGER_SECONDS = 0.05  # for more answers to report, when only some are there: a report costs the driver a call


class WorkerDied(Exception):
    """A rollout worker is gone; it is replaced and its prompts start again."""


class DamagedWeights(Exception):
    """Weights arrived other than they were sent; the worker goes on with those that it has."""


class TrainerDied(Exception):
    """The trainer is gone; the job goes back to its last checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a worker is asked for: some of the answers to one prompt.

    An answer's seed depends on the prompt and its number in the group alone: whoever decodes it, it is the same.
    """

    prompt: Prompt
    members: tuple[int, ...]  # of the group's G answers, counted from 0
    past: tuple[NDArray[np.int32], ...] = ()  # answers to it that were trained on, where drafts are made from them


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGroup:
    """An assignment, finished, or those of its answers that are."""

    prompt: Prompt  # with the tokens that its environment began with
    members: tuple[int, ...]  # of which each is reported once
    trajectories: tuple[Trajectory | None, ...]  # in the order of ``members``; None: its environment was lost too often


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Of one thread of a worker."""

    name: str  # "decoding", "reward"
    silent: float  # seconds since it last got on while it had something to do; 0: it has nothing to do
    slowest: float  # seconds of its slowest turn so far; 0: none yet
    limit: float = inf  # what it may take by a setting of its own (task.reward_timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a worker has done since its report before."""

    number: int  # 1, 2, ... of one process; told again under its number until it was acknowledged
    parts: tuple[PartialGroup, ...]  # finished
    busy: float  # seconds spent decoding
    swap: float  # seconds spent taking in weights
    version: int  # of the weights in use
    head: str  # fingerprint of the MTP head in use
    paces: tuple[Pace, ...] = ()

    @property
    def tokens(self) -> int:
        """Answer tokens in the parts."""
        return sum(t.written for part in self.parts for t in part.trajectories if t is not None)


class Worker(Protocol):
    """A rollout worker as the loop sees it; every call raises ``WorkerDied`` if it is gone."""

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        """Queue assignments."""
        ...

    async def collect(self, seen: int) -> WorkerReport:
        """What was finished since the report before; waits a while if there is nothing.

        ``seen`` acknowledges: the number of the newest report that arrived, 0 after a start. What was told after that
        is told again: a report that is lost on its way loses no answer.
        """
        ...

    async def set_weights(self, weights: Any, version: int) -> None:
        """Swap weights in flight, before any prompt that is submitted later; ``DamagedWeights`` refuses them."""
        ...

    async def configure(self, decoding: DecodingConfig) -> None:
        """Draft and verify in another way from the next cycle on."""
        ...

    async def restart(self) -> None:
        """Replace a worker that died."""
        ...


class Trainer(Protocol):
    """The trainer as the loop sees it; every call raises ``TrainerDied`` if it is gone."""

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        """Learn from a batch; metrics and the new version. ``cotrain``: the MTP head learns as well."""
        ...

    async def abandon(self) -> None:
        """Drop the update that is under way unless it has taken a step; it then returns the version before."""
        ...

    async def logprobs(self) -> Mapping[int, NDArray[np.float32]]:
        """log p [T] of each traced answer of the latest update before its first step, by place in the batch."""
        ...

    async def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        """The monitor's texts under the current weights; ``sweep``: at several temperatures."""
        ...

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        """Hold answers of the next batch against the distributions of the weights that wrote them.

        Evidence that was begun before ``since`` (a step) is dropped. None: there is nothing to be said.
        """
        ...

    async def weights(self, head: bool) -> Any:
        """A handle to the current weights that workers can take; with the MTP head, which else comes if it changed."""
        ...

    async def head_fingerprint(self) -> str:
        """Of the MTP head that workers should have by now."""
        ...

    async def save(self, step: int, loop_state: dict[str, Any]) -> None:
        """Write a checkpoint."""
        ...
