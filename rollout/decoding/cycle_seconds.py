"""What a cycle takes by its rows, drafts and passes of the drafter, learned from cycles as they come.

Where each row has as many drafts as it wants, no two cycles are alike, so a table by number of drafts (``pace.py``)
does not do. Seconds of a cycle are taken to be a sum over its ``Work``, with four numbers for each batch size.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bebop.config import Costs
from bebop.rollout.decoding.pace import OUTLIER, SHORTEST, between, sizes

# Standard deviations, of logarithms: of a cycle's seconds; of what is given, and of how it drifts from one cycle to the
# next, for all numbers together (a machine that is slower for all of them) and for each by itself; and how little may
# come to be known of each. What a cycle does not do drifts with it but little: where everything has become slower, that
# seems cheap, is tried, and found out; if it were taken to be slower as well, it would never be.
NOISE = 0.2
GIVEN, GIVEN_EACH = 0.3, 0.7
DRIFT, DRIFT_EACH = 0.005, 0.02
UNKNOWN = 1.0

Numbers = NDArray[np.float64]


class Work(NamedTuple):
    """Of a cycle, or of some on average."""

    cycles: float = 1.0
    drafted: float = 0.0  # whether anything is: many rows of a token are faster than a few of several
    drafts: float = 0.0  # in all rows
    passes: float = 0.0  # of the drafter


class CycleSeconds:
    """An extended Kalman filter over the logarithms of the four numbers, one a batch size that has a row of its own.

    It moves numbers by how much they have to do with a surprise and by how uncertain they are: one that no cycle says
    anything about, as nothing is drafted, moves with the others alone. Rows between two sizes are on a straight line.
    """

    def __init__(self, slots: int, costs: Costs) -> None:
        """For up to ``slots`` rows; the numbers begin as ``costs`` has them, in a unit that the first cycle sets."""
        self.sizes = sizes(slots)
        given = [Work(1.0, costs.verify, costs.verify / size, costs.draft) for size in self.sizes]
        self.logs = np.log(np.maximum(given, SHORTEST))  # [sizes, 4]
        count = len(Work._fields)
        spread = GIVEN**2 * np.ones((count, count)) + GIVEN_EACH**2 * np.eye(count)
        self.spread = np.stack([spread] * len(self.sizes))  # [sizes, 4, 4]
        self.known = False  # whether any of it was measured

    def each(self, rows: int) -> Numbers:
        """Seconds of each kind of work [4], with so many rows."""
        line: Numbers = np.sum([share * np.exp(self.logs[i]) for i, share in between(self.sizes, rows)], 0)
        return line

    def costs(self, rows: int) -> Costs:
        """In plain steps, as ``DecodingConfig`` has them: ``verify`` is that of a draft more in every row."""
        plain, _, verify, draft = self.each(rows).tolist()
        return Costs(draft=draft / plain, verify=rows * verify / plain)

    def measured(self, rows: int, work: Work, seconds: float) -> None:
        """Take in a cycle."""
        terms = self.each(rows) * work
        surprise = math.log(max(seconds, SHORTEST) / terms.sum())
        if not self.known:  # so far a cycle had no unit of time
            self.logs += surprise
            self.known, surprise = True, 0.0
        surprise = max(-math.log(OUTLIER), min(math.log(OUTLIER), surprise))
        part = terms / terms.sum()  # how a change of each logarithm changes that of the sum
        for i, share in between(self.sizes, rows):
            spread = _capped(self.spread[i] + DRIFT**2 + DRIFT_EACH**2 * np.eye(len(part)))
            seen = spread @ part
            gain = share * seen / (part @ seen + NOISE**2)
            self.logs[i] += gain * surprise
            self.spread[i] = spread - np.outer(gain, seen)


def _capped(spread: Numbers) -> Numbers:
    """With standard deviations of at most UNKNOWN, correlations being what they were."""
    scale = np.minimum(1.0, UNKNOWN / np.sqrt(np.diag(spread)))
    capped: Numbers = spread * np.outer(scale, scale)
    return capped
