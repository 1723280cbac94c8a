"""A draft temperature for each draft, chosen from what would have been accepted before: ``draft_temperature=auto``.

A draft that was drawn at temperature t is accepted with the overlap of p and q_t. After a cycle the head's logits and p
are known at every position that was reached, and with them the overlap at any temperature. The next draft is drawn at
the temperature of the largest mean so far, and that q is what verification gets: the choice is a function of past
cycles alone, so the output distribution stays the target's.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bebop.rollout.decoding.base import Rows
from bebop.rollout.slots import Slots

GRID = (0.32, 0.42, 0.56, 0.75, 1.0, 1.33)  # times the target's, a third apart: the overlap is flat around its peak
POSITIONS = 16  # of a chain that a state has room for, whatever is drafted now
# A request begins as if it had seen PRIOR overlaps that fall off by SLOPE a squared third on both sides of START. A
# score has to be seen before the difference of means between two temperatures stands out from that between tokens.
# Heads trained on cross-entropy draft best near .4 and lose much at 1, those trained on the overlap itself lose little
# anywhere (recipes/reproduce/beyond says how much).
START, PRIOR, SLOPE = 1, 24.0, 0.003
SHARED = 64.0  # overlaps that the mean of all positions counts for at each: later positions are reached less often
DECAY = 0.99  # weight of an overlap over that of the one after it
ALWAYS, EVERY = 8, 8  # measured are the first cycles of a request, and one in so many after that


@dataclass(slots=True)
class Drawn:
    """What the drafts of a cycle were drawn from, kept until it is known which of them were tested."""

    logits: list[Tensor] = field(default_factory=list)  # K of [B, V]
    seen: list[Tensor] = field(default_factory=list)  # K of [B, V], what penalties saw; empty without them
    lengths: Tensor | None = None  # [B] drafts that count; None: all K

    def add(self, logits: Tensor, seen: Tensor | None) -> None:
        """Take in the next draft."""
        self.logits.append(logits)
        if seen is not None:
            self.seen.append(seen)

    def of(self, rows: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits, and what penalties saw, of some rows [b] -> [b, K, V]."""
        logits, seen = ([each[rows] for each in steps] for steps in (self.logits, self.seen))
        return torch.stack(logits, 1), torch.stack(seen, 1) if seen else None


@dataclass(frozen=True, slots=True)
class Overlaps:
    """Decayed sums [B, K, G + 1] by position and temperature of the grid, and in the last column their number."""

    kept: Tensor

    @classmethod
    def fresh(cls, positions: int) -> Tensor:
        """Of a request that has seen nothing [K, G + 1]."""
        return torch.zeros(positions, len(GRID) + 1, dtype=torch.float64)

    def best(self) -> Tensor:
        """Index [B, K] in the grid of the temperature to draft at."""
        kept, grid = self.kept, torch.arange(len(GRID), dtype=torch.float64, device=self.kept.device)
        prior = PRIOR * torch.cat([-SLOPE * (grid - START) ** 2, torch.ones_like(grid[:1])])
        pooled = kept.sum(1, keepdim=True) + prior
        return (kept[..., :-1] + SHARED * pooled[..., :-1] / pooled[..., -1:]).argmax(-1)

    def after(self, overlaps: Tensor, reached: Tensor) -> Tensor:
        """The sums with one more cycle: overlaps [B, K, G], counted where ``reached`` [B, K]."""
        seen = torch.cat([overlaps.to(self.kept), torch.ones_like(self.kept[..., :1])], -1)
        return torch.where(reached[..., None], DECAY * self.kept + seen, self.kept)


def due(cycles: Tensor) -> Tensor:
    """Which requests [B] measure the cycle that comes after so many [B]."""
    return (cycles < ALWAYS) | (cycles % EVERY == 0)


class DraftTemperature:
    """The temperatures of the drafts of each request, learned from its own cycles: nobody beside it matters."""

    def __init__(self, slots: Slots) -> None:
        self.kept = slots.add("temperature/overlaps", Overlaps.fresh(POSITIONS))  # [S, POSITIONS, G + 1]
        self.cycles = slots.add("temperature/cycles", torch.tensor(0))  # [S]

    def choose(self, rows: Rows, drafts: int) -> Tensor:
        """Temperatures [B, K] of the next drafts; a row that samples greedily drafts so."""
        best = Overlaps(self.kept[: rows.batch, :drafts]).best()
        own = rows.sampling.temperature
        factors = torch.tensor(GRID, device=best.device)[best]
        return factors if own is None else factors * own[:, None]

    def observe(self, rows: Rows, drawn: Drawn, p: Tensor, emitted: Tensor) -> None:
        """Learn from a cycle of target's distributions p [B, K + 1, V] and ``emitted`` [B] tokens.

        A position counts if its draft was tested: it was reached, and is not beyond the end of the answer.
        """
        count = self.cycles[: rows.batch]
        chosen = due(count).nonzero()[:, 0]
        count += 1
        drafts = len(drawn.logits)
        if not len(chosen) or not drafts:
            return
        tested = emitted if drawn.lengths is None else torch.minimum(emitted, drawn.lengths)
        reached = torch.arange(drafts, device=emitted.device) < tested[chosen, None]
        logits, seen = drawn.of(chosen)
        target, sampling = p[chosen, :drafts], rows.sampling.of(chosen)
        own = torch.ones(len(chosen), device=p.device) if sampling.temperature is None else sampling.temperature
        overlaps = [
            torch.minimum(target, replace(sampling, temperature=factor * own).probs(logits, seen)).sum(-1)
            for factor in GRID
        ]
        self.kept[chosen, :drafts] = Overlaps(self.kept[chosen, :drafts]).after(torch.stack(overlaps, -1), reached)
