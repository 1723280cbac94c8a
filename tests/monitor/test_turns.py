"""The monitor on trajectories of several turns: acceptance by turn and draft position, and where drift comes from."""

import dataclasses

import numpy as np
import pytest

from bebop.metrics.metrics import Percentile, merge, values
from bebop.monitor.drift import by_key
from bebop.monitor.drift_monitor import DriftMonitor, MonitorSettings
from bebop.monitor.estimators import rollout_metrics, turn_metrics
from bebop.monitor.records import AFTER, StepRecords, first_of_kind, from_groups, kind_name, merge_records
from bebop.monitor.watch import choose
from bebop.trajectory import OPENING, Group, Trajectory
from tests.monitor.synthetic import Truth, constant, step_groups
from tests.several_turns import group, trajectory
from tests.stored_answers import group as single


def test_kinds_of_turns_are_told_apart() -> None:
    kinds = [first_of_kind(turn) for turn in (0, 1, 2, 3, 4, 7, 8, 15, 16, 199)]
    assert kinds == [0, 1, 2, 2, 4, 4, 8, 8, 16, 128]
    assert [kind_name(kind) for kind in (0, 1, 2, 4, 128)] == ["0", "1", "2-3", "4-7", "128-255"]


def test_acceptance_by_turn_and_position() -> None:
    """Of each turn two cycles; the engine tells the first one after an observation apart."""
    got = values(turn_metrics([group(0, trajectory(turns=4, first=0.3), trajectory(turns=1, overlaps=(0.4, 0, 0)))]))
    assert {f"turn/overlap/{kind}/{k}" for kind in (0, 1, 2, AFTER) for k in (1, 2)} == {
        name for name in got if name.startswith("turn/overlap/")
    }
    assert got["turn/overlap/0/1"] == pytest.approx((0.3 + 0.8 + 0.4 + 0.4) / 4)  # cycles of both members
    assert got["turn/overlap/1/1"] == pytest.approx((0.3 + 0.6) / 2)
    assert got["turn/overlap/2/1"] == pytest.approx((0.3 + 0.4 + 0.3 + 0.4) / 4)  # of turns 2 and 3
    assert got["turn/overlap/after/1"] == pytest.approx(0.3)
    one = [group(0, trajectory(turns=2, first=0.3)), group(1, trajectory(turns=1, first=0.9))]
    assert values(turn_metrics(one))["turn/overlap/after/1"] == pytest.approx(0.3)  # a first turn reads its prompt
    assert got["turn/accept_rate/1/2"] == 1.0
    not_told = turn_metrics([group(0, trajectory())])
    assert "turn/overlap/2/1" in not_told and not any(AFTER in name for name in not_told)


def test_how_trajectories_went() -> None:
    members = [
        trajectory(turns=count, ended=ended, restarts=restarts, seconds=seconds)  # type: ignore[arg-type]
        for count, ended, restarts, seconds in ((1, "done", 0, 1.0), (3, "turns", 2, 5.0), (3, "done", 1, 3.0))
    ]
    got = values(turn_metrics([group(0, *members[:2], lost=1), group(1, members[2], lost=2), group(2, lost=3)]))
    assert (got["turn/lost"], got["turn/restarts"]) == (6, 3)
    assert (got["turn/count"], got["turn/count_p50"], got["turn/count_p99"]) == (pytest.approx(7 / 3), 3, 3)
    assert (got["turn/seconds_p50"], got["turn/seconds_p99"]) == (3.0, 5.0)
    assert (got["turn/ended/done"], got["turn/ended/turns"], got["turn/ended/length"]) == (
        pytest.approx(2 / 3), pytest.approx(1 / 3), 0,
    )  # fmt: skip
    assert got["turn/observed"] == pytest.approx((0 + 8 + 8) / 3)
    assert got["turn/counts/calls"] == pytest.approx(7 / 3)
    # What was read is no part of an answer's length, and a group without members says nothing about rewards.
    whole = values(rollout_metrics([group(0, *members[:2], lost=1), group(2, lost=3)], version=4))
    assert whole["response/length"] == (4 + 9) / 2
    assert (whole["reward/solve_all"], whole["reward/solve_none"], whole["reward/std"]) == (1, 0, 0)
    assert whole["staleness/mean"] == pytest.approx((4 * 4 + 4 * 4 + 3 * 3 + 2 * 2) / 13)
    assert whole["rollout/accept_length"] == pytest.approx((4 + 9) / 8)


def test_single_answers_and_steps_that_lost_everything() -> None:
    assert turn_metrics([single(0)]) == {} and turn_metrics([]) == {}
    assert values(turn_metrics([group(0, lost=4)])) == {"turn/lost": 4}
    assert "turn/count" in turn_metrics([group(0, trajectory(turns=1))])  # an environment may end after one


def test_percentiles_are_those_of_the_union() -> None:
    one, other = Percentile.of([1.0, 2.0, 9.0], 0.5), Percentile.of([0.0, 0.0, 0.0, 3.0], 0.5)
    assert (one.value, merge({"p": one}, {"p": other})["p"].value, Percentile.of([], 0.5).value) == (
        2.0, 1.0, pytest.approx(np.nan, nan_ok=True),
    )  # fmt: skip
    with pytest.raises(TypeError, match="cannot merge"):
        merge({"p": one}, {"p": Percentile.of([1.0], 0.9)})


def test_records_know_their_turn_and_single_answers_are_logged_as_before() -> None:
    records = from_groups([group(3, trajectory(first=0.3), trajectory(turns=2))], step=1, version=5)
    assert records.turn.tolist() == [0, 0, 1, 1, 2, 2, 0, 1] and records.answer.tolist() == [0] * 6 + [1] * 2
    assert records.position.tolist() == [OPENING, 0] * 3 + [0, 0]
    assert records.version.tolist() == [0, 0, 1, 1, 2, 2, 0, 1] and set(records.unit.tolist()) == {3}
    again = StepRecords.from_row(records.to_row())
    assert again.turn.tolist() == records.turn.tolist()
    assert merge_records([again, from_groups([single(0)], step=1)]).turn.tolist() == [0, 0, 1, 1, 2, 2, 0, 1, 0, 0]
    plain = from_groups([single(0)], step=1).to_row()
    assert "turn" not in plain and not StepRecords.from_row(plain).turn.any()
    parts = by_key("turn", records)
    assert {name: len(rows) for name, rows in parts.items()} == {"0": 3, "1": 3, "2-3": 2, AFTER: 2}
    assert set(by_key("position", records)) == {"0-63"}


def played(step: int, level: float) -> list[Group]:
    """Trajectories of three turns: the first two as ever, the third with acceptance rates of about ``level``."""
    truths = [
        Truth(entropy=constant(0.5), mismatch=constant(0.0), rates=True, level=rate) for rate in (0.8, 0.7, level)
    ]
    turns = [step_groups(truth, step, seed=i, prompts=8) for i, truth in enumerate(truths)]
    return [
        dataclasses.replace(
            members[0],
            trajectories=tuple(
                Trajectory(turns=tuple(t.turns[0] for t in same), reward=0.0, ended="done")
                for same in zip(*(own.trajectories for own in members), strict=True)
            ),
        )
        for members in zip(*turns, strict=True)
    ]


def test_drift_of_late_turns_is_found_there() -> None:
    monitor = DriftMonitor(MonitorSettings(rate="overlap"))
    for step in range(1, 10):
        monitor.observe(from_groups(played(step, 0.7 if step < 7 else 0.5), step))
    found = monitor.breakdown("turn")
    assert list(found) == ["0", "1", "2-3"]
    assert found["2-3"].unit == "rate" and found["2-3"].change.point == pytest.approx(-0.2, abs=0.03)
    assert found["2-3"].change.excludes_zero() and found["2-3"].change.high < -0.1
    for name in ("0", "1"):
        assert abs(found[name].change.point) < 0.02
    for part in found.values():
        assert part.unidentified or part.change.point == pytest.approx(part.entropy.point + part.mismatch.point)


def test_the_probe_set_takes_turns_with_all_that_came_before() -> None:
    groups = [group(0, *(trajectory() for _ in range(4)))]
    texts = choose(groups, 4)
    assert [text.answer for text in texts] == [(10, 11, 12, 13), (110, 111, 112), (210, 211), (10, 11, 12, 13)]
    assert texts[0].prompt == (1, 2, 3)
    assert texts[1].prompt == (1, 2, 3, 10, 11, 12, 13, 150, 151, 152)
    assert texts[2].prompt == (*texts[1].prompt, 110, 111, 112, 250, 251, 252, 253, 254)
    assert [text.shown for text in texts] == [3, 2, 1, 3]
