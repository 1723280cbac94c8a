"""Tree drafts of the model's own MTP head: several tokens per position, all nodes of a depth from one pass."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from bebop.config.job import DecodingConfig
from bebop.config.tree_shape import TreeOptions
from bebop.errors import UserError
from bebop.kernels.tree_verify import ancestry
from bebop.kernels.verify import sample
from bebop.model.backbone import Policy
from bebop.rollout.decoding.base import Draft, DraftLength, Rows
from bebop.rollout.decoding.mtp import HeadDrafter
from bebop.rollout.decoding.sampling import entropy
from bebop.rollout.slots import Slots


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Nodes of one depth. Parents (nodes of the previous depth with children) are in order; indices refer to that
    order.
    """

    children: tuple[tuple[Tensor, Tensor], ...]  # by rank: indices of parents, and their child nodes
    inner: Tensor  # nodes of this depth that have children themselves
    above: Tensor  # for each of them, the index of its parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Tree of fixed shape; nodes are numbered depth by depth."""

    parents: Tensor  # [K]
    ways: Tensor  # [K, K] (bool) the ancestors of each node, itself included
    order: Tensor  # [K] index of each node among all children in ``levels``
    levels: tuple[Level, ...]

    @classmethod
    def of(cls, paths: tuple[tuple[int, ...], ...], device: torch.device) -> Self:
        """Create a tree from the paths of its nodes, in any order."""
        ordered = sorted(paths, key=lambda path: (len(path), path))
        number = {path: i for i, path in enumerate(ordered)} | {(): -1}
        levels, above = [], [()]  # type: list[Level], list[tuple[int, ...]]
        for depth in range(1, len(ordered[-1]) + 1):
            nodes = [path for path in ordered if len(path) == depth]
            inner = [path for path in nodes if (*path, 0) in number]
            ranks = [[path for path in nodes if path[-1] == r] for r in range(1 + max(path[-1] for path in nodes))]
            places = [
                torch.tensor([above.index(path[:-1]) for path in part], dtype=torch.long, device=device)
                for part in [*ranks, inner]
            ]
            numbers = [torch.tensor([number[path] for path in part], device=device) for part in [*ranks, inner]]
            children = tuple(zip(places[:-1], numbers[:-1], strict=True))
            levels.append(Level(children=children, inner=numbers[-1], above=places[-1]))
            above = inner
        parents = torch.tensor([number[path[:-1]] for path in ordered], device=device)
        order = torch.cat([nodes for level in levels for _, nodes in level.children]).argsort()
        return cls(parents=parents, ways=ancestry(parents[None])[0], order=order, levels=tuple(levels))


class MTPTreeDrafter(HeadDrafter):
    """Drafter that samples the children of a node one after another without replacement, from the head's distribution
    without the earlier siblings. At temperature 0 they are the likeliest tokens.

    The shape does not depend on the drawn tokens: no node is dropped for being unlikely, which would bias the output.
    """

    def __init__(self, policy: Policy, slots: Slots, config: DecodingConfig) -> None:
        super().__init__(policy, slots, config)
        paths = config.of(TreeOptions).paths(config.limit)
        widest = 1 + max(path[-1] for path in paths)
        if widest > policy.vocab_size:
            raise UserError(
                f"decoding.options: {widest} children need as many tokens, and there are {policy.vocab_size}"
            )
        self.tree = Tree.of(paths, slots.device)

    def propose(self, rows: Rows, length: DraftLength) -> Draft:
        """Draft the next tokens of every row.

        A length that is known beforehand counts nodes; the other nodes are drafted anyway.
        """
        tree, batch, seen = self.tree, rows.batch, rows.seen
        every = torch.arange(batch, device=rows.last.device)[:, None]
        tokens = rows.last.new_empty(batch, len(tree.parents))
        probs: list[Tensor] = []
        hidden = self.hidden[:batch, None]  # [B, n, d] of the n nodes of a depth with children
        marks = None if seen is None else seen[:, None]  # [B, n, V] what penalties see there
        for depth, level in enumerate(tree.levels):
            logits = self.policy.logits(hidden)
            for places, nodes in level.children:
                there = None if marks is None else marks[:, places]
                probs.append(rows.probs(logits[:, places], there, self.temperature))
                tokens[:, nodes] = sample(probs[-1], rows.uniforms[:, nodes])
                # The next sibling is drawn from the remaining mass.
                logits = logits.index_put((every, places, tokens[:, nodes]), logits.new_full((), -torch.inf))
            if depth + 1 < len(tree.levels):
                drawn = tokens[:, level.inner]
                hidden = self._expand(rows, level, depth, drawn, hidden[:, level.above])
                marks = None if marks is None else marks[:, level.above].scatter(-1, drawn[..., None], True)
        drawn_from = torch.cat(probs, 1)[:, tree.order]
        return Draft(
            tokens=tokens,
            probs=None if self.temperature == 0 else drawn_from,
            lengths=length.start(rows),
            entropies=entropy(drawn_from),
            forwards=len(tree.levels),
            parents=tree.parents.expand(batch, -1),
            depth=len(tree.levels),
        )

    def _expand(self, rows: Rows, level: Level, depth: int, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return states [B, n, d] at nodes of a depth, from their tokens [B, n] and their parents' states [B, n, d].

        Each node sees the text and its path down the tree. Cache entries are ordered by node, position ids by depth.
        """
        positions = (rows.fed + depth)[:, None].expand_as(tokens)
        ways = self.tree.ways[level.inner].expand(rows.batch, -1, -1)
        self.cache.place(rows.fed[:, None] + level.inner, rows.used, (rows.fed, ways))
        return self.head(self.policy.embed(tokens), hidden, positions, self.cache)
