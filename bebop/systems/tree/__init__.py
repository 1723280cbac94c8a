"""Tree drafts of the model's own MTP head; verification keeps the accepted path."""

from dataclasses import dataclass

from bebop.config.tree_shape import MAX_NODES, TreeOptions
from bebop.systems.base import PartClass
from bebop.systems.speculative import SpeculativeSystem


@dataclass(frozen=True, kw_only=True)
class TreeSystem(SpeculativeSystem):
    """System that drafts several candidate tokens per position."""

    drafter_name: str = "mtp_tree"
    rule_name: str = "tree_walk"
    head: bool = True
    draft_tokens: int = 7
    tree: bool = True
    width: int = MAX_NODES
    options: type | None = TreeOptions

    def drafter(self) -> PartClass:
        """Return the drafter of trees."""
        from bebop.systems.tree.decoding import MTPTreeDrafter

        return MTPTreeDrafter

    def rule(self) -> PartClass:
        """Return the acceptance rule that walks down a tree."""
        from bebop.rollout.decoding.rules import TreeWalk

        return TreeWalk


SYSTEMS = (
    TreeSystem(
        name="bebop_tree",
        summary="bebop, several drafts for a place: a tree, of which the accepted path is kept",
        static=True,
    ),
)
