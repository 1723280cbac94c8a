"""A draft temperature for each draft, chosen by the overlaps of earlier cycles: ``draft_temperature=auto``.

A draft that was drawn at temperature t is accepted with the overlap of p and q_t. After a cycle the head's logits and p
are known at every position that was reached, and so is the overlap at any temperature. The next draft is drawn at the
temperature with the largest mean so far, and verification gets that q. The choice is a function of past cycles alone,
so the output distribution stays the target's.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
from torch import Tensor

from bebop.rollout.decoding.base import Rows
from bebop.rollout.decoding.sampling import BatchSampling
from bebop.rollout.slots import Slots

GRID = (0.32, 0.4, 0.5, 0.6, 0.8, 1.1)  # times the target's: the overlap is flat around its peak, and closest by START
POSITIONS = 16  # of a chain that a state has room for, whatever is drafted now
# A request begins as if it had seen PRIOR overlaps that fall off by SLOPE a squared step on both sides of START. A
# score has to be seen before the difference of means between two temperatures stands out from that between tokens, more
# than a completion may have where it is small. So the start has to do for every head, next to its peak or not: heads
# trained on cross-entropy draft best near .4 and lose much at 1, those trained on the overlap itself near .6. Grid,
# start and slope were chosen on one seed's heads (start, hard_ce, ce, e2e_tv, rkl), among fifteen variants.
START, PRIOR, SLOPE = 2, 24.0, 0.002
SHARED = 64.0  # overlaps that the mean of all positions counts for at each: later positions are reached less often
DECAY = 0.99  # weight of an overlap over that of the one after it
# One position of a cycle is measured, each in its turn: after the first cycles of a request, and after one in so many.
ALWAYS, EVERY = 8, 8
CHUNK = 2**17  # numbers that are worked on at a time: they stay in a core's cache


def measured(cycles: int, drafts: int) -> int | None:
    """Return the position whose overlap is measured in the cycle after ``cycles`` earlier ones; None: no position.

    It depends on that number alone. Which positions are reached says how well drafts went, and a choice by that would
    see poor contexts too often.
    """
    if cycles < ALWAYS:
        return cycles % drafts
    turn, rest = divmod(cycles - ALWAYS, EVERY)
    return None if rest else (ALWAYS + turn) % drafts


def overlaps(p: Tensor, logits: Tensor, temperatures: Tensor) -> Tensor:
    """Return the overlaps [n, G] of distributions p [n, V] with softmax(logits / t) of logits [n, V].

    ``temperatures`` t > 0 are [n, G]. The pass goes over blocks of a row and a few temperatures, or of a few rows, so
    that no tensor of size [n, G, V] is made.
    """
    (count, vocabulary), grid = logits.shape, temperatures.shape[1]
    pairs = max(1, CHUNK // vocabulary)
    found = torch.empty(count, grid, device=logits.device)
    for first in range(0, count, size := max(1, pairs // grid)):
        rows = slice(first, first + size)
        below = logits[rows].float()
        below = (below - below.amax(-1, keepdim=True))[:, None]
        for start in range(0, grid, pairs):
            part = slice(start, start + pairs)
            q = (below / temperatures[rows, part, None]).exp_()
            q /= q.sum(-1, keepdim=True)
            found[rows, part] = torch.minimum(q, p[rows, None], out=q).sum(-1)
    return found


@dataclass(slots=True)
class Drawn:
    """Draft logits of a cycle, kept until it is known which drafts were tested."""

    logits: list[Tensor] = field(default_factory=list)  # K of [B, V]
    seen: list[Tensor] = field(default_factory=list)  # K of [B, V], what penalties saw; empty without them
    lengths: Tensor | None = None  # [B] drafts that count; None: all K
    limit: int = 0  # drafts that a row can have, whatever the rows beside it draft; 0: K

    def add(self, logits: Tensor, seen: Tensor | None) -> None:
        """Keep the logits and penalty marks of the next draft."""
        self.logits.append(logits)
        if seen is not None:
            self.seen.append(seen)


@lru_cache
def _prior(device: torch.device) -> Tensor:
    """Return the sums [G + 1] that a request begins with."""
    fall = [-SLOPE * (place - START) ** 2 for place in range(len(GRID))]
    return torch.tensor([PRIOR * one for one in (*fall, 1.0)], dtype=torch.float64, device=device)


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Decayed sums [B, K, G + 1] of overlaps by position and temperature of the grid; the last column counts them."""

    kept: Tensor

    @classmethod
    def fresh(cls, positions: int) -> Tensor:
        """Return the sums [K, G + 1] of a request without any measurement."""
        return torch.zeros(positions, len(GRID) + 1, dtype=torch.float64)

    def best(self) -> Tensor:
        """Return the index [B, K] in the grid of the temperature to draft at."""
        kept = self.kept
        pooled = kept.sum(1, keepdim=True) + _prior(kept.device)
        return (kept[..., :-1] + SHARED * pooled[..., :-1] / pooled[..., -1:]).argmax(-1)

    def after(self, overlaps: Tensor, reached: Tensor) -> Tensor:
        """Return the sums after one more cycle: overlaps [B, K, G] count where ``reached`` [B, K]."""
        seen = torch.cat([overlaps.to(self.kept), torch.ones_like(self.kept[..., :1])], -1)
        return torch.where(reached[..., None], DECAY * self.kept + seen, self.kept)


class DraftTemperature:
    """The draft temperatures of each request, learned from its own cycles alone."""

    def __init__(self, slots: Slots) -> None:
        fresh = Overlaps.fresh(POSITIONS)
        self.kept = slots.register_column("temperature/overlaps", fresh)  # [S, POSITIONS, G + 1]
        self.cycles = slots.register_column("temperature/cycles", torch.tensor(0))  # [S]
        self.grid = torch.tensor(GRID, device=slots.device)
        # [S, POSITIONS] what follows from the overlaps, times the target's temperature
        factors = self.grid[Overlaps(fresh[None]).best()[0].to(slots.device)]
        self.factors = slots.register_column("temperature/factors", factors)

    def choose(self, rows: Rows, drafts: int) -> Tensor:
        """Return the temperatures [B, K] of the next drafts; a row that samples greedily drafts greedily."""
        factors, own = self.factors[: rows.batch, :drafts], rows.sampling.temperature
        return factors if own is None else factors * own[:, None]

    def observe(self, rows: Rows, drawn: Drawn, p: Tensor, emitted: Tensor) -> None:
        """Learn from a cycle with the target's distributions p [B, K + 1, V] and ``emitted`` [B] tokens.

        A position counts if its draft was tested: it was reached, and is not beyond the end of the completion.
        """
        cycles, own = self.cycles[: rows.batch].tolist(), rows.sampling.temperature
        self.cycles[: rows.batch] += 1
        if not drawn.logits:
            return
        drafts = drawn.limit or len(drawn.logits)
        places = [(row, place) for row, c in enumerate(cycles) if (place := measured(c, drafts)) is not None]
        if not places:
            return
        tested = emitted if drawn.lengths is None else torch.minimum(emitted, drawn.lengths)
        if own is not None:  # greedy drafts are the same at every temperature
            tested = torch.where(own > 0, tested, 0)
        known = tested.tolist()
        for place in {place for _, place in places}:
            if chosen := [row for row, turn in places if turn == place and place < known[row]]:
                self._learn(rows, torch.tensor(chosen, device=p.device), place, drawn, p)

    def _learn(self, rows: Rows, chosen: Tensor, place: int, drawn: Drawn, p: Tensor) -> None:
        """Learn from the drafts at one position of the rows ``chosen`` [b]."""
        seen = drawn.seen[place][chosen] if drawn.seen else None
        found = _overlaps(rows.sampling.of(chosen), p[chosen, place], drawn.logits[place][chosen], seen, self.grid)
        kept, one = self.kept[chosen], slice(place, place + 1)
        reached = torch.ones(len(chosen), 1, dtype=torch.bool, device=p.device)
        kept[:, one] = Overlaps(kept[:, one]).after(found[:, None], reached)
        self.kept[chosen], self.factors[chosen] = kept, self.grid[Overlaps(kept).best()]


def _overlaps(sampling: BatchSampling, p: Tensor, logits: Tensor, seen: Tensor | None, grid: Tensor) -> Tensor:
    """Return the overlaps [b, G] of distributions p [b, V] with those of logits [b, V] at each temperature of the grid.

    ``seen`` [b, V] marks the tokens that penalties apply to.
    """
    own = torch.ones(len(p), device=p.device) if sampling.temperature is None else sampling.temperature
    logits = sampling.penalised(logits[:, None], None if seen is None else seen[:, None])[:, 0]
    if not sampling.truncates:
        return overlaps(p, logits, own[:, None] * grid)
    found = []
    for factor in grid:
        q = replace(sampling, temperature=factor * own, penalty=None).probs(logits[:, None])[:, 0]
        found.append(torch.minimum(p, q).sum(-1))
    return torch.stack(found, -1)
