"""What the real engine and real environments leave behind is what monitor and file make of trajectories by turn."""

from pathlib import Path

import numpy as np
import pytest

from bebop.metrics import values
from bebop.monitor.drift import by_key
from bebop.monitor.estimators import rollout_metrics
from bebop.monitor.records import AFTER, from_groups
from bebop.trajectories import NAME, Trajectories
from bebop.trajectory import OPENING, DecodeStats, Group
from bebop.trajectory_log import TrajectoryLog
from tests.rollout.test_agent_loop import made, played, trajectories, worker  # noqa: F401  (made is a fixture)


def test_turns_of_the_engine_are_measured_and_stored(made: list, tmp_path: Path) -> None:  # noqa: F811
    found = trajectories(played(worker(made, turns=4), count=3))
    groups = [
        Group(prompt=prompt, trajectories=tuple(t for p, t in found if p.index == prompt.index))
        for _, prompt in sorted({p.index: p for p, _ in found}.items())
    ]
    got = values(rollout_metrics(groups, version=0))
    members = [t for _, t in found]
    assert got["turn/count"] == pytest.approx(np.mean([len(t.turns) for t in members]))
    later = [turn.completion for t in members for turn in t.turns[1:]]
    first = sum((dict(c.stretches)[OPENING] for c in later), DecodeStats())
    assert first.cycles == len(later) > 6
    assert got["turn/overlap/after/1"] == pytest.approx(first.overlap[0] / first.reached[0])
    assert 0 < got["turn/overlap/after/1"] < 1
    whole = sum((turn.completion.stats for t in members for turn in t.turns), DecodeStats())
    kinds = by_key("turn", from_groups(groups, step=1))
    assert list(kinds) == ["0", "1", "2-3", AFTER]
    assert sum(float(kinds[name].cycles.sum()) for name in ("0", "1", "2-3")) == whole.cycles
    log = TrajectoryLog(tmp_path / NAME, "all", str, 2)
    log.write(1, groups, 0, "bebop", {})
    log.close()
    with Trajectories(tmp_path / NAME) as stored:
        for answer, trajectory in zip(
            stored.answers(range(1, 2)), (t for g in groups for t in g.trajectories), strict=True
        ):
            assert answer.ids.tolist() == trajectory.completion.token_ids.tolist()
            assert (answer.marks >= 0).tolist() == trajectory.completion.written.tolist()
            assert answer.written == trajectory.written
