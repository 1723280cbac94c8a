"""Check that the engine's completions follow the trainer's distributions: a reading's result, and when one is due.

The test itself is the certificate's black box (``bebop.certify.ledger``), which runs beside the trainer; see
``bebop.trainer.certify`` for its input. This module is the monitor's side of it.

Weights change at every step, and the hypothesis does not: each token follows the distribution of the weights that
produced it. Evidence therefore accumulates over the whole run. It starts again when the question is new. That is so
after weights and head were sent again, since the failed engine no longer runs. It is also so after a change of the
decoding system, since evidence for one system says nothing about another. Completions begun before count for neither.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from bebop.config.job import JobConfig
from bebop.systems import SYSTEMS
from bebop.trajectory import Group

log = logging.getLogger(__name__)

PAIRS = 4  # prompts of a reading, with two completions each


@dataclass(frozen=True, slots=True, kw_only=True)
class Certified:
    """Result of the black box after a reading.

    ``log_e`` is ln E. If all tokens follow their distributions, it ever reaches ``limit`` = ln 1/alpha with a
    probability of at most alpha, however often one looks.
    """

    tokens: int  # looked at since evidence was last begun
    log_e: float  # of now
    highest: float  # so far
    limit: float
    tv: float | None = None  # the largest bound of a direction, as total variation a token; None: there is none yet
    cause: str = ""  # what the winning direction speaks for; empty before anything is found
    sentence: str = ""  # the same in words

    @property
    def failed(self) -> bool:
        """Return whether the evidence ever reached its limit; later evidence does not revoke that."""
        return self.highest >= self.limit

    def diagnosis(self) -> str:
        """Return the fault in words; empty if none was found."""
        if not self.failed:
            return ""
        found = f"{self.cause}: {self.sentence}" if self.cause else self.sentence
        evidence = f"ln E {self.highest:.1f} of {self.limit:.1f} after {self.tokens} tokens"
        return f"completions do not follow the policy's distribution ({evidence}); {found}"

    def metrics(self) -> dict[str, float]:
        """Return the numbers for the log."""
        row = {"certify/log_e": self.log_e, "certify/tokens": float(self.tokens), "certify/failed": float(self.failed)}
        if self.tv is not None and math.isfinite(self.tv):
            row["certify/tv_bound"] = self.tv
        return row

    def to_row(self) -> dict[str, Any]:
        """Return the row for ``drift.jsonl``."""
        return dataclasses.asdict(self)

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> "Certified":
        """Read a row that ``to_row`` wrote."""
        return cls(**row)


class CertifyingTrainer(Protocol):
    """The part of ``bebop.driver.protocols.Trainer`` that the certificate uses."""

    async def certify(self, groups: Sequence[Group], since: int) -> Certified | None:
        """Test all of these completions; evidence from before step ``since`` is dropped."""
        ...


def untestable(config: JobConfig) -> str:
    """Return why completions of this job cannot be tested against the trainer's distributions; empty if they can."""
    system = config.decoding.system
    if not SYSTEMS[system].exact:
        return f"decoding.system={system} does not claim to keep the policy's distribution"
    if config.algorithm.rescore:
        return "algorithm.rescore=true trains on completions whose distribution the trainer does not compute"
    return ""


def chosen(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Return the first two completions of up to ``PAIRS`` groups, evenly spaced in the order of the prompts.

    Their numbers fix the choice before anything about them is known. So it depends neither on their length nor on their
    reward, and truncated completions are included.
    """
    count = min(PAIRS, len(groups))
    spaced = [groups[i * len(groups) // count] for i in range(count)]
    return tuple(dataclasses.replace(group, trajectories=group.trajectories[:2]) for group in spaced)


class Certificate:
    """Schedule of the certificate: asks for a reading every ``monitor.certify_every`` steps."""

    def __init__(self, config: JobConfig) -> None:
        """Read the schedule from ``config``; log the reason if the job's completions cannot be tested."""
        self.every, self.since = config.monitor.certify_every, 1  # the first step whose completions count
        self.staleness = config.rollout.staleness
        self._told = False
        if self.every and (reason := untestable(config)):
            log.info("monitor.certify_every=%d: nothing is looked at, as %s", self.every, reason)
            self.every = 0

    async def read(
        self, step: int, groups: Sequence[Group], trainer: CertifyingTrainer, undisturbed: bool = True
    ) -> Certified | None:
        """Read the certificate before update ``step`` (from 1), if that is due.

        ``undisturbed``: no group was on a worker that died, or in a job that was resumed. In such groups finished
        completions were kept and unfinished ones drawn again, so the choice of tokens depends on the tokens.
        """
        due = self.every and step % self.every == 0 and step >= self.since and undisturbed
        certified = await trainer.certify(chosen(groups), self.since) if due else None
        if certified is not None and certified.failed and not self._told:
            log.warning("step %d: %s", step, certified.diagnosis())
            self._told = True
        return certified

    def restart(self, step: int) -> None:
        """Start the evidence again with completions begun after ``step``, which come from a different engine state."""
        self.since, self._told = step + self.staleness + 1, False
