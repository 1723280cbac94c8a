"""Records of what the steps of vLLM did with drafts, left by instrumented model runners, and their sums by request.

The numbers of a step are copied to the host while the device computes on, and are read when they are needed.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bebop.kernels.stats import pair_stats
from bebop.rollout.host_copy import HostCopy
from bebop.trajectory import MEASURED, DecodeStats

SLICE = 1 << 26  # elements of one distribution that are measured at a time: 256 MB in fp32


@dataclass(slots=True, kw_only=True)
class Verified:
    """Verification of one request's drafts in a step."""

    drafted: int  # n >= 1
    accepted: int
    sampled: bool  # the drafts are draws, and their distributions took part
    weight: int = 0  # number of steps that the measured one stands for; 0: it was not measured
    measured: dict[str, list[float]] = field(default_factory=dict)  # name of MEASURED -> [n]


@dataclass(slots=True, kw_only=True)
class Rows:
    """Verified rows of a step, one for each of B requests, whose numbers may still be in flight.

    ``copy`` has ``drafted`` [B], ``accepted`` [B] and ``greedy`` [B]. If the step was measured it also has ``table``
    [4, N]: the values of ``MEASURED`` at each draft, request after request.
    """

    copy: HostCopy
    sampled: bool
    weight: int = 0
    gap: int = 0  # columns of the table behind each request's drafts that belong to no draft

    def verified(self) -> list[Verified]:
        """Wait for the numbers, and return the verification of each request's drafts.

        Greedy requests have no distributions, and no measures.
        """
        found = self.copy.get()
        drafted, accepted, greedy = (found[name].tolist() for name in ("drafted", "accepted", "greedy"))
        rows = [Verified(drafted=n, accepted=a, sampled=self.sampled) for n, a in zip(drafted, accepted, strict=True)]
        if not self.weight:
            return rows
        table = dict(zip(MEASURED, found["table"].tolist(), strict=True))
        at = 0
        for one, skip in zip(rows, greedy, strict=True):
            if not skip:
                one.weight = self.weight
                one.measured = {name: values[at : at + one.drafted] for name, values in table.items()}
            at += one.drafted + self.gap
        return rows


@dataclass(slots=True, kw_only=True)
class StepRecord:
    """Record of one step of vLLM, kept from its launch until its requests have ended."""

    number: int = -1  # of the launch, in this process
    names: Sequence[str] = ()  # of its requests in vLLM, by row
    parts: Sequence[Rows] = ()  # rows that were verified, in the order of ``names``
    _found: dict[str, Verified] | None = None

    def verified(self) -> dict[str, Verified]:
        """Return the verification of each request that had drafts, by name; the first call waits for it."""
        if self._found is None:
            rows = [one for part in self.parts for one in part.verified()]
            # Ranks that share the batch verify a part of it each: whose rows they are cannot be told here.
            rows = rows if len(rows) == len(self.names) else []
            self._found = {name: one for name, one in zip(self.names, rows, strict=False) if one.drafted}
            self.parts = ()
        return self._found


@dataclass(slots=True)
class Steps:
    """The steps of vLLM in this process. The tokens of a step come out at once or one step after its launch."""

    every: int = 0
    count: int = 0  # steps that could be measured
    launches: int = 0
    parts: list[Rows] = field(default_factory=list)  # of the step in progress
    # The step whose tokens came out. A server without reports never takes it, so records must not pile up.
    done: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=1))
    hooks: set[str] = field(default_factory=set)  # names of installed hooks

    def is_due(self) -> bool:
        """Count the step in progress; return whether it is to be measured."""
        if not self.every:
            return False
        self.count += 1
        return (self.count - 1) % self.every == 0

    def launch(self, names: Sequence[str]) -> StepRecord:
        """Close the step in progress, whose requests have these names, and return its record."""
        record = StepRecord(number=self.launches, names=tuple(names), parts=tuple(self.parts))
        self.launches += 1
        self.parts = []
        return record

    def take(self) -> StepRecord:
        """Remove and return the record of the step whose tokens came out last; an empty record if there is none."""
        return self.done.pop() if self.done else StepRecord()


STEPS = Steps()  # of this process


def table(count: int, vocabulary: int, pair: Callable[[slice], tuple[Tensor, Tensor]], *, from_logits: bool) -> Tensor:
    """Return the values of ``MEASURED`` [4, N] of ``count`` drafts.

    ``pair`` gives draft and target rows [n, V] of a slice. Slices bound the memory beyond what vLLM accounts for.
    """
    size = max(1, SLICE // vocabulary)
    found = []
    for begin in range(0, count, size):
        stats = pair_stats(*pair(slice(begin, begin + size)), from_logits=from_logits)
        found.append(torch.stack([getattr(stats, name) for name in MEASURED]))
    return torch.cat(found, 1) if found else torch.zeros(len(MEASURED), 0)


def one_hot(drafts: Tensor, target: Tensor) -> Tensor:
    """Return the one-hot distributions [n, V] of drafts [n]; a draft below 0 is a placeholder, and counts as 0."""
    return torch.zeros_like(target).scatter_(-1, drafts.long().clamp(0, target.shape[-1] - 1)[:, None], 1.0)


class StepCounts:
    """Sums over the steps of one request. Tokens beyond the end of the completion count nowhere."""

    def __init__(self, *, drafts: int, head: bool, prefill: bool = True, passes: int | None = None) -> None:
        """Start with empty sums.

        Args:
            drafts: per cycle, 0: plain decoding.
            head: whether a model drafts.
            prefill: whether the next token comes from a prefill.
            passes: of that model in a cycle; None: one for each draft.
        """
        self.drafts, self.prefill = drafts, prefill
        self.passes = (drafts if passes is None else passes) if head else 0
        self.sums = DecodeStats.with_drafts(drafts)

    def restarted(self) -> None:
        """Expect another token of a prefill, as keys and values are computed again."""
        self.prefill = True

    def add(self, tokens: int, verified: Verified | None) -> None:
        """Add a step that emitted ``tokens`` tokens; ``verified`` is None if it had no drafts."""
        if not tokens:
            return
        sums = self.sums
        sums.tokens += tokens
        if self.prefill and verified is None and self.drafts:
            sums.prefilled += tokens
            self.prefill = False
            return
        sums.cycles += 1
        sums.target_forwards += 1
        sums.draft_forwards += self.passes
        if verified is None:
            return
        kept = min(verified.accepted, tokens)
        reached = kept if kept == tokens else min(kept + 1, verified.drafted)
        sums.accepted[:kept] += 1
        sums.reached[:reached] += 1
        if verified.weight:
            sums.add_measured(verified.measured, reached, verified.weight)
