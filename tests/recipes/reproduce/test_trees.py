"""The study of trees: what it counts."""

import torch

from bebop.rollout.decoding.base import Draft
from bebop.rollout.decoding.rules import TreeWalk
from recipes.reproduce.trees.decoding import FEWEST, CountsRanks

PARENTS = torch.tensor([[-1, -1, 0, 0, 1]])


def counted(kind: type[TreeWalk], tokens: list[int], cycles: int) -> CountsRanks:
    """Greedy drafts of a tree of five, of which the target wants token 1, then 4."""
    rule = kind()
    assert isinstance(rule, CountsRanks)
    probs = torch.zeros(1, 6, 5)
    probs[:, :, 4], probs[:, 0] = 1.0, torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0])
    draft = Draft(tokens=torch.tensor([tokens]), probs=None, parents=PARENTS, depth=2)
    out = type("Out", (), {"probs": probs})()
    for _ in range(cycles):
        rule.accept(None, draft, out, torch.full((1, 7), 0.5))  # type: ignore[arg-type]
    return rule


def test_children_of_accepted_nodes_are_counted_by_depth_and_rank() -> None:
    rule = counted(CountsRanks, [2, 1, 0, 0, 4], 3)
    assert rule.offered[:3, :3].tolist() == [[3, 3, 0], [3, 0, 0], [0, 0, 0]]
    assert rule.accepted[:3, :3].tolist() == [[0, 3, 0], [3, 0, 0], [0, 0, 0]]
    assert counted(CountsRanks, [1, 2, 0, 4, 0], 3).accepted[:2, :2].tolist() == [[3, 0], [0, 3]]
    assert rule.chances() == () and counted(CountsRanks, [2, 1, 0, 0, 4], FEWEST).chances() == ((1.0,), (1.0,))
