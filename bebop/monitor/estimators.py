"""From finished groups to metrics: rewards, answers, acceptance of drafts, staleness.

Pure functions. Everything is a total over a count, so the metrics of several workers merge into those of the union, and
a name without data is absent (plain decoding has no drafts, hence no acceptance rate). Acceptance per position is
conditional on reaching the position; counts and overlaps estimate the same rate, the overlap with less variance
(SPEC 0.6). Names are listed in the README.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bebop.metrics import Max, Mean, Metrics, Sum
from bebop.monitor.turns import turn_metrics
from bebop.systems.base import HEAD_OVERLAP, HEAD_READ
from bebop.trajectory import Completion, DecodeStats, Group


def rollout_metrics(groups: Sequence[Group], version: int | None = None, solved: float = 1.0) -> Metrics:
    """All metrics of some finished groups.

    ``version`` is the trainer's at the time the groups are used; None leaves staleness out. An answer counts as solved
    from a reward of ``solved`` on.
    """
    completions = [t.completion for group in groups for t in group.trajectories]
    turns = [turn.completion for group in groups for t in group.trajectories for turn in t.turns]
    stats = sum((completion.stats for completion in turns), DecodeStats())
    stale = {} if version is None else staleness_metrics(completions, version)
    answers = {**reward_metrics(groups, solved), **response_metrics(completions), **decode_metrics(stats), **stale}
    return {**answers, **turn_metrics(groups), **epoch_metrics(groups)}


def epoch_metrics(groups: Sequence[Group]) -> Metrics:
    """The newest epoch among the questions; nothing where each is asked once."""
    epochs = [group.prompt.epoch for group in groups if group.prompt.question is not None]
    return {"samples/epoch": Max(float(max(epochs)))} if epochs else {}


def reward_metrics(groups: Sequence[Group], solved: float = 1.0) -> Metrics:
    """Mean reward over answers; spread (population) within groups; share of groups without a learning signal.

    Groups that lost all their members say nothing.
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
    }


def response_metrics(completions: Sequence[Completion]) -> Metrics:
    """Length of answers in tokens and the share cut off by the length limit."""
    if not completions:
        return {}
    lengths = [int(c.written.sum()) for c in completions]
    return {
        "response/length": Mean.of(lengths),
        "response/length_max": Max(float(max(lengths))),
        "response/truncated": Mean.of([float(c.finish_reason == "length") for c in completions]),
    }


def decode_metrics(stats: DecodeStats) -> Metrics:
    """Acceptance, overlap and entropies from summed decoding statistics; entropies in nats."""
    metrics: Metrics = {}
    if stats.cycles:
        metrics["rollout/accept_length"] = Mean(stats.emitted, stats.cycles)
    if stats.tokens and stats.target_forwards:
        metrics["rollout/forwards_per_token"] = Mean(stats.target_forwards, stats.tokens)
        if stats.extra_positions:
            metrics["rollout/extra_positions"] = Mean(stats.extra_positions, stats.target_forwards)
    per_position = {"accept_rate": stats.accepted, "overlap": stats.overlap, "target_only": stats.target_only}
    per_position |= {name: sums for name, sums in stats.counts.items() if name not in (HEAD_OVERLAP, HEAD_READ)}
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
    """Updates between the weights that produced a token and ``version``: mean and largest over tokens."""
    lags = [version - c.versions[c.written] for c in completions if c.written.any()]
    if not lags:
        return {}
    lag = np.concatenate(lags)
    return {"staleness/mean": Mean.of(lag), "staleness/max": Max(float(lag.max()))}


def _over_reached(sums: NDArray[np.float64], reached: NDArray[np.float64]) -> list[Mean]:
    """Each position's sum over the cycles that reached it; positions that were not measured are left out."""
    return [Mean(float(total), float(count)) for total, count in zip(sums, reached, strict=False)]
