"""The oldest weights behind a group, which is what staleness is measured by."""

import numpy as np

from bebop.buffer import GroupBuffer
from bebop.trajectory import Completion, Group, Prompt, Trajectory


def test_the_oldest_version_is_that_of_any_token_of_any_answer() -> None:
    answers = [
        Completion(token_ids=np.arange(3), logprobs=np.zeros(3, np.float32), versions=np.array(versions))
        for versions in ([4, 5, 6], [6, 3, 6], [7, 7, 7])
    ]
    prompt = Prompt(index=0, task="test", text="", token_ids=(1,), item={})
    group = Group(prompt=prompt, trajectories=tuple(Trajectory(completion=a, reward=0.0) for a in answers))
    assert group.oldest_version == 3


def test_groups_that_were_trained_on_are_not_restored() -> None:
    def group(index: int) -> Group:
        return Group(prompt=Prompt(index=index, task="test", text="", token_ids=(1,), item={}), trajectories=())

    buffer = GroupBuffer(2, 1)
    buffer.restore({"version": 2, "groups_per_batch": 2, "ready": [group(1), group(3), group(4), group(6)]})
    assert list(buffer.ready) == [4, 6] and buffer.admit() == [5, 7]
