"""Advantages: how much better an answer is than the other answers to its prompt; one number a trajectory.

Pure functions of rewards [n_groups, G], one row a group; the result has the same shape. An answer in a group whose
rewards are all equal gets 0, and so does one that is alone: there is nothing to compare it with, so that a group of one
member teaches nothing (beyond a KL term). Members that were lost with their environments are in no group: those that
are there are compared with one another.
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
    """r - mean: without the division that weighs nearly solved and nearly hopeless prompts up.

    Where all are equal it is 0 and not what the mean was rounded by: a division by a deviation of 0 would make 0.1 of
    that, where rewards are large.
    """
    equal = (rewards == rewards[:, :1]).all(axis=1, keepdims=True)
    return np.where(equal, 0.0, rewards - rewards.mean(axis=1, keepdims=True))


def leave_one_out(rewards: Rewards) -> Rewards:
    """r - mean of the *other* answers: an unbiased baseline; equals ``mean_only`` times G / (G - 1)."""
    size = rewards.shape[1]
    return mean_only(rewards) * size / max(size - 1, 1)


ADVANTAGES: dict[str, Callable[[Rewards], Rewards]] = {
    "group_normalised": group_normalised,
    "mean_only": mean_only,
    "leave_one_out": leave_one_out,
}


def advantages(groups: Sequence[Group], name: str) -> Rewards:
    """Advantages [N] of all trajectories, group by group, by the function ``name`` of ``ADVANTAGES``.

    Groups may have fewer members than others, or none.
    """
    rewards = [np.array([[t.reward for t in group.trajectories]], dtype=np.float64) for group in groups]
    found = [ADVANTAGES[name](row)[0] for row in rewards if row.size]
    return np.concatenate([np.zeros(0), *found])
