"""A fixed number of drafts."""

from collections.abc import Mapping

from torch import Tensor

from bebop.config import DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, Rows, TargetOutput
from bebop.rollout.slots import Slots


class FixedLength:
    """Always K drafts."""

    counts: tuple[str, ...] = ()

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.limit, self.costs = config.limit, config.costs

    def start(self, rows: Rows) -> Tensor | None:
        """All K."""
        return None

    def extend(self, step: int, entropies: Tensor) -> Tensor | None:
        """All rows go on."""
        return None

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Nothing to learn."""

    def count(self, draft: Draft) -> Mapping[str, Tensor]:
        """Nothing to say."""
        return {}


EntryClass = FixedLength
