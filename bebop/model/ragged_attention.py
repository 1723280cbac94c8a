"""Rows of unequal lengths laid end to end, and their attention over a cache with a slot a row: in groups of neighbours.

A call takes rows side by side, padded to the longest of them, and reads the same number of entries of each row: that of
the row with the most. Slots of neighbours lie side by side, so that a group's keys and values are a view. Where rows
differ, several calls over less data are faster. The grouping follows from sizes, not from a measurement at start-up, so
that a job that resumes elsewhere rounds as before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

CALL = 2**18  # multiplications of each thread in the time that one more call takes
READING = 1  # queries in the time that reading a row's keys and values takes
MAX_ROWS = 32  # of a group, so that the time to choose groups is linear in the rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """Places of N tokens of R rows among R padded rows of width W.

    Linear layers, and operations over the vocabulary, then waste nothing on padding. Only operations on whole rows pad:
    attention in groups, and operations of a cycle on all rows at once.
    """

    lengths: Tensor  # [R], summing to N
    places: Tensor  # [N] of R * W, row by row
    numbers: Tensor  # [R, W] of N; padding repeats its row's first place, so its values are finite

    @classmethod
    def of(cls, lengths: Tensor, width: int) -> Self:
        """Build it from ``lengths`` [R]: 1 to ``width`` each."""
        columns = torch.arange(width, device=lengths.device)
        real = columns < lengths[:, None]  # [R, W]
        starts = (lengths.cumsum(0) - lengths)[:, None]
        places, numbers = real.reshape(-1).nonzero()[:, 0], torch.where(real, starts + columns, starts)
        return cls(lengths=lengths, places=places, numbers=numbers)

    @property
    def rows(self) -> Tensor:
        """Return the row of each place [N]."""
        return self.places // self.numbers.shape[1]

    def packed(self, values: Tensor) -> Tensor:
        """Lay values [R, W, ...] end to end [1, N, ...]."""
        return values.flatten(0, 1).index_select(0, self.places)[None]

    def padded(self, values: Tensor) -> Tensor:
        """Lay values [1, N, ...] side by side [R, W, ...]."""
        return values[0].index_select(0, self.numbers.flatten()).unflatten(0, self.numbers.shape)


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows ``first`` to ``end`` - 1, which attend in one call."""

    first: int
    end: int
    width: int  # queries of each, padded
    used: int  # entries of each that are read

    @property
    def rows(self) -> slice:
        """Return the slice of rows, also for tensors with one entry per row."""
        return slice(self.first, self.end)


def row_groups(widths: Sequence[int], used: Sequence[int], work: int, threads: int = 1) -> list[RowGroup]:
    """Return the groups of neighbours with the least total cost.

    Args:
        widths: [R] queries of each row.
        used: [R] entries that the last query of each row sees.
        work: multiplications of a query and an entry.
    """
    call, best, cuts = CALL * threads / work, [0.0], []
    for end in range(1, len(widths) + 1):
        least, cut, width, most = float("inf"), 0, 0, 0
        for first in range(end - 1, max(end - MAX_ROWS, 0) - 1, -1):
            if widths[first] > width:
                width = widths[first]
            if used[first] > most:
                most = used[first]
            cost = best[first] + (end - first) * (width + READING) * most
            if cost < least:
                least, cut = cost, first
        best.append(least + call)
        cuts.append(cut)
    edges = [len(widths)]
    while edges[-1]:
        edges.append(cuts[edges[-1] - 1])
    return [RowGroup(a, b, max(widths[a:b]), max(used[a:b])) for a, b in pairwise(edges[::-1])]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """Tensors and shapes that the calls of a group share over all layers."""

    shape: tuple[int, int, int, int]  # of its queries: rows, Hkv, queries of each, D
    bias: Tensor  # [rows, 1, queries of each, P]
    keys: Sequence[Tensor]  # of each layer [rows, Hkv, P, D]
    values: Sequence[Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedAttention:
    """A pass over R rows with N places in all.

    The queries of a place that share keys and values are neighbours, and count as several queries of one head. So keys
    and values are read once, without a copy.
    """

    calls: Sequence[_Call]
    keys: Sequence[Tensor]  # of each layer [S * Hkv * C, D], to write into
    values: Sequence[Tensor]
    written: Tensor  # [N * Hkv] rows of ``keys`` and ``values`` for each place
    queries: Tensor  # indices of the calls' queries among N * (H + Hkv) heads, one call after another
    back: Tensor  # [N * H] indices of each place's heads in the outputs of the calls

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, entries: Tensor, used: int, ragged: Ragged, heads: int) -> Self:
        """Plan a pass over a cache's keys and values [layers, S, Hkv, C, D].

        The first R slots write ``entries`` [R, W]. ``heads``: number of query heads; ``used``: number of entries that
        are read. Only on a CPU are rows grouped by the entries that they need. Elsewhere all rows are one group, since
        reading lengths would wait for the device.
        """
        kv_heads, size = keys.shape[2], keys.shape[4]
        share, groups = heads // kv_heads, [RowGroup(0, len(entries), entries.shape[1], used)]
        if entries.device.type == "cpu":
            ends = entries[:, 0] + ragged.lengths
            work = 2 * heads * size
            groups = row_groups(ragged.lengths.tolist(), ends.tolist(), work, torch.get_num_threads())
        bias = _bias(entries, max(group.used for group in groups), share, keys.dtype)
        asked = _asked(ragged.numbers, heads, kv_heads)
        calls = [
            _Call(
                shape=(group.end - group.first, kv_heads, share * group.width, size),
                bias=bias[group.rows, :, : share * group.width, : group.used],
                keys=keys[:, group.rows, :, : group.used].unbind(0),
                values=values[:, group.rows, :, : group.used].unbind(0),
            )
            for group in groups
        ]
        return cls(
            calls=calls,
            keys=keys.flatten(1, 3).unbind(0),
            values=values.flatten(1, 3).unbind(0),
            written=_written(ragged, entries, kv_heads, keys.shape[3]),
            queries=_joined(asked[group.rows, :, : share * group.width].flatten() for group in groups),
            back=_back(groups, ragged, heads, kv_heads),
        )

    def __call__(self, layer: int, turned: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Write and attend in a layer: queries and keys ``turned`` [N, H + Hkv, D], values [N, Hkv, D] -> [N, H, D]."""
        places, kv_heads, size = value.shape
        key = turned[:, turned.shape[1] - kv_heads :]
        self.keys[layer].index_copy_(0, self.written, key.reshape(-1, size))
        self.values[layer].index_copy_(0, self.written, value.reshape(-1, size))
        queries = turned.reshape(-1, size).index_select(0, self.queries)
        parts, start = [], 0
        for call in self.calls:
            end = start + call.shape[0] * call.shape[1] * call.shape[2]
            q = queries[start:end].view(call.shape)
            out = scaled_dot_product_attention(q, call.keys[layer], call.values[layer], call.bias, scale=scaling)
            parts.append(out.transpose(1, 2).reshape(-1, size))
            start = end
        return _joined(parts).index_select(0, self.back).view(places, -1, size)


def _bias(entries: Tensor, used: int, share: int, dtype: torch.dtype) -> Tensor:
    """Return the addend of scores [R, 1, W * share, P]: each of ``share`` queries sees the entries up to its place."""
    zero = torch.zeros((), dtype=dtype, device=entries.device)
    seen = torch.arange(used, device=entries.device) <= entries[..., None]  # [R, W, P]
    bias = torch.where(seen, zero, zero - float("inf"))[:, :, None]
    return bias.expand(-1, -1, share, -1).flatten(1, 2)[:, None]


def _written(ragged: Ragged, entries: Tensor, kv_heads: int, room: int) -> Tensor:
    """Return the entries [S * Hkv * C] of a layer where each place's keys and values go: [N * Hkv]."""
    slots = (ragged.rows * kv_heads)[:, None] + torch.arange(kv_heads, device=entries.device)
    return (slots * room + entries.flatten()[ragged.places][:, None]).flatten()


def _asked(numbers: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Return which of N * (H + Hkv) heads are queries of the same keys and values, place by place.

    The result is [R, Hkv, W * share].
    """
    own = torch.arange(heads, device=numbers.device).view(kv_heads, 1, -1)
    return (numbers[:, None, :, None] * (heads + kv_heads) + own).flatten(2)


def _back(groups: Sequence[RowGroup], ragged: Ragged, heads: int, kv_heads: int) -> Tensor:
    """Return the index [N * H] of each place's heads in the outputs of the groups, each [rows, width, share, Hkv]."""
    starts, offset, device = [], 0, ragged.places.device
    for group in groups:
        size, count = group.width * heads, group.end - group.first
        starts.append(torch.arange(count, device=device) * size + offset)
        offset += count * size
    columns = ragged.places % ragged.numbers.shape[1]
    own = torch.arange(heads, device=device).view(-1, kv_heads).T  # [Hkv, share]
    return ((_joined(starts)[ragged.rows] + columns * heads)[:, None] + own.flatten()).flatten()


def _joined(parts: Iterable[Tensor]) -> Tensor:
    """Join tensors one after another; a single one is not copied."""
    several = list(parts)
    return several[0] if len(several) == 1 else torch.cat(several)
