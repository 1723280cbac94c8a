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

from bebop.rollout.vllm.serving import FIELD as VLLM
from bebop.trajectory import DRAFT_STATS, STAT_COUNTS, DecodeStats

FIELD = "bebop_stats"
TURNS = "turns"  # in the statistics of an answer of several turns: those of each
GOES_ON = "bebop_goes_on"  # of a piece: it was aborted, and the next one is of the same turn
ABORTED = ("aborted", "abort")  # reasons to stop after which verl's clients ask for the rest
# verl's own counts of the same: drafts made, drafts accepted, verification steps.
SPEC = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
PARAMS = "kv_transfer_params"  # of vLLM's outputs, which verl hands on
COLLECTED: ContextVar[list[dict[str, Any]] | None] = ContextVar("bebop_collected", default=None)


def encode(stats: DecodeStats) -> dict[str, Any]:
    """As plain data; NaN stays NaN."""
    counts = {name: int(getattr(stats, name)) for name in STAT_COUNTS}
    sums = {name: getattr(stats, name).tolist() for name in DRAFT_STATS}
    return {**counts, **sums, "counts": {name: values.tolist() for name, values in stats.counts.items()}}


def decode(data: Mapping[str, Any]) -> DecodeStats:
    """The inverse of ``encode``."""
    numbers: dict[str, Any] = {name: int(data[name]) for name in STAT_COUNTS}
    numbers |= {name: np.asarray(data[name], dtype=np.float64) for name in DRAFT_STATS}
    counts = {name: np.asarray(values, dtype=np.float64) for name, values in data.get("counts", {}).items()}
    return DecodeStats(**numbers, counts=counts)


def fields(stats: DecodeStats, drafts: int) -> dict[str, Any]:
    """What an engine puts into ``extra_fields``: our statistics, and verl's own three counts of the same.

    ``drafts``: tokens drafted per cycle, for verl's acceptance rate.
    """
    accepted = int(stats.accepted.sum()) if len(stats.reached) else stats.emitted - stats.cycles
    counts = (stats.cycles * drafts, accepted, stats.cycles)
    return {FIELD: encode(stats), **dict(zip(SPEC, counts, strict=True))}


def unpack(extra: dict[str, Any]) -> None:
    """Put what our plug-in of vLLM sent with an answer (``bebop.rollout.vllm.serving``) in its place, for verl too."""
    params = extra.get(PARAMS)
    if not isinstance(params, Mapping) or VLLM not in params:
        return
    rest, stats = {name: value for name, value in params.items() if name != VLLM}, params[VLLM]
    extra[PARAMS] = rest
    if not rest:
        del extra[PARAMS]
    if stats.cycles:
        extra.update(fields(stats, len(stats.reached)))


def turns(data: Mapping[str, Any]) -> list[DecodeStats]:
    """Statistics of each turn of an answer, from its field."""
    return [decode(one) for one in data.get(TURNS, [data])]


def note(extra: Mapping[str, Any], goes_on: bool = False) -> None:
    """Leave the statistics of a piece of an answer with the task that collects them, if there is one.

    ``goes_on``: it was aborted, so that the next piece is of the same turn.

    An engine that gives verl's counts alone (vLLM) still has an accept length.
    """
    collected = COLLECTED.get()
    if collected is None:
        return
    piece = {name: extra[name] for name in (FIELD, *SPEC) if extra.get(name) is not None}
    if FIELD not in piece and all(name in piece for name in SPEC):
        _, accepted, cycles = (int(piece[name]) for name in SPEC)
        piece[FIELD] = encode(DecodeStats(cycles=cycles, tokens=cycles + accepted))
    if FIELD in piece:
        collected.append(piece | {GOES_ON: goes_on})


def whole(pieces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The fields of an answer from those of its pieces; there is at least one."""
    summed = {name: sum(int(p[name]) for p in pieces) for name in SPEC if all(name in p for p in pieces)}
    parts: list[list[DecodeStats]] = [[]]
    for piece in pieces:
        parts[-1].append(decode(piece[FIELD]))
        if not piece.get(GOES_ON):
            parts.append([])
    each = [DecodeStats.total(part) for part in parts if part]
    several = {TURNS: [encode(one) for one in each]} if len(each) > 1 else {}
    return {FIELD: encode(DecodeStats.total(each)) | several, **summed}
