"""Shapes of draft trees: static shapes, chosen by how often drafts of a depth and rank are right.

The name of a node is its path: the rank of each draft on the way to it among its siblings, from 0. So (0,) is the
likeliest first draft, and (0, 2) the third after it. The module does not import torch, because settings use it.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from bebop.config.fields import Limit, SystemOptions, setting

MAX_NODES = 64  # of a tree of drafts
Path = tuple[int, ...]


def grows(shape: Iterable[Sequence[int]]) -> bool:
    """Return whether every path follows its parent's and its previous sibling's path, without repeats.

    The shape must have 1 to ``MAX_NODES`` nodes.
    """
    known: set[Path] = {()}
    for path in map(tuple, shape):
        before = path[:-1] if not path or path[-1] == 0 else (*path[:-1], path[-1] - 1)
        if path in known or path[:-1] not in known or before not in known:
            return False
        known.add(path)
    return 1 < len(known) <= MAX_NODES + 1


def likeliest(chances: Sequence[Sequence[float]], nodes: int, deepest: int | None = None) -> tuple[Path, ...]:
    """Return the tree that greedy addition of nodes finds: each time the likeliest remaining node (arXiv 2401.10774).

    Args:
        chances: by depth, the probability of each rank to be right if the drafts before it were, above 0. The last row
            also applies to greater depths. Rows are sorted.
        nodes: number of nodes.
        deepest: the last depth; None: any.

    Returns:
        Paths by falling product of probabilities, so that the first n are the tree of n nodes. If the probabilities
            held in
        every context, no tree of this size would have a longer accepted path. There are fewer paths if no more are
        possible.
    """
    table = [sorted(row, reverse=True) for row in chances]
    paths: list[Path] = []
    waiting: list[tuple[float, Path]] = [(-table[0][0], (0,))]  # the next child of every node
    while waiting and len(paths) < nodes:
        chance, path = heappop(waiting)
        paths.append(path)
        own, below = (table[min(depth, len(table) - 1)] for depth in (len(path) - 1, len(path)))
        if deepest is None or len(path) < deepest:
            heappush(waiting, (chance * below[0], (*path, 0)))
        if path[-1] + 1 < len(own):
            heappush(waiting, (chance / own[path[-1]] * own[path[-1] + 1], (*path[:-1], path[-1] + 1)))
    return tuple(paths)


def chance(path: Path, chances: Sequence[Sequence[float]]) -> float:
    """Return the probability that all drafts on the path to a node are right."""
    product = 1.0
    for depth, rank in enumerate(path):
        row = sorted(chances[min(depth, len(chances) - 1)], reverse=True)
        product *= row[rank] if rank < len(row) else 0.0
    return product


def numbered(shape: Iterable[Path]) -> tuple[list[Path], list[int]]:
    """Return the paths by depth, each after its parent and earlier siblings, and the number of its parent, or -1."""
    ordered = sorted(shape, key=lambda path: (len(path), path))
    number = {path: i for i, path in enumerate(ordered)} | {(): -1}
    return ordered, [number[path[:-1]] for path in ordered]


def on_likeliest(shape: Collection[Path], chances: Sequence[Sequence[float]], paths: int) -> set[Path]:
    """Return the nodes on the paths to the ``paths`` likeliest leaves; ties keep the order of ``shape``."""
    leaves = [path for path in shape if (*path, 0) not in shape]
    leaves.sort(key=lambda path: -chance(path, chances))
    return {leaf[:depth] for leaf in leaves[:paths] for depth in range(1, len(leaf) + 1)}


def rank_chances(ranks: Iterable[Sequence[int]], most: int = 16) -> tuple[tuple[float, ...], ...]:
    """Return how often the right token had rank 0, 1, ... at each depth, in the format of ``likeliest``.

    ``ranks``: for each context, the rank of the actual token in the drafts of depth 1, 2, ...; rows may differ in
    length. Ranks from ``most`` on, and ranks that never occurred, are left out.
    """
    rows = [tuple(row) for row in ranks]
    table = []
    for depth in range(max(map(len, rows))):
        found = [row[depth] for row in rows if depth < len(row)]
        shares = [found.count(rank) / len(found) for rank in range(most)]
        if not any(shares):
            break
        table.append(tuple(sorted((share for share in shares if share > 0), reverse=True)))
    return tuple(table)


def reached(shape: Collection[Path], ranks: Sequence[int]) -> int:
    """Return the accepted depth of a tree at temperature 0, if the next tokens have these ranks in their drafts."""
    depth = 0
    while depth < len(ranks) and tuple(ranks[: depth + 1]) in shape:
        depth += 1
    return depth


# ---- settings

CHANCES = Limit(
    lambda ranks: bool(ranks) and sum(ranks) <= 1 and all(0 < chance < 1 for chance in ranks),
    "give numbers above 0 that sum to 1 or less",
)
TABLE = Limit(
    lambda table: bool(table) and all(row and all(0 < chance <= 1 for chance in row) for row in table),
    "give a row of numbers above 0, up to 1, for each depth",
)
SHAPE = Limit(
    grows, f"give 1 to {MAX_NODES} paths, each after its parent and its sibling before, as [[0], [1], [0, 0]]"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeOptions(SystemOptions):
    """Shape of the draft tree, which has ``draft_tokens`` nodes in all."""

    shape: tuple[tuple[int, ...], ...] | None = setting(
        None, "paths of its nodes, numbers of children from 0; the first draft_tokens count; null: from ranks", SHAPE
    )
    ranks: tuple[float, ...] = setting(
        lambda: (0.6, 0.2, 0.1), "chance of a first, second, ... child to be accepted: the likeliest nodes", CHANCES
    )
    chances: tuple[tuple[float, ...], ...] | None = setting(
        None, "the same for each depth, beyond the last as there; null: the drafter's own, else ranks", TABLE
    )

    @property
    def most_drafts(self) -> int:
        """Return the largest allowed value of ``draft_tokens``."""
        return MAX_NODES if self.shape is None else len(self.shape)

    def table(self, known: Sequence[Sequence[float]] = ()) -> Sequence[Sequence[float]]:
        """Return probabilities of children by depth; ``known`` are the drafter's own."""
        return self.chances or known or (self.ranks,)

    def paths(
        self, nodes: int, known: Sequence[Sequence[float]] = (), deepest: int | None = None
    ) -> tuple[tuple[int, ...], ...]:
        """Return the paths of the tree with ``nodes`` nodes, parents before children and siblings in order.

        Without a ``shape`` they are the likeliest ones down to depth ``deepest``.
        """
        return likeliest(self.table(known), nodes, deepest) if self.shape is None else self.shape[:nodes]
