import numpy as np
import pytest

from bebop.trainer.advantages import ADVANTAGES, advantages, group_normalised, leave_one_out, mean_only
from bebop.trajectory import Group, Prompt, Trajectory
from tests.trainer.builders import completion

REWARDS = np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.0, 4.0]])


def test_mean_only_by_hand() -> None:
    np.testing.assert_allclose(mean_only(REWARDS), [[0.75, -0.25, -0.25, -0.25], [0, 0, -2, 2]])


def test_leave_one_out_by_hand() -> None:
    # 1 - (0 + 0 + 0) / 3; 0 - (1 + 0 + 0) / 3; 2 - (2 + 0 + 4) / 3; ...
    third = 1 / 3
    np.testing.assert_allclose(leave_one_out(REWARDS), [[1, -third, -third, -third], [0, 0, -8 / 3, 8 / 3]], atol=1e-12)


def test_group_normalised_divides_by_the_population_deviation() -> None:
    # Deviations sqrt(3) / 4 and sqrt(2).
    by_hand = np.array([[3, -1, -1, -1], [0, 0, -2, 2]]) / np.sqrt([[3.0], [2.0]])
    np.testing.assert_allclose(group_normalised(REWARDS, eps=0.0), by_hand)
    sample = mean_only(REWARDS) / REWARDS.std(axis=1, ddof=1, keepdims=True)
    assert np.abs(group_normalised(REWARDS) - sample).max() > 0.1


@pytest.mark.parametrize("name", ADVANTAGES)
def test_equal_rewards_give_no_signal_and_groups_do_not_mix(name: str) -> None:
    for reward, size in [(0.1, 3), (1e9 + 0.1, 7), (-3.3e12, 5), (1e-9, 6), (1e308, 7)]:  # the last sum is infinite
        with np.errstate(over="ignore"):
            assert not ADVANTAGES[name](np.full((2, size), reward)).any()
    both = ADVANTAGES[name](REWARDS)
    np.testing.assert_array_equal(both[1:], ADVANTAGES[name](REWARDS[1:]))


def members(*rewards: float, lost: int = 0) -> Group:
    empty = completion([1])
    prompt = Prompt(index=0, task="", text="", token_ids=(1,), item={})
    return Group(prompt=prompt, trajectories=tuple(Trajectory.single(empty, reward) for reward in rewards), lost=lost)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_members_that_are_there_are_compared_with_one_another(name: str) -> None:
    """One advantage a trajectory; whoever was lost is neither a zero nor a row."""
    groups = [
        members(*REWARDS[0]),
        members(1.0, 0.0, lost=2),
        members(3.0, lost=3),
        members(lost=4),
        members(*REWARDS[1]),
    ]
    found = advantages(groups, name)
    by_hand = [ADVANTAGES[name](np.array([rewards])).ravel() for rewards in ([*REWARDS[0]], [1.0, 0.0], [*REWARDS[1]])]
    np.testing.assert_array_equal(found, np.concatenate([by_hand[0], by_hand[1], [0.0], by_hand[2]]))
    assert found[4] == -found[5] > 0.4
    assert advantages([members(lost=2)], name).shape == (0,)


@pytest.mark.parametrize("name", ADVANTAGES)
def test_whole_groups_have_the_advantages_of_a_matrix_to_the_bit(name: str) -> None:
    rewards = np.random.default_rng(0).normal(size=(40, 8))
    np.testing.assert_array_equal(
        advantages([members(*row) for row in rewards], name), ADVANTAGES[name](rewards).ravel()
    )
