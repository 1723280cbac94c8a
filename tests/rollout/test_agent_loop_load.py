"""Very many trajectories at a time, and environments that are killed at work: nothing is lost, nothing made up."""

from pathlib import Path

import pytest

from bebop.tasks.environment import find_kind, load_class
from bebop.trajectory import Trajectory
from tests.rollout import hard_environments
from tests.rollout.test_agent_loop import SIZE, made, played, trajectories, worker  # noqa: F401 - made is a fixture

HARD = Path(hard_environments.__file__).resolve()
RESTARTS = 1


@pytest.mark.slow
def test_what_is_killed_is_counted_exactly(made: list, tmp_path: Path) -> None:  # type: ignore[type-arg] # noqa: F811
    """Every death is a restart, or one of those after which a member was given up; no reward is made up."""
    prompts = 40
    limits = {"max_restarts": RESTARTS, "processes": 4}
    one = worker(made, limits, name=f"{HARD}:Fragile", folder=str(tmp_path))
    parts = played(one, count=prompts)
    assert sorted((part.prompt.index, m) for part in parts for m in part.members) == [
        (index, member) for index in range(prompts) for member in range(SIZE)
    ]
    kept: list[Trajectory] = [t for _, t in trajectories(parts)]
    lost = prompts * SIZE - len(kept)
    deaths = len([*tmp_path.iterdir()])
    assert deaths > 0 and sum(t.restarts for t in kept) + lost * (RESTARTS + 1) == deaths
    for trajectory in kept:
        steps = sum(turn.completion.finish_reason == "stop" for turn in trajectory.turns)
        assert trajectory.reward == steps and (trajectory.ended == "length" or steps == 3)


@pytest.mark.slow
def test_many_are_open_on_few_slots(made: list) -> None:  # type: ignore[type-arg] # noqa: F811
    """256 trajectories wait for their environments at a time, on 32 slots."""
    name, wanted = f"{HARD}:Gate", 256
    one = worker(made, name=name, wanted=wanted, slots=32, longest=200)
    found = trajectories(played(one, count=wanted // SIZE))
    assert len(found) == wanted and load_class(find_kind(name).make).most == wanted  # type: ignore[attr-defined]
    assert {(t.ended, t.reward) for _, t in found} <= {("done", 1.0), ("length", 0.0)}  # some never stop by themselves
    assert sum(t.reward for _, t in found) > wanted / 2
