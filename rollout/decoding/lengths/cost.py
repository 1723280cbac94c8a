"""As many drafts in each cycle as give most tokens a second on this engine: ``draft_tokens=auto``."""

from collections.abc import Mapping

from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.decoding.pace import Pace
from bebop.rollout.slots import Slots


class CostLength:
    """The same K for all rows of a cycle, from 0 on, by ``Pace``.

    It looks at what earlier cycles took and had accepted, so the output distribution is the target's; but K depends on
    measured time, so tokens are not a function of seeds: a job that is run again, or resumed, has other answers.
    Acceptance is that of the engine, whose requests are decoded together.
    """

    counts: tuple[str, ...] = ()

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.costs, self.limit = config.costs, config.limit  # drafts of the cycle in progress
        self.pace = Pace(config.limit, slots.sizes.slots, self.costs)
        self.forced: int | None = None  # what they are, where a cycle is run to be timed
        self._kept: Tensor | None = None  # [B] drafts of the cycle that stood

    def take(self, known: Pace | None) -> Pace:
        """Go on with what another one knows, if it is of as many drafts; whose it is from now on."""
        if known is not None and known.most == self.pace.most:
            self.pace = known
        return self.pace

    def start(self, rows: Rows) -> Tensor | None:
        """See ``DraftLength``: sets ``limit``."""
        self.limit = self.pace.choose(rows.batch) if self.forced is None else self.forced
        return None

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """All rows go on."""
        return None

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Note what stood; numbers are asked of the device when the cycle is over.

        A row that had no more drafts (nothing was found for it) counts as one whose next draft did not stand.
        """
        self._kept = accepted.lengths

    def took(self, seconds: float) -> None:
        """Learn from the cycle that has ended."""
        if self._kept is not None:
            self.pace.measured(len(self._kept), self.limit, seconds)
            self.pace.accepted(self._kept.tolist(), self.limit)
        self._kept = None

    def forget(self) -> None:
        """End the timing of cycles; what was drafted in them counts for nothing."""
        self.forced, self._kept = None, None

    def count(self, draft: Draft) -> Mapping[str, Tensor]:
        """Nothing of its own."""
        return {}


EntryClass = CostLength
