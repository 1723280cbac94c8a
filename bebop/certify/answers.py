"""What a certificate is made from: answers of an engine in the order of submission, and what they should follow.

A ``Block`` holds both for a cohort, position by position. Everything in it but the tokens themselves (``tokens``,
``cells``, ``reported``) is known *before* the token of that position is: only so are bets on it fair.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """What an engine gave for one request; one that did not end is an answer, too."""

    request: int  # place in the order of submission; 2i and 2i + 1 have the same prompt and seeds of their own
    prompt: tuple[int, ...]  # [P]
    token_ids: NDArray[np.int64]  # [T]
    logprobs: NDArray[np.float64] | None = None  # [T] as the engine reports them
    finish_reason: str = "stop"  # stop, length or abort
    seed: int | None = None
    stops: tuple[int, ...] = ()  # tokens that end an answer
    limit: int | None = None  # max_new_tokens
    cycles: tuple[int, ...] | None = None  # tokens emitted by each cycle, where the engine says
    versions: NDArray[np.int64] | None = None  # [T] of the weights, where it says
    accepted: tuple[int, int] | None = None  # drafts accepted, drafts tested, where it says


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """A cohort of answers under a reference: N positions, answer after answer in the order of submission.

    Distributions are over M columns: all of the vocabulary, or where the reference knows the likeliest tokens alone,
    those of each row and one for all others (``ids``). fp64.
    """

    tokens: Tensor  # [N] what was sampled
    cells: Tensor  # [N] its column
    probs: Tensor  # [N, M] the claimed distribution, fully processed
    logprobs: Tensor  # [N] log p of the token itself, which in a column for all others is not that of its column
    request: Tensor  # [N] whose answer, ``Answer.request``
    position: Tensor  # [N] in the answer, from 0
    last: Tensor  # [N] the token before it
    stops: tuple[int, ...]
    ids: Tensor | None = None  # [N, M] the token of each column, -1 for all others; None: columns are ids
    before: Tensor | None = None  # [N, M] the claimed distribution of the position before, over the same columns
    raw: Tensor | None = None  # [N, M] softmax(logits) where the claim is another
    draft: Tensor | None = None  # [N, M] a guess at what drafts are drawn from, such as an MTP head's first draft
    seen: Tensor | None = None  # [N, M] whether the token occurred in prompt or answer
    cycle: Tensor | None = None  # [N] place in its decoding cycle, from 0; -1: not known
    reported: Tensor | None = None  # [N] log-prob as the engine reports it, nan: not there
    declared: Tensor | None = None  # [N] what it should be: log p raw, at the temperature, or fully processed
    twin: Tensor | None = None  # [N] token of an earlier answer after the very same context, -1: there is none

    def __len__(self) -> int:
        return len(self.tokens)

    def part(self, start: int, stop: int) -> "Block":
        """Positions ``start`` to ``stop``."""
        own = {name: getattr(self, name) for name in self.__slots__}
        cut: dict[str, Any] = {name: value[start:stop] for name, value in own.items() if isinstance(value, Tensor)}
        return replace(self, **cut)
