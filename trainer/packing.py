"""Rows (prompt + completion) laid end to end into micro-batches, without padding, balanced over ranks.

Alignment: the hidden state at index t predicts the token at t + 1. So the loss gets its inputs once per *completion
token*, gathered. ``predictors`` are the tokens whose hidden states go through the language-model head, ``targets`` the
tokens that they predict. Tokens of the prompt, and text that was read between turns, are only context. Nothing crosses
from one row into the next.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.trainer.chains import KnownRow
from bebop.trajectory import NONE, Completion, aligned


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One prompt with one of its completions, ready to be packed."""

    prompt: tuple[int, ...]  # [P], P >= 1: the first completion token has to be predicted from something
    completion: Completion  # [T], of all turns
    advantage: float
    weight: float  # of each of its completion tokens in the loss; see bebop.trainer.losses.AGGREGATIONS

    @property
    def length(self) -> int:
        """Return the number of tokens of prompt and completion."""
        return len(self.prompt) + len(self.completion.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """One micro-batch: N tokens of R rows, A of them completion tokens.

    Prompt (7, 8) with completion (9, 1), then prompt (5,) with completion (6,): token_ids 7 8 9 1 5 6,
    positions 0 1 2 3 0 1, lengths 4 2, predictors 1 2 4, targets 9 1 6, answers 2 1.
    """

    rows: Tensor  # [R] number of each row in the input of ``pack``, which sorts; -1 for a filler row
    token_ids: Tensor  # [N]
    positions: Tensor  # [N], from 0 in each row
    lengths: Tensor  # [R], summing to N
    predictors: Tensor  # [A] index into N of the token whose hidden state predicts the completion token
    targets: Tensor  # [A] the completion tokens
    rollout_logprobs: Tensor  # [A] log-prob under the distribution that the token was drawn from
    target_logprobs: Tensor  # [A] log p under the engine's target, the same but for an inexact system
    versions: Tensor  # [A] weight version that produced the token
    contexts: Tensor  # [A] oldest weight version among the keys and values that it saw
    answers: Tensor  # [R] completion tokens of each row, summing to A
    advantages: Tensor  # [A]
    weights: Tensor  # [A] weight in the loss; over all micro-batches of all ranks they follow the aggregation
    # [N, R, k] experts of R routers that the engine chose, -1 where that is not known; None: none was recorded.
    routing: Tensor | None = None

    def known(self, hidden: Tensor) -> list[KnownRow]:
        """Return each row with its part of the hidden states [N, d]."""
        lengths = self.lengths.tolist()
        answer = torch.zeros_like(self.token_ids, dtype=torch.bool)
        answer[self.predictors + 1] = True
        parts = zip(self.token_ids.split(lengths), answer.split(lengths), hidden.split(lengths), strict=True)
        return [KnownRow(token_ids=ids, answer=own, hidden=states) for ids, own, states in parts]

    def to(self, device: torch.device, dtype: torch.dtype) -> "PackedRows":
        """Return a copy on a device, with floating-point fields as ``dtype``."""
        held = {name: getattr(self, name) for name in self.__slots__}
        moved = {name: own.to(device) for name, own in held.items() if own is not None}
        return PackedRows(**{k: t.to(dtype) if t.is_floating_point() else t for k, t in moved.items()})


def pack(rows: Sequence[Row], max_tokens: int, world: int = 1) -> list[PackedRows]:
    """Return rows packed into micro-batches of at most ``max_tokens`` tokens; a longer row gets one by itself.

    The number of micro-batches is a multiple of ``world`` and rank r takes ``[r::world]``: ranks that share a sharded
    model must run equally many passes. Rows of like length come together, as attention pads to the longest of a
    micro-batch. The result is deterministic.
    """
    if not rows:
        return []
    order = sorted(range(len(rows)), key=lambda i: -rows[i].length)  # stable: equal lengths stay in the order given
    lengths = [rows[i].length for i in order]
    count = len(_cuts(lengths, max_tokens)) - 1
    count = -(-count // world) * world
    cuts = _cuts(lengths, _level(lengths, max_tokens, count))
    packed = [_lay([rows[i] for i in order[a:b]], order[a:b]) for a, b in pairwise(cuts)]
    return packed + [_blank(rows[order[0]])] * (count - len(packed))


def _cuts(lengths: list[int], capacity: int) -> list[int]:
    """Return where consecutive rows are cut when each bin is filled up to ``capacity``: 0, ..., R."""
    cuts, filled = [0], 0
    for i, length in enumerate(lengths):
        if filled and filled + length > capacity:
            cuts.append(i)
            filled = 0
        filled += length
    return [*cuts, len(lengths)]


def _level(lengths: list[int], max_tokens: int, count: int) -> int:
    """Return the smallest capacity at which ``count`` bins are enough; it levels the bins, hence the ranks."""
    low, high = 1, max_tokens
    while low < high:
        middle = (low + high) // 2
        if len(_cuts(lengths, middle)) - 1 <= count:
            high = middle
        else:
            low = middle + 1
    return low


def _lay(rows: Sequence[Row], numbers: Sequence[int]) -> PackedRows:
    """Return rows laid end to end; ``numbers`` are their numbers in the input of ``pack``."""
    lengths = np.array([row.length for row in rows])
    completions = [row.completion for row in rows]
    written = [c.written for c in completions]
    answers = [int(own.sum()) for own in written]
    ends = lengths.cumsum()
    predictors = [end - 1 - len(own) + np.flatnonzero(own) for end, own in zip(ends, written, strict=True)]

    def joined(parts: Sequence[object], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(part) for part in parts])).to(dtype)

    def own(values: Callable[[Completion], NDArray[Any]], dtype: torch.dtype) -> Tensor:
        return joined([values(c)[mask] for c, mask in zip(completions, written, strict=True)], dtype)

    return PackedRows(
        rows=torch.tensor(numbers),
        token_ids=joined([[*row.prompt, *row.completion.token_ids] for row in rows], torch.int64),
        positions=joined([np.arange(length) for length in lengths], torch.int64),
        lengths=torch.from_numpy(lengths).to(torch.int64),
        predictors=joined(predictors, torch.int64),
        targets=own(lambda c: c.token_ids, torch.int64),
        rollout_logprobs=own(lambda c: c.drawn_logprobs, torch.float64),
        target_logprobs=own(lambda c: c.logprobs, torch.float64),
        versions=own(lambda c: c.versions, torch.int64),
        contexts=own(lambda c: c.oldest, torch.int64),
        answers=torch.tensor(answers),
        advantages=joined([np.repeat([row.advantage for row in rows], answers)], torch.float64),
        weights=joined([np.repeat([row.weight for row in rows], answers)], torch.float64),
        routing=_routing(rows),
    )


def _routing(rows: Sequence[Row]) -> Tensor | None:
    """Return the routing of all tokens of rows, or None if no row has any."""
    recorded = [row.completion.routing for row in rows]
    like = next((own for own in recorded if own is not None), None)
    if like is None:
        return None
    nothing = np.full((0, *like.shape[1:]), NONE, dtype=like.dtype)
    parts = [aligned(nothing if own is None else own, row.length) for own, row in zip(recorded, rows, strict=True)]
    return torch.from_numpy(np.concatenate(parts))


def _blank(row: Row) -> PackedRows:
    """Return a filler micro-batch for a rank without rows: one token of context, nothing to predict."""
    empty = np.zeros(0, dtype=np.int64)
    nothing = Completion(token_ids=empty, logprobs=empty.astype(np.float32), versions=empty)
    return _lay([Row(prompt=row.prompt[:1], completion=nothing, advantage=0.0, weight=0.0)], [-1])
