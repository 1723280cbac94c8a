"""Metrics of finished groups: rewards, completions, acceptance of drafts, staleness, turns.

All functions are pure. Every metric is a total over a count, so merging the metrics of several workers gives those of
the union. A name without data is absent (plain decoding has no drafts, hence no acceptance rate). Acceptance per
position is conditional on reaching the position; counts and overlaps estimate the same rate, the overlap with less
variance (SPEC 0.6).

Acceptance by turn is compared position by position, never as an accept length. The end of a turn cuts off its last
cycle, so short turns have short cycles with any draft. The first cycle after an observation is measured separately: it
drafts on tokens that the policy has not written. ``bebop.metrics.catalogue`` lists the names.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from bebop.metrics.metrics import Max, Mean, Metrics, Percentile, Sum
from bebop.monitor.records import AFTER, first_of_kind
from bebop.systems.base import HEAD_OVERLAP, HEAD_READ
from bebop.trajectory import MEASURED, OPENING, WEIGHED, Completion, DecodeStats, Ending, Group, Trajectory

SHARES = {"p50": 0.5, "p99": 0.99}


def rollout_metrics(groups: Sequence[Group], version: int | None = None, solved: float = 1.0) -> Metrics:
    """Return all metrics of some finished groups.

    ``version`` is the trainer's version when it uses the groups; None leaves staleness out. A completion counts as
    solved from a reward of ``solved`` on.
    """
    completions = [t.completion for group in groups for t in group.trajectories]
    turns = [turn.completion for group in groups for t in group.trajectories for turn in t.turns]
    stats = DecodeStats.total(completion.stats for completion in turns)
    stale = {} if version is None else staleness_metrics(completions, version)
    answers = {**reward_metrics(groups, solved), **response_metrics(completions), **decode_metrics(stats), **stale}
    return {**answers, **turn_metrics(groups), **epoch_metrics(groups)}


def epoch_metrics(groups: Sequence[Group]) -> Metrics:
    """Return the newest epoch among the questions; empty if each question is asked once."""
    epochs = [group.prompt.epoch for group in groups if group.prompt.question is not None]
    return {"samples/epoch": Max(float(max(epochs)))} if epochs else {}


def reward_metrics(groups: Sequence[Group], solved: float = 1.0) -> Metrics:
    """Return mean reward, spread within groups (population), and share of groups without a learning signal.

    Groups that lost all their members are ignored.
    """
    groups = [group for group in groups if group.trajectories]
    if not groups:
        return {}
    rewards = [np.array([t.reward for t in group.trajectories]) for group in groups]
    return {
        "reward/mean": Mean.of(np.concatenate(rewards)),
        "reward/std": Mean.of([r.std() for r in rewards]),
        "reward/solve_none": Mean.of([float((r < solved).all()) for r in rewards]),
        "reward/solve_all": Mean.of([float((r >= solved).all()) for r in rewards]),
        "reward/timeouts": Sum(float(sum(t.timed_out for group in groups for t in group.trajectories))),
        **part_metrics(groups),
    }


def part_metrics(groups: Sequence[Group]) -> Metrics:
    """Return mean and spread within groups (population) of each part of a reward, over completions with that part."""
    metrics: Metrics = {}
    for name in sorted({name for group in groups for t in group.trajectories for name in t.parts}):
        found = [[part for t in group.trajectories if (part := t.parts.get(name)) is not None] for group in groups]
        if any(found):
            metrics[f"reward/{name}"] = Mean.of([part for parts in found for part in parts])
            metrics[f"reward/{name}/std"] = Mean.of([float(np.std(parts)) for parts in found if parts])
    return metrics


def response_metrics(completions: Sequence[Completion]) -> Metrics:
    """Return the length of completions in tokens and the share cut off by the length limit."""
    if not completions:
        return {}
    lengths = [int(c.written.sum()) for c in completions]
    return {
        "response/length": Mean.of(lengths),
        "response/length_max": Max(float(max(lengths))),
        "response/truncated": Mean.of([float(c.finish_reason == "length") for c in completions]),
    }


def decode_metrics(stats: DecodeStats) -> Metrics:
    """Return acceptance, overlap and entropies from summed decoding statistics; entropies in nats."""
    if not stats.overlap.any():  # what an engine did not measure it left as zeros
        empty: dict[str, Any] = {name: np.zeros(0) for name in MEASURED if not getattr(stats, name).any()}
        stats = replace(stats, **empty)
    metrics: Metrics = {}
    if stats.cycles:
        metrics["rollout/accept_length"] = Mean(stats.emitted, stats.cycles)
    if stats.tokens and stats.target_forwards:
        metrics["rollout/forwards_per_token"] = Mean(stats.target_forwards, stats.tokens)
        if stats.extra_positions:
            metrics["rollout/extra_positions"] = Mean(stats.extra_positions, stats.target_forwards)
    per_position = {"accept_rate": stats.accepted, "overlap": stats.overlap, "target_only": stats.target_only}
    per_position |= {
        name: sums for name, sums in stats.counts.items() if name not in (HEAD_OVERLAP, HEAD_READ, WEIGHED)
    }
    for name, sums in per_position.items():
        rates = _over_reached(sums, stats.reached)
        metrics.update({f"rollout/{name}/{k}": rate for k, rate in enumerate(rates, 1) if rate.count})
    if HEAD_READ in stats.counts and (read := float(stats.counts[HEAD_READ][0])):
        metrics[f"rollout/{HEAD_OVERLAP}/1"] = Mean(float(stats.counts[HEAD_OVERLAP][0]), read)
    for name, sums in {"draft/entropy": stats.draft_entropy, "rollout/target_entropy": stats.target_entropy}.items():
        rates = _over_reached(sums, stats.reached)
        mean = Mean(sum(r.total for r in rates), sum(r.count for r in rates))
        if mean.count:
            metrics[name] = mean
    return metrics


def staleness_metrics(completions: Sequence[Completion], version: int) -> Metrics:
    """Return the lag of tokens: updates from the weights that wrote a token to ``version``, as mean and maximum."""
    lags = [version - c.versions[c.written] for c in completions if c.written.any()]
    if not lags:
        return {}
    lag = np.concatenate(lags)
    return {"staleness/mean": Mean.of(lag), "staleness/max": Max(float(lag.max()))}


def _over_reached(sums: NDArray[np.float64], reached: NDArray[np.float64]) -> list[Mean]:
    """Return each position's sum over the cycles that reached it; unmeasured positions are left out."""
    return [Mean(float(total), float(count)) for total, count in zip(sums, reached, strict=False)]


# ---- turns


def several(groups: Sequence[Group]) -> bool:
    """Return whether the groups have environments: a single completion always ends ``answered`` and is never lost."""
    return any(group.lost or any(t.ended != "answered" for t in group.trajectories) for group in groups)


def turn_metrics(groups: Sequence[Group]) -> Metrics:
    """Return metrics of trajectories with environments; empty without environments."""
    if not several(groups):
        return {}
    members = [t for group in groups for t in group.trajectories]
    lost: Metrics = {"turn/lost": Sum(float(sum(group.lost for group in groups)))}
    return {**lost, **_whole(members), **drafting_metrics(_parts(members))} if members else lost


def _whole(members: Sequence[Trajectory]) -> Metrics:
    """Return metrics of whole trajectories: turns, seconds, observed tokens, restarts, endings and counts."""
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
    """Return acceptance and overlap by kind of turn (``first_of_kind``, or AFTER) and draft position."""
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
    """Yield the statistics of each turn by its kind, and those of its first cycle if the engine reports them
    separately.
    """
    for trajectory in members:
        for number, turn in enumerate(trajectory.turns):
            yield first_of_kind(number), turn.completion.stats
            first = dict(turn.completion.stretches).get(OPENING)
            if number and first is not None:
                yield AFTER, first
