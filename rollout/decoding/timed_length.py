"""What lengths have that go by the time of cycles: ``draft_tokens=auto``."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput


class TimedLength(ABC):
    """It looks at what earlier cycles took and had accepted, so the output distribution is the target's; but drafts
    depend on measured time, so tokens are not a function of seeds: a job that is run again, or resumed, has other
    answers.
    """

    counts: tuple[str, ...] = ()
    sizes: Sequence[int]  # batch sizes whose cycles are timed before the first request
    kinds: Sequence[Any]  # of cycles, that are timed at each size
    forced: Any = None  # the kind of cycles to come, whatever pays

    @abstractmethod
    def start(self, rows: Rows) -> Tensor | None:
        """See ``DraftLength``."""

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """All rows go on."""
        return None

    @abstractmethod
    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """See ``DraftLength``; a cycle that counts is one that ``took``."""

    def count(self, draft: Draft) -> Mapping[str, Tensor]:
        """Nothing of its own."""
        return {}

    def before(self, kind: Any) -> int:
        """Cycles of the kind to run before the one that is timed, so that it is like those of a request."""
        return 0

    @abstractmethod
    def take(self, known: object) -> object:
        """Go on with what an earlier length knew, if it is of use; what it is that is known from now on."""

    @abstractmethod
    def took(self, seconds: float) -> None:
        """Learn from the cycle that has ended."""

    @abstractmethod
    def timed(self, seconds: Sequence[float]) -> None:
        """Learn what the latest cycles took, all of the ``forced`` kind; other work may have slowed some down."""

    def forget(self) -> None:
        """End the timing of cycles; what was drafted in them counts for nothing."""
        self.forced = None
