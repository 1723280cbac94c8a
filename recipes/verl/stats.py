"""Decoding statistics, passed through verl as plain data: from an engine's completion to the trainer's metrics.

verl carries a dictionary ``extra_fields`` with every completion. But its asynchronous clients rebuild it when a request
is aborted and resumed, and its agent loops keep only the first turn's; each turn is a request of its own. So every
piece leaves its statistics with the task that collects them (a context variable follows a task through all of verl's
layers), and their sum goes into the finished completion. ``note_answers`` hooks the place where a piece arrives from a
server, ``sum_answers`` the place where the completion is finished.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from types import ModuleType
from typing import Any

import numpy as np

from bebop.rollout.vllm.plugin import FIELD as VLLM
from bebop.trajectory import DRAFT_STATS, STAT_COUNTS, DecodeStats
from bebop.verl_job.hooks import wrap

FIELD = "bebop_stats"
TURNS = "turns"  # in the statistics of a completion of several turns: those of each
GOES_ON = "bebop_goes_on"  # of a piece: it was aborted, and the next piece belongs to the same turn
ABORTED = ("aborted", "abort")  # stop reasons after which verl's clients ask for the rest
# verl's own counts: drafts proposed, drafts accepted, verification steps.
SPEC = ("spec_num_draft_tokens", "spec_num_accepted_tokens", "spec_num_verify_steps")
PARAMS = "kv_transfer_params"  # of vLLM's outputs, which verl hands on
COLLECTED: ContextVar[list[dict[str, Any]] | None] = ContextVar("bebop_collected", default=None)


def encode(stats: DecodeStats) -> dict[str, Any]:
    """Return statistics as plain data; NaN stays NaN."""
    counts = {name: int(getattr(stats, name)) for name in STAT_COUNTS}
    sums = {name: getattr(stats, name).tolist() for name in DRAFT_STATS}
    return {**counts, **sums, "counts": {name: values.tolist() for name, values in stats.counts.items()}}


def decode(data: Mapping[str, Any]) -> DecodeStats:
    """Rebuild statistics from the plain data of ``encode``."""
    numbers: dict[str, Any] = {name: int(data[name]) for name in STAT_COUNTS}
    numbers |= {name: np.asarray(data[name], dtype=np.float64) for name in DRAFT_STATS}
    counts = {name: np.asarray(values, dtype=np.float64) for name, values in data.get("counts", {}).items()}
    return DecodeStats(**numbers, counts=counts)


def fields(stats: DecodeStats, drafts: int) -> dict[str, Any]:
    """Return the ``extra_fields`` of an engine: Bebop's statistics, and verl's own three counts of the same drafts.

    ``drafts``: tokens drafted per cycle, for verl's acceptance rate.
    """
    accepted = int(stats.accepted.sum()) if len(stats.reached) else stats.emitted - stats.cycles
    counts = (stats.cycles * drafts, accepted, stats.cycles)
    return {FIELD: encode(stats), **dict(zip(SPEC, counts, strict=True))}


def unpack(extra: dict[str, Any]) -> None:
    """Move the statistics from Bebop's vLLM plug-in (``bebop.rollout.vllm.plugin``) to Bebop's fields and verl's."""
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
    """Return the statistics of each turn of a completion, from its field."""
    return [decode(one) for one in data.get(TURNS, [data])]


def note(extra: Mapping[str, Any], goes_on: bool = False) -> None:
    """Leave the statistics of a piece with the task that collects them, if there is one.

    ``goes_on``: the piece was aborted, so the next one belongs to the same turn. An engine that gives only verl's
    counts (vLLM) still has an accept length.
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
    """Merge the fields of a completion's pieces (at least one) into those of the completion."""
    summed = {name: sum(int(p[name]) for p in pieces) for name in SPEC if all(name in p for p in pieces)}
    parts: list[list[DecodeStats]] = [[]]
    for piece in pieces:
        parts[-1].append(decode(piece[FIELD]))
        if not piece.get(GOES_ON):
            parts.append([])
    each = [DecodeStats.total(part) for part in parts if part]
    several = {TURNS: [encode(one) for one in each]} if len(each) > 1 else {}
    return {FIELD: encode(DecodeStats.total(each)) | several, **summed}


# ---- hooks


def note_answers(llm_server: ModuleType) -> None:
    """Hook ``LLMServerClient.generate``, which every piece passes; clients of the asynchronous modes also call it."""

    async def around(original: Any, *args: Any, **kwargs: Any) -> Any:
        output = await original(*args, **kwargs)
        unpack(output.extra_fields)
        note(output.extra_fields, getattr(output, "stop_reason", None) in ABORTED)
        return output

    wrap(llm_server.LLMServerClient, "generate", around)


def sum_answers(agent_loop: ModuleType) -> None:
    """Hook the task of an agent loop: its statistics go into the completion just before verl stores it."""
    worker = agent_loop.AgentLoopWorker

    async def collecting(original: Any, *args: Any, **kwargs: Any) -> Any:
        token = COLLECTED.set([])
        try:
            return await original(*args, **kwargs)
        finally:
            COLLECTED.reset(token)

    async def storing(original: Any, self: Any, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        collected = COLLECTED.get()
        if collected:
            outputs[-1].extra_fields.update(whole(collected))
        return await original(self, outputs, *args, **kwargs)

    wrap(worker, "_run_agent_loop", collecting)
    wrap(worker, "_compute_score", storing)  # the first call on a finished completion, in every worker
