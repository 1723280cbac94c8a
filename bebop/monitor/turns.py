"""Trajectories of several turns: how many, how they ended, and how drafting goes in early and late ones.

Acceptance is compared position by position, never as an accept length: the end of a turn cuts its last cycle off, so
short turns have short cycles whatever is drafted. The first cycle after an observation is looked at by itself: it
drafts on tokens that the policy has not written.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import get_args

import numpy as np

from bebop.metrics import Mean, Metrics, Percentile, Sum
from bebop.monitor.records import StepRecords
from bebop.trajectory import OPENING, DecodeStats, Ending, Group, Trajectory

AFTER = "after"  # in place of a kind of turn: the first cycle after each observation
SHARES = {"p50": 0.5, "p99": 0.99}


def first_of_kind(turn: int) -> int:
    """Turns come in kinds 0, 1, 2-3, 4-7, 8-15, ...; a kind is called by the first of its turns."""
    return 1 << (turn.bit_length() - 1) if turn else 0


def kind_name(first: int) -> str:
    """``0``, ``1``, ``2-3``, ``4-7``, ... for the kind that begins with turn ``first``."""
    return str(first) if first < 2 else f"{first}-{2 * first - 1}"


def several(groups: Sequence[Group]) -> bool:
    """Whether there are environments: a single answer ends as ``answered``, and is never lost."""
    return any(group.lost or any(t.ended != "answered" for t in group.trajectories) for group in groups)


def by_turn(records: StepRecords) -> dict[str, StepRecords]:
    """The rows of each kind of turn, then those of first cycles after observations; name -> rows."""
    kinds = np.array([first_of_kind(int(turn)) for turn in records.turn], dtype=np.int64)
    found = {kind_name(int(kind)): records.select(kinds == kind) for kind in np.unique(kinds)}
    after = (records.turn > 0) & (records.position == OPENING)
    return found | ({AFTER: records.select(after)} if after.any() else {})


def turn_metrics(groups: Sequence[Group]) -> Metrics:
    """Metrics of trajectories with environments; none of others."""
    if not several(groups):
        return {}
    members = [t for group in groups for t in group.trajectories]
    lost: Metrics = {"turn/lost": Sum(float(sum(group.lost for group in groups)))}
    return {**lost, **_whole(members), **drafting_metrics(_parts(members))} if members else lost


def _whole(members: Sequence[Trajectory]) -> Metrics:
    """Of trajectories as wholes."""
    turns = [len(t.turns) for t in members]
    seconds = [t.environment_seconds for t in members]
    metrics: Metrics = {"turn/count": Mean.of(turns)}
    metrics |= {f"turn/count_{end}": Percentile.of(turns, share) for end, share in SHARES.items()}
    metrics |= {f"turn/seconds_{end}": Percentile.of(seconds, share) for end, share in SHARES.items()}
    metrics["turn/observed"] = Mean.of([sum(len(turn.observation) for turn in t.turns) for t in members])
    metrics["turn/restarts"] = Sum(float(sum(t.restarts for t in members)))
    endings = [ending for ending in get_args(Ending) if ending != "answered"]
    metrics |= {f"turn/ended/{ending}": Mean.of([float(t.ended == ending) for t in members]) for ending in endings}
    for name in sorted({name for t in members for name in t.counts}):
        metrics[f"turn/counts/{name}"] = Mean.of([t.counts.get(name, 0.0) for t in members])
    return metrics


def drafting_metrics(parts: Iterable[tuple[int | str, DecodeStats]]) -> Metrics:
    """Acceptance and overlap by kind of turn (``first_of_kind``, or AFTER) and draft position."""
    sums: dict[int | str, DecodeStats] = {}
    for kind, stats in parts:
        sums[kind] = sums.get(kind, DecodeStats()) + stats
    metrics: Metrics = {}
    for kind, stats in sums.items():
        for name, rows in (("accept_rate", stats.accepted), ("overlap", stats.overlap)):
            for k, (total, reached) in enumerate(zip(rows, stats.reached, strict=False), 1):
                if reached and (name != "overlap" or stats.overlap.any()):
                    metrics[f"turn/{name}/{kind}/{k}"] = Mean(float(total), float(reached))
    return metrics


def _parts(members: Sequence[Trajectory]) -> Iterator[tuple[int | str, DecodeStats]]:
    """Each turn by its kind, and its first cycle by itself where the engine tells it apart."""
    for trajectory in members:
        for number, turn in enumerate(trajectory.turns):
            yield first_of_kind(number), turn.completion.stats
            first = dict(turn.completion.stretches).get(OPENING)
            if number and first is not None:
                yield AFTER, first
