"""As many drafts in each cycle as give most tokens a second on this engine: ``draft_tokens=auto``."""

from collections.abc import Sequence

from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.pace import Pace
from bebop.rollout.decoding.timed_length import TimedLength
from bebop.rollout.slots import Slots


class CostLength(TimedLength):
    """The same K for all rows of a cycle, from 0 on, by ``Pace``.

    Acceptance is that of the engine, whose requests are decoded together. Kinds of cycles are numbers of drafts.
    """

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.costs, self.limit = config.costs, config.limit  # drafts of the cycle in progress
        self.pace = Pace(config.limit, slots.sizes.slots, self.costs)
        self.sizes, self.kinds = self.pace.sizes, range(config.limit + 1)
        self._kept: Tensor | None = None  # [B] drafts of the cycle that stood

    def take(self, known: object) -> Pace:
        """See ``TimedLength``: tables of as many drafts are of use."""
        if isinstance(known, Pace) and known.most == self.pace.most:
            self.pace = known
        return self.pace

    def start(self, rows: Rows) -> Tensor | None:
        """See ``DraftLength``: sets ``limit``."""
        self.limit = self.pace.choose(rows.batch) if self.forced is None else self.forced
        return None

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Note what stood; numbers are asked of the device when the cycle is over.

        A row that had no more drafts (nothing was found for it) counts as one whose next draft did not stand.
        """
        self._kept = accepted.lengths

    def took(self, seconds: float) -> None:
        """See ``TimedLength``."""
        if self._kept is not None:
            self.pace.measured(len(self._kept), self.limit, seconds)
            self.pace.accepted(self._kept.tolist(), self.limit)
        self._kept = None

    def timed(self, seconds: Sequence[float]) -> None:
        """See ``TimedLength``: the fastest counts."""
        assert self._kept is not None
        self.pace.timed(len(self._kept), self.limit, min(seconds))

    def forget(self) -> None:
        """See ``TimedLength``."""
        super().forget()
        self._kept = None


EntryClass = CostLength
