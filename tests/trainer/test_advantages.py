import numpy as np
import pytest

from bebop.trainer.advantages import ADVANTAGES, group_normalised, leave_one_out, mean_only

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
    assert not ADVANTAGES[name](np.full((2, 3), 0.1)).round(9).any()
    both = ADVANTAGES[name](REWARDS)
    np.testing.assert_array_equal(both[1:], ADVANTAGES[name](REWARDS[1:]))
