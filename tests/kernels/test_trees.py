"""Who follows whom in a tree of drafts, and what its nodes see of a cache."""

import torch

from bebop.kernels.trees import ancestry, visible

#        0   1   2  3  4  5  6
TREES = [[-1, -1, 0, 0, 2, 1, 4], [-1, 0, 1, 2, 3, 4, 5], [-1] * 7]


def test_the_way_to_a_node_is_found_by_following_its_parents() -> None:
    for row, tree in zip(ancestry(torch.tensor(TREES)).tolist(), TREES, strict=True):
        for node in range(len(tree)):
            way, at = {node}, tree[node]
            while at >= 0:
                way, at = way | {at}, tree[at]
            assert {other for other, on in enumerate(row[node]) if on} == way
    assert ancestry(torch.tensor([[-1]])).tolist() == [[[True]]]


def test_a_deep_chain_has_all_before_it() -> None:
    for nodes in (2, 3, 4, 5, 16, 17, 63, 64):
        chain = torch.arange(-1, nodes - 1)[None]
        assert torch.equal(ancestry(chain)[0], torch.ones(nodes, nodes).tril().bool())


def test_a_node_sees_the_text_and_its_way() -> None:
    """Two rows with 2 and 4 entries of text; node 1 of the first tree does not see node 0, its sibling."""
    ways = ancestry(torch.tensor(TREES[:2]))
    seen = visible(torch.tensor([2, 4]), ways, 12)
    assert seen[0, 1].tolist() == [True, True, False, True] + [False] * 8
    assert seen[0, 6].nonzero()[:, 0].tolist() == [0, 1, 2, 4, 6, 8]
    chain = torch.arange(12) <= torch.arange(4, 11)[:, None]
    assert torch.equal(seen[1], chain)
