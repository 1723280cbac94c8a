"""From what the plugin saw of each step to the statistics of an answer."""

from dataclasses import dataclass, field

import numpy as np

from bebop.rollout.vllm.plugin import Verified
from bebop.trajectory import DRAFT_STATS, MEASURED, DecodeStats


@dataclass(slots=True, kw_only=True)
class StepCounts:
    """Adds up the steps of one request.

    What an answer's end cuts off counts nowhere. Sums of measures are over measured steps that reached a place, each
    times the number of steps that it stands for, so that sum / reached estimates the mean.
    """

    drafts: int  # per cycle, 0 for plain decoding
    head: bool  # a model drafts
    sums: DecodeStats = field(default_factory=DecodeStats)
    prefill: bool = True  # the next token comes out of a prefill

    def __post_init__(self) -> None:
        for name in DRAFT_STATS:
            setattr(self.sums, name, np.zeros(self.drafts))

    def restarted(self) -> None:
        """Keys and values are computed again: so is a prefill's token drawn once more."""
        self.prefill = True

    def add(self, tokens: int, verified: Verified | None) -> None:
        """A step that emitted ``tokens``, with drafts if it ``verified`` some."""
        if not tokens:
            return
        sums = self.sums
        sums.tokens += tokens
        if self.prefill and verified is None and self.drafts:
            sums.prefilled += tokens
            self.prefill = False
            return
        self.prefill = False
        sums.cycles += 1
        sums.target_forwards += 1
        sums.draft_forwards += self.drafts if self.head else 0
        if verified is None:
            return
        kept = min(verified.accepted, tokens)
        reached = kept if kept == tokens else min(kept + 1, verified.drafted)
        sums.accepted[:kept] += 1
        sums.reached[:reached] += 1
        if verified.weight:
            for name in MEASURED:
                getattr(sums, name)[:reached] += verified.weight * np.asarray(verified.measured[name])[:reached]

    def stats(self) -> DecodeStats:
        """So far."""
        return self.sums
