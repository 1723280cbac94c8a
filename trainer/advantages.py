"""Advantages: how much better an answer is than the other answers to its prompt.

Pure functions of rewards [n_groups, G], one row a group, every group complete; the result has the same shape. An answer
in a group whose rewards are all equal gets 0.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from bebop.trajectory import Group

Rewards = NDArray[np.float64]


def group_normalised(rewards: Rewards, eps: float = 1e-6) -> Rewards:
    """(r - mean) / (std + eps), SPEC Eq. 3; the *population* standard deviation, the one reported as ``reward/std``."""
    return mean_only(rewards) / (rewards.std(axis=1, keepdims=True) + eps)


def mean_only(rewards: Rewards) -> Rewards:
    """r - mean: without the division that weighs nearly solved and nearly hopeless prompts up."""
    return rewards - rewards.mean(axis=1, keepdims=True)


def leave_one_out(rewards: Rewards) -> Rewards:
    """r - mean of the *other* answers: an unbiased baseline; equals ``mean_only`` times G / (G - 1)."""
    size = rewards.shape[1]
    return mean_only(rewards) * size / (size - 1)


ADVANTAGES: dict[str, Callable[[Rewards], Rewards]] = {
    "group_normalised": group_normalised,
    "mean_only": mean_only,
    "leave_one_out": leave_one_out,
}


def advantages(groups: Sequence[Group], name: str) -> Rewards:
    """Advantages [n_groups, G] of complete groups by the function ``name`` of ``ADVANTAGES``."""
    rewards = np.array([[t.reward for t in group.trajectories] for group in groups], dtype=np.float64)
    return ADVANTAGES[name](rewards)
