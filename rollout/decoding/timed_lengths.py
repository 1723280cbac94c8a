"""Draft lengths that go by the time of cycles: ``draft_tokens=auto``."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from bebop.config.job import Costs, DecodingConfig
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Accepted, Draft, DraftLength, Rows, TargetOutput
from bebop.rollout.decoding.throughput_model import FADE, REST, TRIALS, CycleSeconds, ThroughputModel, Work
from bebop.rollout.slots import Slots


class TimedLength(DraftLength, ABC):
    """It looks at what earlier cycles took and had accepted, so the output distribution is the target's; but drafts
    depend on measured time, so tokens are not a function of seeds: a job that is run again, or resumed, has other
    completions.
    """

    sizes: Sequence[int]  # batch sizes whose cycles are timed before the first request
    kinds: Sequence[Any]  # of cycles, that are timed at each size
    forced: Any = None  # the kind of cycles to come, whatever pays

    def before(self, kind: Any) -> int:
        """Return cycles of the kind to run before the one that is timed, so that it is like those of a request."""
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
        """End the timing of cycles; their drafts do not count."""
        self.forced = None


class CostLength(TimedLength):
    """The same K for all rows of a cycle, from 0 on, by ``ThroughputModel``.

    Acceptance is that of the engine, whose requests are decoded together. Kinds of cycles are numbers of drafts.
    """

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.costs, self.limit = config.costs, config.limit  # drafts of the cycle in progress
        self.pace = ThroughputModel(config.limit, slots.sizes.slots, self.costs)
        self.sizes, self.kinds = self.pace.sizes, range(config.limit + 1)
        self._kept: Tensor | None = None  # [B] drafts of the cycle that stood

    def take(self, known: object) -> ThroughputModel:
        """Go on with the tables of an earlier length that had as many drafts."""
        if isinstance(known, ThroughputModel) and known.most == self.pace.most:
            self.pace = known
        return self.pace

    def start(self, rows: Rows) -> Tensor | None:
        """Set ``limit`` for the cycle."""
        self.limit = self.pace.choose(rows.batch) if self.forced is None else self.forced
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

    def timed(self, seconds: Sequence[float]) -> None:
        """Learn what the latest cycles took; the fastest counts."""
        assert self._kept is not None
        self.pace.timed(len(self._kept), self.limit, min(seconds))

    def forget(self) -> None:
        """End the timing of cycles."""
        super().forget()
        self._kept = None


NONE, FREE = Costs(draft=1e9, verify=1e9), Costs(draft=0.0, verify=0.0)
ALONE, HEADED = Costs(draft=1e9, verify=0.0), Costs(draft=-1e-9, verify=0.0)
SOME = 4  # drafts of a row in cycles that are timed or tried: dozens are rare, and cost less each
START, WEIGHT = 1.0, 8.0  # drafts of a row that stand, before anything was drafted, and cycles that this counts for


class RowCostLength(TimedLength):
    """The drafter knows what each draft is worth, and this what it costs beside so many rows (``CycleSeconds``).

    Whether a cycle drafts at all goes by what those that did had accepted on average, since the first draft costs more
    than the ones after it and what it is worth is not known before it was drawn. What pays less is tried now and then,
    so that both stay known, at a cost that is bounded as in ``ThroughputModel``.

    Kinds of cycles are limits with costs at which the head, if there is one, has a pass for no draft or for each.
    """

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        self.costs, self.limit, self.most = config.costs, config.limit, config.limit
        self.seconds = CycleSeconds(slots.sizes.slots, self.costs)
        self.sizes, self.some = self.seconds.sizes, min(SOME, self.most)
        self.kinds = [(0, NONE), (1, ALONE), (self.some, ALONE), (self.some, HEADED)]
        # Of cycles that may draft, older ones fading: how many, their rows, drafts that stood, and their work by row.
        self.past = WEIGHT * np.array([1.0, 1.0, START, *Work(1.0, 1.0, START, 1.0)])
        self.owed, self.idle = 0.0, 0  # seconds that a trial may lose, and cycles since the last one
        self._seen: tuple[int, Work, Tensor] | None = None  # rows, work and what stood in each row

    def before(self, kind: tuple[int, Costs]) -> int:
        """Return one cycle for the kind in which the head drafts: it reads the deferred entries there."""
        return int(kind[1] is HEADED)

    def take(self, known: object) -> CycleSeconds:
        """Go on with what an earlier length learned: work takes the same time whoever drafts."""
        if isinstance(known, CycleSeconds) and known.sizes == self.sizes:
            self.seconds = known
        return self.seconds

    def start(self, rows: Rows) -> Tensor | None:
        """Set ``limit`` and ``costs`` for the cycle."""
        if self.forced is not None:
            self.limit, self.costs = self.forced
            return None
        pays, trial = self._choice(rows.batch)
        if pays != trial:
            self.limit, self.costs = self.most, self.seconds.costs(rows.batch)
        else:
            self.limit, self.costs = 0, NONE
        if trial and not pays:  # at those costs there might be nothing to learn from
            self.limit, self.costs = self.some, FREE
        return None

    def _choice(self, rows: int) -> tuple[bool, bool]:
        """Return whether drafting pays, and whether the next cycle tries the other, which has earned what that
        loses."""
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

    def observe(self, rows: Rows, draft: Draft, out: TargetOutput, accepted: Accepted) -> None:
        """Note what there was in the cycle; numbers are asked of the device when it is over."""
        drafts = draft.total or 0
        self._seen = rows.batch, Work(1.0, float(drafts > 0), drafts, draft.forwards), accepted.lengths

    def took(self, seconds: float) -> None:
        """Learn from the cycle that has ended."""
        if self._seen is None:
            return
        rows, work, stood = self._seen
        self.seconds.measured(rows, work, seconds)
        if self.limit:
            new = [1.0, rows, float(stood.sum()), 1.0, work.drafted, work.drafts / rows, work.passes]
            self.past = FADE * self.past + np.array(new)
        self._seen = None

    def timed(self, seconds: Sequence[float]) -> None:
        """Learn what the latest cycles took; all of them count, none as more than an outlier may."""
        assert self._seen is not None
        for one in seconds:
            self.seconds.measured(*self._seen[:2], one)

    def forget(self) -> None:
        """End the timing of cycles."""
        super().forget()
        self._seen = None
