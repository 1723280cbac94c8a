"""Which tree is likeliest to be accepted far: against all trees, and against what comes out of given ranks."""

import itertools
from collections.abc import Sequence

import pytest

from bebop.config.job import DecodingConfig
from bebop.config.tree_shape import Path, TreeOptions, chance, grows, likeliest, rank_chances, reached
from bebop.errors import UserError

TABLE = ((0.5, 0.3, 0.1), (0.6, 0.15), (0.4, 0.3, 0.2))


def best_of_all(table: Sequence[Sequence[float]], nodes: int) -> float:
    """Most drafts that a tree of so many nodes can be expected to keep, all trees tried."""
    every = [p for depth in (1, 2, 3) for p in itertools.product(range(3), repeat=depth)]
    every = [p for p in every if chance(p, table) > 0]
    trees = (set(tree) for tree in itertools.combinations(every, nodes))
    whole = (t for t in trees if all(p[:-1] in t | {()} and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in t) for p in t))
    return max(sum(chance(path, table) for path in tree) for tree in whole)


def kept(tree: Sequence[Path]) -> float:
    return sum(chance(path, TABLE) for path in tree)


@pytest.mark.parametrize("nodes", [1, 2, 3, 4])
def test_no_tree_of_so_many_nodes_keeps_more(nodes: int) -> None:
    tree = likeliest(TABLE, nodes, deepest=3)
    assert grows(tree) and kept(tree) == pytest.approx(best_of_all(TABLE, nodes))
    assert nodes < 2 or kept([(0,), (1,), (2,), (0, 0)][:nodes]) <= kept(tree)
    uniform = likeliest((TABLE[0],), nodes, deepest=3)
    assert nodes < 4 or kept(uniform) < kept(tree), "one row for all depths is not enough here"


def test_it_grows_from_tree_to_tree_and_ends_where_nothing_is_left() -> None:
    every = likeliest(TABLE, 100, deepest=3)
    assert len(every) == 3 + 3 * 2 + 3 * 2 * 3 and max(map(len, every)) == 3
    assert all(likeliest(TABLE, nodes, 3) == every[:nodes] and grows(every[:nodes]) for nodes in range(1, 28))
    assert [chance(p, TABLE) for p in every] == sorted((chance(p, TABLE) for p in every), reverse=True)
    deep = likeliest(((0.5,), (0.9,)), 4)
    assert deep == ((0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)) and chance(deep[-1], ((0.5,), (0.9,))) == 0.5 * 0.9**3
    assert likeliest(((0.1, 0.5),), 1) == ((0,),) and chance((0,), ((0.1, 0.5),)) == 0.5, "chances are put in order"


def test_chances_are_shares_of_ranks() -> None:
    ranks = [(0, 0), (0, 1), (1, 9), (0,), (30, 1)]
    assert rank_chances(ranks, most=8) == ((0.6, 0.2), (0.5, 0.25))
    assert rank_chances([(0, 9, 0)], most=8) == ((1.0,),), "nothing is known below a depth at which nothing was right"


def test_a_tree_is_accepted_as_far_as_the_ranks_lie_in_it() -> None:
    shape = [(0,), (1,), (0, 0), (1, 0)]
    assert [reached(shape, ranks) for ranks in ((0, 0, 0), (1, 0), (1, 1), (2, 0), (0,), ())] == [2, 2, 1, 0, 1, 0]


def test_options_take_a_table_over_ranks_and_a_shape_over_both() -> None:
    assert TreeOptions(chances=TABLE).paths(5, deepest=3) == likeliest(TABLE, 5, 3)
    assert TreeOptions().paths(5, TABLE) == likeliest(TABLE, 5) != TreeOptions().paths(5)
    assert TreeOptions(chances=((0.9,),)).paths(2, TABLE) == ((0,), (0, 0))
    assert TreeOptions(shape=((0,), (1,)), chances=TABLE).paths(2, TABLE) == ((0,), (1,))
    wrongs: tuple[list[list[float]], ...] = ([], [[]], [[0.5], [1.1, 0.2]], [[0.0]])
    for wrong in wrongs:
        with pytest.raises(
            UserError, match=r"options\.chances=.* give a row of numbers above 0, up to 1, for each dep"
        ):
            DecodingConfig(system="bebop_tree", options={"chances": wrong})
