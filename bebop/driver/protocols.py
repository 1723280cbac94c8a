"""The protocols between the loop and its parts: rollout workers and a trainer, wherever they run.

Each has an implementation behind Ray (``bebop.runtime.actors``) and one in virtual time (``bebop.simulation.parts``).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bebop.config.job import DecodingConfig
from bebop.metrics.metrics import Metrics
from bebop.monitor.certified import Certified
from bebop.monitor.probe_set import ProbeReading, ProbeText, Sweep
from bebop.trajectory import Batch, Group, Prompt, Trajectory

LINGER_SECONDS = 0.05  # wait for more completions before a report of some: a report costs the driver a call


class WorkerDied(Exception):
    """A rollout worker is gone; the pool replaces it and starts its prompts again."""


class DamagedWeights(Exception):
    """Weights did not arrive as they were sent; the worker keeps its current weights."""


class TrainerDied(Exception):
    """The trainer is gone; the job goes back to its last checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """A request to a worker for some of the completions of one prompt.

    The seed of a completion depends only on its prompt and its number in the group, so every worker decodes the same.
    """

    prompt: Prompt
    members: tuple[int, ...]  # numbers in the group, 0 to G - 1
    past: tuple[NDArray[np.int32], ...] = ()  # earlier completions of the prompt, for systems that draft from them


@dataclass(frozen=True, slots=True, kw_only=True)
class PartialGroup:
    """The finished completions of an assignment that no earlier report contained."""

    prompt: Prompt  # with the tokens that its environment began with
    members: tuple[int, ...]
    trajectories: tuple[Trajectory | None, ...]  # in the order of ``members``; None: its environment was lost too often


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Progress of one thread of a worker."""

    name: str  # "decoding", "reward", "environments"
    silent: float  # seconds without progress while it had work; 0: it has no work
    slowest: float  # seconds of its slowest turn so far; 0: none yet
    limit: float = inf  # seconds that a turn may take by a setting of its own (task.reward_timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """Completions and times of a worker since its last report."""

    number: int  # 1, 2, ... within one process; a report keeps it when sent again, until it is acknowledged
    parts: tuple[PartialGroup, ...]
    busy: float  # seconds spent decoding
    swap: float  # seconds spent loading weights
    version: int  # of the weights in use
    head: str  # fingerprint of the MTP head in use
    redrawn: int = 0  # completions in this process so far that a server had lost and that were drawn again
    paces: tuple[Pace, ...] = ()

    @property
    def tokens(self) -> int:
        """Return the number of tokens that the policy wrote in the parts."""
        return sum(t.written for part in self.parts for t in part.trajectories if t is not None)


class Worker(Protocol):
    """A rollout worker; every call raises ``WorkerDied`` if it is gone."""

    async def submit(self, assignments: Sequence[Assignment]) -> None:
        """Queue assignments."""
        ...

    async def collect(self, seen: int) -> WorkerReport:
        """Return the completions since the last report; wait a while if there are none.

        ``seen`` is the number of the newest report that arrived, 0 after a start, and acknowledges it. The worker sends
        a later report again, so a lost report loses no completion.
        """
        ...

    async def set_weights(self, weights: Any, version: int) -> None:
        """Swap weights in flight, before any prompt that is submitted later.

        Raises:
            DamagedWeights: The worker refuses the weights because they arrived damaged.
        """
        ...

    async def configure(self, decoding: DecodingConfig) -> None:
        """Change how drafts are made and verified, from the next cycle on."""
        ...

    async def restart(self) -> None:
        """Replace a worker that died."""
        ...


class Trainer(Protocol):
    """The trainer; every call raises ``TrainerDied`` if it is gone."""

    async def update(self, batch: Batch, cotrain: bool) -> tuple[Metrics, int]:
        """Learn from a batch, the MTP head too with ``cotrain``; return metrics and the new version."""
        ...

    async def abandon(self) -> None:
        """Drop the update in progress unless it has taken a step; ``update`` then returns the old version."""
        ...

    async def logprobs(self) -> Mapping[int, NDArray[np.float32]]:
        """Return log p [T] of each traced completion before the last update, by its place in the batch."""
        ...

    async def read_probe_set(
        self, texts: Sequence[ProbeText], sweep: bool, decoding: DecodingConfig
    ) -> tuple[ProbeReading, Sweep | None]:
        """Read the monitor's texts with the current weights, with ``sweep`` at several temperatures as well."""
        ...

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        """Compare completions of the next batch with the distributions of the weights that wrote them.

        Evidence from before step ``since`` is dropped. None means that there is no result.
        """
        ...

    async def weights(self, head: bool) -> Any:
        """Return a handle to the current weights for workers, with the MTP head if asked for or if it changed."""
        ...

    async def head_fingerprint(self) -> str:
        """Return the fingerprint of the MTP head that workers should have by now."""
        ...

    async def save(self, step: int, loop_state: dict[str, Any], best: int | None = None) -> None:
        """Write a checkpoint; do not remove the checkpoint of step ``best``."""
        ...
