"""Metrics from trajectories: values by hand, and workers merged equal the union."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from bebop.metrics.metrics import Metrics, merge, values
from bebop.monitor.estimators import rollout_metrics
from bebop.trajectory import Completion, DecodeStats, Group, Prompt, Trajectory

STATS = DecodeStats(
    cycles=10, tokens=18, target_forwards=10, draft_forwards=20, reached=np.array([10.0, 6.0]),
    accepted=np.array([6.0, 3.0]), overlap=np.array([5.5, 3.6]), target_only=np.array([5.0, 2.4]),
    draft_entropy=np.array([4.0, 4.0]), target_entropy=np.array([8.0, 0.0]),
)  # fmt: skip


def answer(
    reward: float, length: int = 3, *, version: int = 0, stats: DecodeStats | None = None, cut: bool = False
) -> Trajectory:
    completion = Completion(
        token_ids=np.arange(length), logprobs=np.full(length, -0.5, dtype=np.float32),
        versions=np.full(length, version), finish_reason="length" if cut else "stop", stats=stats or DecodeStats(),
    )  # fmt: skip
    return Trajectory.single(completion=completion, reward=reward, timed_out=reward == 0)


def group(*trajectories: Trajectory) -> Group:
    return Group(prompt=Prompt(index=0, task="t", text="", token_ids=(1,), item={}), trajectories=trajectories)


def random_group(rng: np.random.Generator, drafts: int = 3) -> Group:
    """A group of two to six answers whose lengths, rewards and acceptance differ a lot from group to group."""
    ease = rng.uniform(0.1, 0.95)
    answers = []
    for _ in range(rng.integers(2, 7)):
        reached, accepted, alive = np.zeros(drafts), np.zeros(drafts), int(rng.integers(1, 80))
        cycles = alive
        for k in range(drafts):
            reached[k] = alive
            alive = accepted[k] = int(rng.binomial(alive, ease))
        stats = DecodeStats(
            cycles=cycles, tokens=cycles + int(accepted.sum()), target_forwards=cycles,
            draft_forwards=drafts * cycles, reached=reached, accepted=accepted, overlap=reached * ease,
            target_only=reached * ease * 0.8, draft_entropy=reached * (1 - ease),
            target_entropy=reached * (1.5 - ease),
        )  # fmt: skip
        reward = float(rng.random() < ease)
        cut = bool(rng.random() < 0.2)
        answers.append(answer(reward, stats.tokens, version=int(rng.integers(3, 6)), stats=stats, cut=cut))
    return group(*answers)


def per_worker() -> list[list[Group]]:
    """Three workers with one, four and nine groups; one drafts fewer positions."""
    rng = np.random.default_rng(3)
    return [[random_group(rng, drafts) for _ in range(n)] for n, drafts in ((1, 3), (4, 2), (9, 3))]


def merged(parts: list[Metrics]) -> dict[str, float]:
    return values(merge(*parts))


def naively_averaged(parts: list[Metrics]) -> dict[str, float]:
    """The broken variant: the mean over workers of each worker's value."""
    rows = [values(part) for part in parts]
    return {
        name: float(np.mean([row[name] for row in rows if name in row])) for name in {n for row in rows for n in row}
    }


def differing(combine: Callable[[list[Metrics]], dict[str, float]]) -> set[str]:
    """Names whose combined value is not that of the union."""
    workers = per_worker()
    union = values(rollout_metrics([g for groups in workers for g in groups], version=6))
    combined = combine([rollout_metrics(groups, version=6) for groups in workers])
    assert set(combined) == set(union) and len(union) == 23
    return {name for name, value in union.items() if not np.isclose(combined[name], value, rtol=1e-9)}


def test_merging_workers_equals_the_union() -> None:
    assert differing(merged) == set()


def test_averaging_workers_does_not() -> None:
    wrong = differing(naively_averaged)
    assert {
        "rollout/accept_length",
        "rollout/accept_rate/1",
        "reward/mean",
        "response/length",
        "draft/entropy",
    } <= wrong


def test_rewards_by_hand() -> None:
    groups = [group(answer(0.0), answer(1.0)), group(answer(1.0), answer(1.0)), group(*[answer(0.0)] * 4)]
    got = values(rollout_metrics(groups))
    assert got["reward/mean"] == 3 / 8  # over answers, not over groups (which gives 0.5)
    assert got["reward/std"] == pytest.approx(0.5 / 3)
    assert got["reward/solve_none"] == got["reward/solve_all"] == pytest.approx(1 / 3)


def test_parts_of_rewards_by_hand() -> None:
    """A part that does not apply counts nowhere: not in the mean, not in the spread, not as a group."""

    def parts(**values: float | None) -> Trajectory:
        return replace(answer(1.0), parts=values)

    got = values(
        rollout_metrics(
            [
                group(parts(right=1.0, code=None), parts(right=0.0, code=None), parts(right=0.5, code=None)),
                group(parts(right=1.0, code=4.0), parts(right=1.0, code=2.0), answer(0.0)),
                group(answer(0.0)),
            ]
        )
    )
    assert got["reward/right"] == pytest.approx(3.5 / 5) and got["reward/code"] == 3.0
    assert got["reward/right/std"] == pytest.approx(np.std([1, 0, 0.5]) / 2) and got["reward/code/std"] == 1.0
    never = values(rollout_metrics([group(parts(code=None), answer(0.0))]))
    assert not [name for name in never if "code" in name]
    assert not [name for name in values(rollout_metrics([group(answer(1.0))])) if name.startswith("reward/r")]


def test_partial_rewards_count_as_solved_from_the_threshold_on() -> None:
    groups = [group(answer(0.4), answer(0.6))]
    assert values(rollout_metrics(groups))["reward/solve_none"] == 1.0
    assert values(rollout_metrics(groups, solved=0.4))["reward/solve_all"] == 1.0


def test_responses_by_hand() -> None:
    got = values(rollout_metrics([group(answer(0, 2), answer(0, 9, cut=True)), group(answer(0, 4), answer(0, 5))]))
    assert (got["response/length"], got["response/length_max"], got["response/truncated"]) == (5.0, 9.0, 0.25)


def test_decoding_by_hand() -> None:
    got = values(rollout_metrics([group(answer(1.0, 18, stats=STATS), answer(1.0, 18, stats=STATS))]))
    expected = {
        "rollout/accept_length": 1.8,  # 18 / 10: of the 9 accepted drafts, one fewer was left to emit beside them
        "rollout/accept_rate/1": 0.6,
        "rollout/accept_rate/2": 0.5,  # 3 of the 6 that reached it, not of 10
        "rollout/overlap/1": 0.55,
        "rollout/overlap/2": 0.6,
        "rollout/target_only/1": 0.5,
        "rollout/target_only/2": 0.4,
        "rollout/forwards_per_token": 10 / 18,
        "draft/entropy": 0.5,  # 8 nats over 16 positions
        "rollout/target_entropy": 0.5,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)


def test_staleness_is_a_mean_over_tokens() -> None:
    groups = [group(answer(0, 9, version=4), answer(0, 1, version=2))]
    got = values(rollout_metrics(groups, version=4))
    assert (got["staleness/mean"], got["staleness/max"]) == (0.2, 2.0)  # a mean over answers gives 1.0
    assert "staleness/mean" not in rollout_metrics(groups)


def test_plain_decoding_has_no_draft_names() -> None:
    plain = DecodeStats(cycles=5, tokens=5, target_forwards=5)
    names = set(rollout_metrics([group(answer(1.0, 5, stats=plain))]))
    assert not {
        n for n in names if n.startswith(("draft/", "rollout/accept_rate", "rollout/overlap", "rollout/target"))
    }
    assert {"rollout/accept_length", "rollout/forwards_per_token"} <= names


@pytest.mark.parametrize("drafts", [0, 1])
def test_counts_without_overlaps_leave_the_overlaps_out(drafts: int) -> None:
    """An engine that measures none leaves them empty, or zero for each draft."""
    counts = {"cycles": 2, "tokens": 3, "target_forwards": 2}
    counted = DecodeStats.with_drafts(drafts, **counts, reached=np.array([2.0]), accepted=np.array([1.0]))
    metrics = rollout_metrics([group(answer(1.0, 3, stats=counted))])
    assert metrics["rollout/accept_rate/1"].value == 0.5
    assert not {"rollout/overlap/1", "rollout/target_only/1", "draft/entropy", "rollout/target_entropy"} & set(metrics)


def test_a_position_never_reached_is_absent() -> None:
    stats = DecodeStats(cycles=2, tokens=2, reached=np.array([2.0, 0.0]), accepted=np.zeros(2), overlap=np.zeros(2))
    names = set(rollout_metrics([group(answer(0.0, 2, stats=stats))]))
    assert "rollout/accept_rate/1" in names and "rollout/accept_rate/2" not in names


def test_nothing_gives_nothing() -> None:
    assert rollout_metrics([], version=3) == {}
