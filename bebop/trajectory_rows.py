"""What the writer of ``trajectories.sqlite`` puts into its tables: rows of prompts, of trajectories, of tokens."""

import json
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bebop.token_trace import Trace, joined, spread
from bebop.trajectories import TRACED
from bebop.trajectory import Group, Trajectory
from bebop.trajectory_schema import COLUMNS

BETWEEN = "\n\n"  # texts of turns


def prompt_row(group: Group) -> dict[str, Any]:
    """A row of ``prompts``."""
    prompt = group.prompt
    return {
        "prompt": prompt.index,
        "task": prompt.task,
        "text": prompt.text,
        "ids": _blob("ids", prompt.token_ids),
        "question": prompt.question,
        "epoch": prompt.epoch,
        "gold": _gold(prompt.item.get("answer")),
    }


def _gold(answer: object) -> str | None:
    """The right answer as text; one that is no text as JSON."""
    if answer is None:
        return None
    text = answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False, default=str)
    return text.encode("utf-8", "replace").decode()  # SQLite takes no half of a pair of surrogates


def summary_row(trajectory: Trajectory, version: int) -> dict[str, Any]:
    """The columns of ``answers`` that the trajectory itself gives; ``version``: of the weights that it trains."""
    turns = [turn.completion for turn in trajectory.turns]
    stats = sum((turn.stats for turn in turns[1:]), turns[0].stats)
    versions = np.concatenate([turn.versions for turn in turns])
    tested = float(stats.reached.sum())
    measured = tested if stats.overlap.any() else 0.0  # an engine that does not measure leaves zeros
    return {
        "reward": float(trajectory.reward),
        "timed_out": int(trajectory.timed_out),
        "length": trajectory.written + sum(len(turn.observation) for turn in trajectory.turns),
        "finish": turns[-1].finish_reason,
        "version_first": int(versions[0]) if len(versions) else version,
        "version_last": int(versions[-1]) if len(versions) else version,
        "staleness": version - int(versions.min(initial=version)),
        "accept_length": _number(stats.accept_length),
        "accept_rate": _ratio(stats.accepted, tested),
        "overlap": _ratio(stats.overlap, measured),
        "target_entropy": _ratio(stats.target_entropy, measured),
        "exact": int(all(turn.exact for turn in turns)),
        "traced": int(_trace(trajectory) is not None),
        "text": BETWEEN.join(turn.text for turn in turns),
        "turns": len(turns),
        "written": trajectory.written,
        "ended": trajectory.ended,
        "restarts": trajectory.restarts,
        "cycles": stats.cycles,
        "tested": int(tested),
        "counts": json.dumps({name: round(float(sums.sum()), 4) for name, sums in stats.counts.items()}),
    }


def _ratio(sums: NDArray[np.float64], count: float) -> float | None:
    """A mean over ``count``; None: of nothing."""
    return _number(float(sums.sum()) / count) if count else None


def _number(value: float) -> float | None:
    """SQLite has no NaN."""
    return float(value) if np.isfinite(value) else None


def token_row(trajectory: Trajectory, trainer_logprobs: NDArray[np.float32] | None) -> dict[str, Any]:
    """The columns of ``tokens``; ``trainer_logprobs`` are of what the policy wrote alone."""
    completion, trace = trajectory.completion, _trace(trajectory)
    written, count = completion.written, len(completion.token_ids)
    assert trace is None or len(trace) == count, f"a trace of {len(trace)} tokens, an answer of {count}"
    logprobs = completion.logprobs
    if completion.mask is not None:
        logprobs = np.where(written, logprobs, np.float32(np.nan))
    if trainer_logprobs is not None:
        assert len(trainer_logprobs) == trajectory.written, "the trainer saw another answer"
        found = np.full(count, np.nan, dtype=np.float32)
        found[written] = trainer_logprobs
        trainer_logprobs = found
    return {
        "ids": _blob("ids", completion.token_ids),
        "logprobs": _blob("logprobs", logprobs),
        "versions": _blob("versions", completion.versions),
        "trainer_logprobs": None if trainer_logprobs is None else _blob("trainer_logprobs", trainer_logprobs),
        "drafter_names": None if trace is None else json.dumps(trace.names),
        **{name: None if trace is None else _blob(name, getattr(trace, name)) for name in TRACED},
        "turns": None if completion.mask is None else _blob("turns", _marks(trajectory)),
    }


def _marks(trajectory: Trajectory) -> NDArray[np.int32]:
    """[T] the turn that wrote each token; -i: it was read before turn i."""
    parts = [
        np.repeat(np.array([-i, i], dtype=np.int32), [len(turn.observation), len(turn.completion.token_ids)])
        for i, turn in enumerate(trajectory.turns)
    ]
    return np.concatenate(parts)


def _trace(trajectory: Trajectory) -> Trace | None:
    """Of all turns, with rows of which nothing is known for what was read; None: some turn has none."""
    traces = [turn.completion.trace for turn in trajectory.turns]
    known = [trace for trace in traces if trace is not None]
    if len(known) < len(traces):
        return None
    return known[0] if len(known) == 1 else spread(joined(known), trajectory.completion.written)


def _blob(name: str, values: Iterable[Any] | NDArray[Any]) -> bytes:
    return np.asarray(values).astype(COLUMNS[name]).tobytes()


def token_ids(groups: Sequence[Group]) -> set[int]:
    """Every token that a reader may have to show."""
    turns = [turn for group in groups for t in group.trajectories for turn in t.turns]
    traces = [trace for turn in turns if (trace := turn.completion.trace) is not None]
    shown = chain(
        (np.asarray(group.prompt.token_ids) for group in groups),
        (ids for turn in turns for ids in (turn.observation, turn.completion.token_ids)),
        *((t.drafts, t.target_ids, t.draft_ids) for t in traces),
    )
    found = np.unique(np.concatenate([np.zeros(0, dtype=np.int64), *(part.ravel() for part in shown)]))
    return {int(i) for i in found if i >= 0}
