"""How contexts are read into neighbouring slots: in passes of a bounded size, with little padding.

- A pass computes at most ``tokens`` positions, padding included, and at most ``tokens`` ** 2 scores of each attention
  head. So its memory is bounded however many and however long the contexts are.
- What fits one pass is one pass, whatever its padding: few tokens are read fastest so.
- Of more, neighbours of like lengths share a pass, and a context that is too long for one is read in pieces. Each
  piece sees the entries of those before it, so that the result is that of one pass, up to rounding.

Rows within a pass stay side by side. Laid end to end they would need no padding, but every drafter would have to read
them so; sorted by length (``arrange``) they are padded by a few per cent.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

# What one more pass costs, in tokens: calls on a CPU, launches and a read of all weights on a GPU.
PASS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass over neighbouring contexts: entries ``starts[i]`` to ``ends[i]`` - 1 of context ``first`` + i."""

    first: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    @property
    def computed(self) -> int:
        """Return the positions that it computes, padding included."""
        return len(self.starts) * max(end - start for start, end in zip(self.starts, self.ends, strict=True))

    def fits(self, tokens: int) -> bool:
        """Return whether it is within the bounds of a pass of at most ``tokens`` tokens."""
        return self.computed <= tokens and self.computed * max(self.ends) <= tokens**2

    @classmethod
    def over(cls, first: int, end: int, starts: Sequence[int], ends: Sequence[int]) -> Self:
        """Return the whole pass over contexts ``first`` to ``end`` - 1."""
        return cls(first=first, starts=tuple(starts[first:end]), ends=tuple(ends[first:end]))


def passes(starts: Sequence[int], ends: Sequence[int], tokens: int) -> list[Pass]:
    """Return the passes that read contexts with least positions in all, those of a context in order.

    Args:
        starts: [n] entries of each context that are in the cache already.
        ends: [n] entries that are to be in the cache.
        tokens: of a pass at most, padding included.
    """
    count = len(starts)
    if not count:
        return []
    everything = Pass.over(0, count, starts, ends)
    if everything.fits(tokens):
        return [everything]
    # best[i]: what the first i contexts cost; last[i]: the passes over the last of them. As in ``row_groups``.
    best, last = [0.0], list[list[Pass]]()
    for end in range(1, count + 1):
        own = _pieces(end - 1, starts[end - 1], ends[end - 1], tokens)
        least, cut = best[end - 1] + sum(PASS + one.computed for one in own), end - 1
        width = most = 0
        for first in range(end - 1, -1, -1):
            width, most = max(width, ends[first] - starts[first]), max(most, ends[first])
            size = (end - first) * width
            if size > tokens or size * most > tokens**2:
                break  # with more contexts it is larger still
            if (cost := best[first] + PASS + size) < least:
                least, cut = cost, first
        best.append(least)
        last.append(own if cut == end - 1 else [Pass.over(cut, end, starts, ends)])
    parts: list[list[Pass]] = []
    while count:
        parts.append(last[count - 1])
        count = parts[-1][0].first
    return [one for part in reversed(parts) for one in part]


def arrange(contexts: Sequence[Sequence[Hashable]], held: Sequence[int], tokens: int) -> list[int]:
    """Return the order in which contexts are read with least padding.

    Those that go on from ``held`` [n] entries come first, as they read a few tokens each. Equal ones are neighbours, so
    that one is read for all of them. Beyond that they keep their order, unless it takes several passes of ``tokens``
    tokens: then they go by the entries that are to be computed.
    """
    first: dict[tuple[Hashable, ...], int] = {}
    same = [first.setdefault(tuple(context), place) for place, context in enumerate(contexts)]
    work = [len(context) - there for context, there in zip(contexts, held, strict=True)]
    fresh = [there == 0 for there in held]
    several = {}
    for kind in (False, True):
        group = [i for i, own in enumerate(fresh) if own is kind]
        several[kind] = len({same[i] for i in group}) * max((work[i] for i in group), default=0) > tokens
    return sorted(range(len(contexts)), key=lambda i: (fresh[i], work[i] if several[fresh[i]] else 0, same[i]))


def _pieces(place: int, start: int, end: int, tokens: int) -> list[Pass]:
    """Return the passes over one context, each as long as the bounds allow."""
    found = [Pass(first=place, starts=(start,), ends=(end,))]
    while found[-1].computed > 1 and not found[-1].fits(tokens):
        # With c <= tokens and c (start + tokens) <= tokens ** 2 both bounds hold.
        size = min(end - start - 1, tokens, max(1, tokens**2 // (start + tokens)))
        found[-1:] = [
            Pass(first=place, starts=(start,), ends=(start + size,)),
            Pass(first=place, starts=(start + size,), ends=(end,)),
        ]
        start += size
    return found
