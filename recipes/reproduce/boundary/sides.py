"""Positions on either side of TV(p, q) = 1 - p(argmax q), and the acceptance of each way of drafting.

A sampled draft is accepted with the overlap 1 - TV(p, q), a greedy one with p(argmax q) (SPEC 1.2). Sampled drafts win
where the overlap is larger.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bebop.adaptation.probe import Probe
from bebop.metrics.intervals import Interval, resampled

Array = NDArray[np.float64]
CLEAR = 0.01  # difference in acceptance above which one side clearly wins
Quantity = Literal[
    "sampled", "greedy", "best", "switch", "sampled_wins", "greedy_wins", "clear_sampled", "clear_greedy"
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """n positions of a head: the acceptance of both kinds of draft, and entropies of the distributions."""

    answer: NDArray[np.int64]  # [n]
    task: NDArray[np.str_]  # [n]
    position: NDArray[np.int64]  # [n] of the draft, from 1
    sampled: Array  # [n] overlap
    greedy: Array  # [n] p(argmax q)
    draft_entropy: Array  # [n] nats
    entropy: Array  # [n] of the target, nats
    switch: Array  # [n] acceptance of a switch on the draft's entropy

    def only(self, chosen: NDArray[np.bool_]) -> "Sides":
        """Return the chosen positions."""
        return Sides(**{name: getattr(self, name)[chosen] for name in self.__slots__})

    def values(self, of: Quantity) -> Array:
        """Return one number per position [n].

        It is the acceptance of a way of drafting, or 1 on a side of the boundary and 0 elsewhere.
        """
        margin = self.sampled - self.greedy
        if of in ("sampled", "greedy"):
            return self.sampled if of == "sampled" else self.greedy
        if of == "best":
            return np.maximum(self.sampled, self.greedy)
        if of == "switch":
            return self.switch
        bound = CLEAR if of.startswith("clear") else 0.0
        return (margin > bound if "sampled" in of else margin < -bound).astype(float)

    def mean(self, of: Quantity) -> float:
        """Return the mean of ``values`` over positions; NaN without any."""
        return float(self.values(of).mean()) if len(self.sampled) else float("nan")

    def advantage(self) -> Interval:
        """Return the acceptance of sampled minus greedy drafts, bootstrapped over completions."""
        _, answer = np.unique(self.answer, return_inverse=True)
        totals = np.bincount(answer, self.sampled - self.greedy)
        counts = np.bincount(answer).astype(float)
        return resampled(lambda w: (w @ totals) / (w @ counts), len(counts))


def sides(probe: Probe) -> Sides:
    """Return all existing steps of a probe as positions."""
    shape = probe.numbers["overlap"].shape
    known = np.isfinite(probe.numbers["overlap"])

    def spread(column: NDArray[np.generic]) -> NDArray[np.generic]:
        return np.broadcast_to(column[:, None], shape)[known]

    answer = spread(probe.row).astype(np.int64)
    names = ("overlap", "target_only", "draft_entropy", "target_entropy")
    sampled, greedy, draft_entropy, entropy = (probe.numbers[name][known] for name in names)
    return Sides(
        answer=answer,
        task=spread(probe.task).astype(str),
        position=np.broadcast_to(np.arange(1, shape[1] + 1), shape)[known],
        sampled=sampled,
        greedy=greedy,
        draft_entropy=draft_entropy,
        entropy=entropy,
        switch=switched(answer, draft_entropy, sampled, greedy),
    )


def threshold(draft_entropy: Array, sampled: Array, greedy: Array) -> float:
    """Return the draft entropy above which to sample, and up to which to be greedy, for most acceptance in total."""
    order = np.argsort(draft_entropy, kind="stable")
    # Entry i: gain of greedy drafts at the i smallest entropies; i = 0 always samples.
    gain = np.concatenate([[0.0], np.cumsum((greedy - sampled)[order])])
    best = int(gain.argmax())
    return float(draft_entropy[order][best - 1]) if best else -np.inf


def switched(answer: NDArray[np.int64], draft_entropy: Array, sampled: Array, greedy: Array) -> Array:
    """Return the acceptance [n] of a switch on the draft's entropy.

    The threshold of each half of the completions is fitted on the other half.
    """
    half = answer % 2 == 0
    values = np.empty_like(sampled)
    for own in (half, ~half):
        bound = threshold(draft_entropy[~own], sampled[~own], greedy[~own])
        values[own] = np.where(draft_entropy > bound, sampled, greedy)[own]
    return values
