"""Inputs of a certificate: completions of an engine in the order of submission, and distributions they should follow.

A ``Block`` holds both for a cohort, position by position. Bets on a token are fair only if they use facts known
*before* it. All fields of a ``Block`` meet this, except the tokens themselves (``tokens``, ``cells``, ``reported``).
``columns`` returns the fields that do not depend on the reference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """The completion that an engine returned for one request, finished or not."""

    request: int  # place in the order of submission; 2i and 2i + 1 have the same prompt and seeds of their own
    prompt: tuple[int, ...]  # [P]
    token_ids: NDArray[np.int64]  # [T]
    logprobs: NDArray[np.float64] | None = None  # [T] as the engine reports them
    finish_reason: str = "stop"  # stop, length or abort
    seed: int | None = None
    stops: tuple[int, ...] = ()  # tokens that end a completion
    limit: int | None = None  # max_new_tokens
    cycles: tuple[int, ...] | None = None  # tokens emitted by each cycle, if the engine reports them
    versions: NDArray[np.int64] | None = None  # [T] weight versions, if the engine reports them
    accepted: tuple[int, int] | None = None  # drafts accepted, drafts tested, if the engine reports them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A cohort of completions under a reference: N positions, completion after completion in the order of submission.

    Distributions are fp64 over M columns, which are the whole vocabulary or a list of tokens (``ids``). A reference
    that knows only the likeliest tokens lists those of each row, with one more column for all other tokens.
    """

    tokens: Tensor  # [N] what was sampled
    cells: Tensor  # [N] its column
    probs: Tensor  # [N, M] the claimed distribution, fully processed
    logprobs: Tensor  # [N] log p of the token itself, even where its column is the one for all others
    request: Tensor  # [N] ``Answer.request`` of the completion
    position: Tensor  # [N] in the completion, from 0
    last: Tensor  # [N] the token before it
    stops: tuple[int, ...]
    ids: Tensor | None = None  # [N, M] the token of each column, -1 for all others; None: columns are ids
    before: Tensor | None = None  # [N, M] the claimed distribution of the position before, over the same columns
    raw: Tensor | None = None  # [N, M] softmax(logits) if the claim differs from it
    draft: Tensor | None = None  # [N, M] a guess at the distribution of drafts, as of an MTP head's first draft
    seen: Tensor | None = None  # [N, M] whether the token occurred in prompt or completion
    cycle: Tensor | None = None  # [N] place in its decoding cycle, from 0; -1: not known
    reported: Tensor | None = None  # [N] log-prob that the engine reported, nan: missing
    declared: Tensor | None = None  # [N] correct value of it: log p raw, at the temperature, or fully processed
    spread: Tensor | None = None  # [N] standard deviation of log p, nats, that the engine's precision explains
    near: Tensor | None = None  # [N] whether rounding decides which tokens a truncation keeps, and so log p
    twin: Tensor | None = None  # [N] token of an earlier completion after the very same context, -1: there is none

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> "Block":
        """Return positions ``start`` to ``stop``."""
        own = {name: getattr(self, name) for name in self.__slots__}
        cut: dict[str, Any] = {name: value[start:stop] for name, value in own.items() if isinstance(value, Tensor)}
        return replace(self, **cut)


def make_block(answers: Sequence[Answer], parts: Sequence[Mapping[str, Tensor | None]], vocabulary: int) -> Block:
    """Return the block of a cohort; ``parts`` holds the reference's fields in the order of the positions."""
    none = torch.zeros(0, dtype=torch.float64)
    rows: dict[str, Any] = {"probs": none.new_zeros(0, vocabulary), "cells": none.long(), "logprobs": none}
    for name in parts[0] if parts else ():
        there = [part[name] for part in parts]
        rows[name] = None if there[0] is None else torch.cat(there)  # type: ignore[arg-type]
    known: dict[str, Any] = columns(answers)
    stops = answers[0].stops if answers else ()
    return Block(**known, **rows, stops=stops, seen=seen(answers, rows.get("ids"), vocabulary))


def narrow(probs: Tensor, ids: Tensor) -> Tensor:
    """Return distributions [n, V] over the columns ``ids`` [n, M]; the last column takes the remaining mass."""
    own = probs.gather(1, ids[:, :-1])
    return torch.cat([own, (1 - own.sum(1, keepdim=True)).clamp_min(0)], 1)


def cells(ids: Tensor, tokens: Tensor) -> Tensor:
    """Return the column [N] of each token [N]: its own column, or else the last one."""
    own = ids == tokens[:, None]
    return torch.where(own.any(1), own.int().argmax(1), ids.shape[1] - 1)


# ---- fields of positions that do not depend on the reference


def columns(answers: Sequence[Answer]) -> dict[str, Tensor | None]:
    """Return the fields of a ``Block`` that do not depend on the reference, by name, each [N].

    They are ``tokens``, ``request``, ``position``, ``last``, ``cycle``, ``reported`` and ``twin``. The last three are
    None where no completion has them.
    """
    counts = torch.tensor([len(answer.token_ids) for answer in answers], dtype=torch.long)
    requests = torch.tensor([answer.request for answer in answers], dtype=torch.long)
    return {
        "tokens": _joined([answer.token_ids for answer in answers], np.int64),
        "request": requests.repeat_interleave(counts),
        "position": torch.cat([torch.zeros(0, dtype=torch.long), *(torch.arange(n) for n in counts.tolist())]),
        "last": _joined([_before(answer) for answer in answers], np.int64),
        "cycle": cycles(answers),
        "reported": reported(answers),
        "twin": twins(answers),
    }


def reported(answers: Sequence[Answer]) -> Tensor | None:
    """Return the log-probs [N] that engines reported, nan where one is missing; None where all are missing."""
    if all(answer.logprobs is None for answer in answers):
        return None
    nothing = [np.full(len(answer.token_ids), np.nan) for answer in answers]
    rows = [none if answer.logprobs is None else answer.logprobs for answer, none in zip(answers, nothing, strict=True)]
    return _joined(rows, np.float64)


def cycles(answers: Sequence[Answer]) -> Tensor | None:
    """Return each token's place in its decoding cycle [N].

    The place is -1 in a completion with unknown cycles; the result is None if all completions have unknown cycles.
    """
    if all(answer.cycles is None for answer in answers):
        return None
    found = []
    for answer in answers:
        places = np.fromiter(chain.from_iterable(map(range, answer.cycles or ())), dtype=np.int64)
        count = len(answer.token_ids)
        found.append(places if len(places) == count else np.full(count, -1, dtype=np.int64))
    return _joined(found, np.int64)


def twins(answers: Sequence[Answer]) -> Tensor | None:
    """Return the token of an earlier completion of the cohort after the very same context [N]; -1 if there is none.

    Requests 2i and 2i + 1 have the same prompt. As long as their completions agree, each token of the second one is
    compared with that of the first.
    """
    earlier = {answer.request: answer for answer in answers}
    found = [_twin(answer, earlier.get(answer.request - 1)) for answer in answers]
    return _joined(found, np.int64) if any((row >= 0).any() for row in found) else None


def seen(answers: Sequence[Answer], ids: Tensor | None, vocabulary: int) -> Tensor:
    """Return whether a column's token occurred in prompt or completion before the position, [N, M] (bool).

    ``ids`` [N, M]: the token of each column, -1 for all others, which never counts as seen; None: columns are ids.
    """
    parts = [torch.zeros((0, vocabulary if ids is None else ids.shape[1]), dtype=torch.bool)]
    start = 0
    for answer in answers:
        count = len(answer.token_ids)
        written = torch.zeros((count, vocabulary), dtype=torch.bool)
        if count:
            written[:, torch.tensor(answer.prompt, dtype=torch.long)] = True
            places = torch.arange(1, count)
            written[places, torch.from_numpy(answer.token_ids[:-1])] = True
            written = written.cummax(0).values
        if ids is not None:
            own = ids[start : start + count]
            written = written.gather(1, own.clamp_min(0)) & (own >= 0)
        parts.append(written)
        start += count
    return torch.cat(parts)


def _before(answer: Answer) -> list[int]:
    """Return the token before each token of the completion; -1 if there is none."""
    return [*(answer.prompt[-1:] or (-1,)), *answer.token_ids.tolist()][: len(answer.token_ids)]


def _twin(answer: Answer, other: Answer | None) -> np.ndarray:
    row = np.full(len(answer.token_ids), -1, dtype=np.int64)
    if other is None or answer.request % 2 == 0 or other.prompt != answer.prompt:
        return row
    width = min(len(row), len(other.token_ids))
    same = answer.token_ids[:width] == other.token_ids[:width]
    agreed = int(np.argmin(same)) if not same.all() else width  # tokens before the first that differs
    reach = min(width, agreed + 1)
    row[:reach] = other.token_ids[:reach]
    return row


def _joined(rows: Sequence[object], dtype: type) -> Tensor:
    return torch.from_numpy(np.concatenate([np.zeros(0, dtype), *(np.asarray(row, dtype=dtype) for row in rows)]))
