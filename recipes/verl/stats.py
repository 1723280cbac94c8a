"""Decoding statistics on their way through verl: from an engine's answer to the trainer's metrics, as plain data.

verl carries a dictionary ``extra_fields`` with every answer, but its asynchronous clients rebuild it when an answer is
aborted and resumed, and its agent loops keep only that of the first turn. So each piece of an answer leaves its
statistics with the task that collects it (a context variable follows a task through all of verl's layers), and the
sum is put into the finished answer.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np

from bebop.trajectory import DecodeStats

FIELD = "bebop_stats"
ARRAYS = ("reached", "accepted", "overlap", "target_only", "draft_entropy", "target_entropy")
COUNTS = ("cycles", "tokens", "target_forwards", "draft_forwards")
COLLECTED: ContextVar[list[DecodeStats] | None] = ContextVar("bebop_collected", default=None)


def encode(stats: DecodeStats) -> dict[str, Any]:
    """As plain data; NaN stays NaN."""
    counts = {name: int(getattr(stats, name)) for name in COUNTS}
    return counts | {name: getattr(stats, name).tolist() for name in ARRAYS}


def decode(data: Mapping[str, Any]) -> DecodeStats:
    """The inverse of ``encode``."""
    found: dict[str, Any] = {name: int(data[name]) for name in COUNTS}
    found |= {name: np.asarray(data[name], dtype=np.float64) for name in ARRAYS}
    return DecodeStats(**found)


def fields(stats: DecodeStats, drafts: int) -> dict[str, Any]:
    """What an engine puts into ``extra_fields``: our statistics, and verl's own three counts of the same.

    ``drafts``: tokens drafted per cycle, for verl's acceptance rate.
    """
    return {
        FIELD: encode(stats),
        "spec_num_draft_tokens": stats.cycles * drafts,
        "spec_num_accepted_tokens": emitted(stats) - stats.cycles,
        "spec_num_verify_steps": stats.cycles,
    }


def emitted(stats: DecodeStats) -> int:
    """Accepted drafts plus one token a cycle; without positions there is only the number of tokens."""
    return stats.cycles + int(stats.accepted.sum()) if len(stats.reached) else stats.tokens


def note(extra: Mapping[str, Any]) -> None:
    """Leave the statistics of a piece of an answer with the task that collects them, if there is one."""
    collected = COLLECTED.get()
    if collected is not None and extra.get(FIELD) is not None:
        collected.append(decode(extra[FIELD]))


def total(pieces: Sequence[DecodeStats]) -> DecodeStats:
    """The sum over the pieces of an answer."""
    return sum(pieces, DecodeStats())
