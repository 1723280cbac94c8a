"""Which tree is drafted: the likeliest nodes, or a shape that was given; and which are refused."""

import pytest

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.options import TreeOptions
from bebop.rollout.torch_engine import TorchEngine
from tests.builders import tiny_policy

FIVE = [[0], [1], [0, 0], [0, 1], [1, 0]]


def test_the_likeliest_nodes_by_rank() -> None:
    """0.5 0.3: 0 .5, 1 .3, 00 .25, 01 .15, 10 .15, 000 .125."""
    options = TreeOptions(ranks=(0.5, 0.3))
    assert options.paths(3) == ((0,), (1,), (0, 0)) and set(options.paths(5)) == {*options.paths(3), (0, 1), (1, 0)}
    assert options.paths(6)[-1] == (0, 0, 0)
    for nodes in range(1, 65):
        paths = TreeOptions().paths(nodes)
        assert len(set(paths)) == nodes
        given = DecodingConfig(system="bebop_tree", draft_tokens=nodes, options={"shape": paths}).of(TreeOptions)
        assert given.paths(nodes) == paths, "a shape that can be given"
    assert TreeOptions(ranks=(0.9,)).paths(3) == ((0,), (0, 0), (0, 0, 0))


@pytest.mark.parametrize(
    "shape",
    [[], [[]], [[1]], [[0, 0]], [[0], [0]], [[0], [0, 1]], [[-1]], [[0], [0, -1]], [[0] * n for n in range(1, 66)]],
)
def test_a_shape_that_does_not_grow_is_refused(shape: list[list[int]]) -> None:
    with pytest.raises(
        UserError, match=r"^decoding\.options\.shape=.* is not possible: give 1 to 64 paths, each after"
    ):
        DecodingConfig(system="bebop_tree", draft_tokens=1, options={"shape": shape})


def test_more_nodes_than_there_are_and_more_children_than_tokens_are_refused() -> None:
    with pytest.raises(UserError, match=r"decoding\.draft_tokens=65 .* give 1 to 64 with decoding.system=bebop_tree$"):
        DecodingConfig(system="bebop_tree", draft_tokens=65)
    words = r"decoding\.draft_tokens=6 .* give 1 to 5 with decoding.system=bebop_tree and its shape$"
    with pytest.raises(UserError, match=words):
        DecodingConfig(system="bebop_tree", draft_tokens=6, options={"shape": FIVE})
    with pytest.raises(UserError, match="6 children need as many tokens, and there are 5"):
        wide = DecodingConfig(system="bebop_tree", draft_tokens=6, options={"shape": [[rank] for rank in range(6)]})
        TorchEngine(tiny_policy(5), wide, slots=1, max_length=16)
    with pytest.raises(UserError, match=r"options\.ranks=.* give numbers above 0 that sum to 1 or less"):
        DecodingConfig(system="bebop_tree", options={"ranks": [0.9, 0.2]})
