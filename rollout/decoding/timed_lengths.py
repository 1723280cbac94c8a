"""Draft lengths by the measured time of cycles: ``draft_tokens=auto``.

Both models learn from cycles as they run how long a cycle takes and how many tokens it emits.

``ThroughputModel`` is for cycles in which all rows have the same number of drafts. With acceptance a_1 .. a_L of tested
drafts, a cycle of B rows with K drafts emits B (1 + a_1 + ... + a_1 .. a_K) tokens on average. K = 0 is plain decoding.
Both tables follow the measurements. A number of drafts that is not the best one is tried now and then, so that its
entry stays known, at a bounded cost. ``CostLength`` uses it.

``CycleSeconds`` is for cycles in which each row has its own number of drafts. No two of them are alike, so a table by
number of drafts does not do. Seconds are modelled as a sum over the cycle's ``Work``, with four numbers for each batch
size. ``RowCostLength`` uses it.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from operator import mul
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bebop.config.job import Costs, DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import DraftLength, Outcome
from bebop.rollout.slots import Slots

# ---- duration of cycles with the same number of drafts in all rows

START, WEIGHT = 0.8, 8.0  # acceptance that is assumed before any draft, and the number of tests that this counts for
FADE = 0.98  # weight of a cycle's acceptance over that of the next one
ALL, ONE = 0.1, 0.05  # how far a cycle's seconds move the row of its size, and its own number of drafts beyond that:
STALE, MAX_OWN = 20, 0.5  # once more for each so many cycles since that number was last measured, up to so far
OUTLIER = 2.0  # a cycle that seems so many times slower or faster than it should be counts as if it were so many times
SHORTEST = 1e-9  # seconds that a clock may say
TRIALS = 0.01  # of the time may be lost to numbers of drafts that are not the best one
REST = 16  # cycles before a number is tried again: two that are as good as one another shall both be measured


def sizes(most: int) -> tuple[int, ...]:
    """Return the batch sizes that have a table row of their own: powers of two, and the largest size."""
    return (*(1 << i for i in range((most - 1).bit_length())), most)


def between(known: Sequence[int], rows: int) -> list[tuple[int, float]]:
    """Return the indices of the known sizes around ``rows``, each with its weight on the straight line between them."""
    high = next((i for i, size in enumerate(known) if size >= rows), len(known) - 1)
    if known[high] <= rows:
        return [(high, 1.0)]
    share = (rows - known[high - 1]) / (known[high] - known[high - 1])
    return [(high - 1, 1 - share), (high, share)]


class ThroughputModel:
    """Tables of seconds and of acceptance, and the choice of a number of drafts.

    Numbers of rows between two known sizes are interpolated on a straight line.
    """

    def __init__(self, most: int, slots: int, costs: Costs) -> None:
        """Make tables for at most ``most`` drafts, L, and ``slots`` rows.

        The seconds begin as those of a plain step * (1 + K (draft + verify)).
        """
        each = costs.draft + costs.verify
        self.most, self.sizes = most, sizes(slots)
        self.seconds = [[1.0 + k * each for k in range(most + 1)] for _ in self.sizes]
        self.tested, self.passed = [WEIGHT] * most, [WEIGHT * START] * most  # by position
        self.known = False  # whether any of it was measured
        self.owed = [0.0] * (most + 1)  # seconds that trials of each number of drafts may lose
        self.idle = [0] * (most + 1)  # cycles since each was measured

    def tokens(self) -> list[float]:
        """Return the expected tokens of a row in a cycle with 0, 1, ..., L drafts."""
        chances = [passed / tested for passed, tested in zip(self.passed, self.tested, strict=True)]
        return list(accumulate(accumulate(chances, mul), initial=1.0))

    def costs(self, rows: int) -> list[float]:
        """Return the seconds of a cycle with 0, 1, ..., L drafts."""
        around = between(self.sizes, rows)
        return [sum(share * self.seconds[size][k] for size, share in around) for k in range(self.most + 1)]

    def best(self, rows: int) -> int:
        """Return the number of drafts with most tokens a second; of equal ones, the smallest."""
        return _largest(self.tokens(), self.costs(rows))

    def choose(self, rows: int) -> int:
        """Return the number of drafts of the next cycle: the best one, or another one that has saved up for a trial.

        The loss of a trial is how much sooner the best number would have had as many tokens. Each number of drafts
        earns its share of ``TRIALS``. So numbers that lose little are tried often, and all of them some time.
        """
        tokens, costs = self.tokens(), self.costs(rows)
        best = _largest(tokens, costs)
        each, pace = TRIALS * costs[best] / self.most, costs[best] / tokens[best]
        self.owed = [owed + each for owed in self.owed]
        self.owed[best] = 0.0
        for other in range(self.most + 1):
            loss = costs[other] - tokens[other] * pace
            if other != best and loss <= self.owed[other] and self.idle[other] >= REST:
                self.owed[other] = 0.0
                return other
        return best

    def measured(self, rows: int, drafts: int, seconds: float) -> None:
        """Learn from the seconds of a cycle.

        Machines and contexts change for all numbers of drafts alike, so a surprise moves the whole row. A number that
        was not measured for long moves farther.
        """
        surprise = math.log(max(seconds, SHORTEST) / self.costs(rows)[drafts])
        if not self.known:  # so far a cycle had no unit of time
            self.seconds = [[one * math.exp(surprise) for one in row] for row in self.seconds]
            self.known, surprise = True, 0.0
        surprise = max(-math.log(OUTLIER), min(math.log(OUTLIER), surprise))
        own = min(MAX_OWN, ONE * (1 + self.idle[drafts] / STALE))
        for size, weight in between(self.sizes, rows):
            for k in range(self.most + 1):
                self.seconds[size][k] *= math.exp(weight * surprise * (ALL + own * (k == drafts)))
        self.idle = [0 if k == drafts else idle + 1 for k, idle in enumerate(self.idle)]

    def timed(self, rows: int, drafts: int, seconds: float) -> None:
        """Set the seconds of a cycle, for a batch size that has a row of its own."""
        self.seconds[self.sizes.index(rows)][drafts], self.known = max(seconds, SHORTEST), True

    def accepted(self, lengths: Sequence[int], drafts: int) -> None:
        """Learn from the accepted drafts ``lengths`` [B] of a cycle with ``drafts`` drafts.

        All drafts up to the first rejected one were tested.
        """
        for k in range(drafts):
            tested, passed = sum(length >= k for length in lengths), sum(length > k for length in lengths)
            self.tested[k] = FADE * self.tested[k] + tested
            self.passed[k] = FADE * self.passed[k] + passed


def _largest(tokens: Sequence[float], costs: Sequence[float]) -> int:
    """Return the index with most tokens a second."""
    rates = [emitted / spent for emitted, spent in zip(tokens, costs, strict=True)]
    return rates.index(max(rates))


# ---- duration of cycles in which each row has its own number of drafts


# Standard deviations of logarithms: of a cycle's seconds (NOISE); of the prior numbers (GIVEN) and of their drift from
# one cycle to the next (DRIFT), for all numbers together (a slower machine) and for each by itself (EACH); and the most
# that a number may be uncertain (UNKNOWN). Work that a cycle does not do drifts with the others only a little. Where
# everything has become slower, such work seems cheap, is tried, and is measured. If it were assumed to be slower as
# well, it would never be tried.
NOISE = 0.2
GIVEN, GIVEN_EACH = 0.3, 0.7
DRIFT, DRIFT_EACH = 0.005, 0.02
UNKNOWN = 1.0

Numbers = NDArray[np.float64]


class Work(NamedTuple):
    """Amounts of work in a cycle, or their means over several cycles."""

    cycles: float = 1.0
    drafted: float = 0.0  # whether anything is: many rows of a token are faster than a few of several
    drafts: float = 0.0  # in all rows
    passes: float = 0.0  # of the drafter


class CycleSeconds:
    """An extended Kalman filter over the logarithms of the four numbers, one for each batch size of its own.

    It moves a number by its share in a surprise and by its uncertainty. A number that no cycle measures, because
    nothing is drafted, moves with the others alone. Rows between two sizes are on a straight line.
    """

    def __init__(self, slots: int, costs: Costs) -> None:
        """Make a filter for up to ``slots`` rows.

        The numbers begin as in ``costs``, in a unit that the first cycle sets.
        """
        self.sizes = sizes(slots)
        given = [Work(1.0, costs.verify, costs.verify / size, costs.draft) for size in self.sizes]
        self.logs = np.log(np.maximum(given, SHORTEST))  # [sizes, 4]
        count = len(Work._fields)
        spread = GIVEN**2 * np.ones((count, count)) + GIVEN_EACH**2 * np.eye(count)
        self.spread = np.stack([spread] * len(self.sizes))  # [sizes, 4, 4]
        self.known = False  # whether any of it was measured

    def each(self, rows: int) -> Numbers:
        """Return the seconds of each kind of work [4] in cycles of ``rows`` rows."""
        line: Numbers = np.sum([share * np.exp(self.logs[i]) for i, share in between(self.sizes, rows)], 0)
        return line

    def costs(self, rows: int) -> Costs:
        """Return the costs in plain steps, as in ``DecodingConfig``.

        ``verify`` is the cost of one more draft in every row.
        """
        plain, _, verify, draft = self.each(rows).tolist()
        return Costs(draft=draft / plain, verify=rows * verify / plain)

    def measured(self, rows: int, work: Work, seconds: float) -> None:
        """Learn from the work and the seconds of a cycle."""
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
    """Return the covariance with standard deviations of at most UNKNOWN and the same correlations."""
    scale = np.minimum(1.0, UNKNOWN / np.sqrt(np.diag(spread)))
    capped: Numbers = spread * np.outer(scale, scale)
    return capped


# ---- the lengths


class TimedLength(DraftLength, ABC):
    """Base class of draft lengths that depend on the measured time of earlier cycles.

    They look only at earlier cycles' seconds and acceptance, so the output distribution is the target's. But drafts
    depend on measured time, so tokens are not a function of seeds: a job that is run again, or resumed, has other
    completions.
    """

    sizes: Sequence[int]  # batch sizes whose cycles are timed before the first request
    kinds: Sequence[Any]  # kinds of cycles that are timed at each size
    forced: Any = None  # the kind of all next cycles, whether or not it pays

    def before(self, kind: Any) -> int:
        """Return how many cycles of the kind run before the timed one, so that it is like those of a request."""
        return 0

    @abstractmethod
    def take(self, known: object) -> object:
        """Use the knowledge of an earlier length if it fits; return the knowledge in use from now on."""

    @abstractmethod
    def took(self, seconds: float) -> None:
        """Learn from the duration of the cycle that has ended, in seconds."""

    @abstractmethod
    def timed(self, seconds: Sequence[float]) -> None:
        """Learn from the durations of the latest cycles, all of the ``forced`` kind.

        Other work may have slowed some of them down.
        """

    def forget(self) -> None:
        """End the timing of cycles; drafts of the timed cycles do not count."""
        self.forced = None


class CostLength(TimedLength):
    """A draft length with the same K, from 0 on, for all rows of a cycle, by ``ThroughputModel``.

    Acceptance is that of the engine, whose requests are decoded together. Kinds of cycles are numbers of drafts.
    """

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.costs, self.limit = config.costs, config.limit  # drafts of the cycle in progress
        self.pace = ThroughputModel(config.limit, slots.sizes.slots, self.costs)
        self.sizes, self.kinds = self.pace.sizes, range(config.limit + 1)
        self._kept: Tensor | None = None  # [B] drafts of the cycle that stood

    def take(self, known: object) -> ThroughputModel:
        """Use the tables of an earlier length that had as many drafts."""
        if isinstance(known, ThroughputModel) and known.most == self.pace.most:
            self.pace = known
        return self.pace

    def plan(self, batch: int) -> None:
        """Set ``limit`` for the next cycle."""
        self.limit = self.pace.choose(batch) if self.forced is None else self.forced

    def note(self, batch: int, outcome: Outcome) -> None:
        """Keep how many drafts were accepted; the numbers are read from the device when the cycle is over.

        A row that had no more drafts (nothing was found for it) counts as one whose next draft was rejected.
        """
        self._kept = outcome.stood[:batch]

    def took(self, seconds: float) -> None:
        """Learn from the seconds and the accepted drafts of the cycle that has ended."""
        if self._kept is not None:
            self.pace.measured(len(self._kept), self.limit, seconds)
            self.pace.accepted(self._kept.tolist(), self.limit)
        self._kept = None

    def timed(self, seconds: Sequence[float]) -> None:
        """Learn from the seconds of the latest cycles; the fastest counts."""
        assert self._kept is not None
        self.pace.timed(len(self._kept), self.limit, min(seconds))

    def forget(self) -> None:
        """End the timing of cycles."""
        super().forget()
        self._kept = None


NONE, FREE = Costs(draft=1e9, verify=1e9), Costs(draft=0.0, verify=0.0)
ALONE, HEADED = Costs(draft=1e9, verify=0.0), Costs(draft=-1e-9, verify=0.0)
SOME = 4  # drafts of a row in cycles that are timed or tried: dozens are rare, and cost less each
# Drafts of a row that stand, before anything was drafted, and the cycles that this counts for.
PRIOR_STOOD, PRIOR_CYCLES = 1.0, 8.0


class RowCostLength(TimedLength):
    """A draft length by row: the drafter knows the value of each draft, and ``CycleSeconds`` its cost.

    Whether a cycle drafts at all depends on the mean of accepted drafts in cycles that did. The first draft costs more
    than those after it, and its value is not known before it is drawn. The choice that pays less is tried now and then,
    so that both stay known. The cost of that is bounded as in ``ThroughputModel``.

    Kinds of cycles are limits with costs. By these costs the head, if there is one, runs a pass for no draft or for
    each.
    """

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.costs, self.limit, self.most = config.costs, config.limit, config.limit
        self.seconds = CycleSeconds(slots.sizes.slots, self.costs)
        self.sizes, self.some = self.seconds.sizes, min(SOME, self.most)
        self.kinds = [(0, NONE), (1, ALONE), (self.some, ALONE), (self.some, HEADED)]
        # Of cycles that may draft, older ones fading: how many, their rows, drafts that stood, and their work by row.
        self.past = PRIOR_CYCLES * np.array([1.0, 1.0, PRIOR_STOOD, *Work(1.0, 1.0, PRIOR_STOOD, 1.0)])
        self.owed, self.idle = 0.0, 0  # seconds that a trial may lose, and cycles since the last one
        self._seen: tuple[int, Work, Tensor] | None = None  # rows, work and what stood in each row

    def before(self, kind: tuple[int, Costs]) -> int:
        """Return one cycle for the kind in which the head drafts: it reads the deferred entries there."""
        return int(kind[1] is HEADED)

    def take(self, known: object) -> CycleSeconds:
        """Use the numbers of an earlier length: work takes the same time with every drafter."""
        if isinstance(known, CycleSeconds) and known.sizes == self.sizes:
            self.seconds = known
        return self.seconds

    def plan(self, batch: int) -> None:
        """Set ``limit`` and ``costs`` for the next cycle."""
        if self.forced is not None:
            self.limit, self.costs = self.forced
            return
        pays, trial = self._choice(batch)
        if pays != trial:
            self.limit, self.costs = self.most, self.seconds.costs(batch)
        else:
            self.limit, self.costs = 0, NONE
        if trial and not pays:  # at those costs there might be nothing to learn from
            self.limit, self.costs = self.some, FREE

    def _choice(self, rows: int) -> tuple[bool, bool]:
        """Return whether drafting pays, and whether the next cycle tries the other choice.

        A trial has to be saved up for, as in ``ThroughputModel``.
        """
        tokens, taken, plain = self.expected(rows)
        pays = tokens * plain > taken
        loss = plain - taken / tokens if pays else taken - tokens * plain
        self.owed, self.idle = self.owed + TRIALS * (taken if pays else plain), self.idle + 1
        if loss > self.owed or self.idle < REST:
            return pays, False
        self.owed, self.idle = 0.0, 0
        return pays, True

    def expected(self, rows: int) -> tuple[float, float, float]:
        """Return a row's tokens in a cycle that may draft, and the seconds of such a cycle and of a plain one."""
        cycles, batches, stood, *work = self.past.tolist()
        _, drafted, drafts, passes = (one / cycles for one in work)
        each = self.seconds.each(rows)
        return 1 + stood / batches, float(each @ Work(1.0, drafted, drafts * rows, passes)), float(each[0])

    def note(self, batch: int, outcome: Outcome) -> None:
        """Keep the work of the cycle; the accepted drafts are read from the device when it is over."""
        drafts = outcome.drafts or 0
        self._seen = batch, Work(1.0, float(drafts > 0), drafts, outcome.forwards), outcome.stood[:batch]

    def took(self, seconds: float) -> None:
        """Learn from the seconds, the work and the accepted drafts of the cycle that has ended."""
        if self._seen is None:
            return
        rows, work, stood = self._seen
        self.seconds.measured(rows, work, seconds)
        if self.limit:
            new = [1.0, rows, float(stood.sum()), 1.0, work.drafted, work.drafts / rows, work.passes]
            self.past = FADE * self.past + np.array(new)
        self._seen = None

    def timed(self, seconds: Sequence[float]) -> None:
        """Learn from the seconds of the latest cycles; all of them count, each clipped at ``OUTLIER``."""
        assert self._seen is not None
        for one in seconds:
            self.seconds.measured(*self._seen[:2], one)

    def forget(self) -> None:
        """End the timing of cycles."""
        super().forget()
        self._seen = None
