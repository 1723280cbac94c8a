"""FIRP: drafts from hidden states of future tokens, computed within the target's own passes."""

from dataclasses import dataclass
from typing import Any

from bebop.config.tree_shape import MAX_NODES
from bebop.systems.base import AuxModel, PartClass
from bebop.systems.firp.options import FirpOptions, FirpTraining
from bebop.systems.speculative import SpeculativeSystem


def _network() -> Any:
    from bebop.systems.firp.network import PseudoStates

    return PseudoStates


def _job() -> Any:
    from bebop.systems.firp.training import FirpTrainer

    return FirpTrainer


FIRP = AuxModel(
    name="firp",
    summary="hidden states of future tokens, made between the target's layers",
    job=_job,
    network=_network,
    options=FirpTraining,
)


@dataclass(frozen=True, kw_only=True)
class FirpSystem(SpeculativeSystem):
    """System that drafts a chain from pseudo hidden states."""

    drafter_name: str = "firp"
    serve_error: str = "its drafts come out of the target's own passes, between whose layers positions of its own enter"

    def drafter(self) -> PartClass:
        """Return the drafter of chains and trees."""
        from bebop.systems.firp.decoding import FirpDrafter

        return FirpDrafter

    def training(self) -> tuple[AuxModel, ...]:
        """Return the matrices as the part to train."""
        return (FIRP,)


@dataclass(frozen=True, kw_only=True)
class FirpTreeSystem(FirpSystem):
    """System that drafts a tree from pseudo hidden states."""

    rule_name: str = "tree_walk"
    draft_tokens: int = 16
    tree: bool = True
    width: int = MAX_NODES
    options: type | None = FirpOptions

    def rule(self) -> PartClass:
        """Return the acceptance rule that walks down a tree."""
        from bebop.rollout.decoding.rules import TreeWalk

        return TreeWalk


SYSTEMS = (
    FirpTreeSystem(
        name="firp",
        summary="a tree of drafts from hidden states of future tokens, made within the target's own passes",
    ),
    FirpSystem(
        name="firp_chain",
        summary="drafts from hidden states of future tokens, made within the target's own passes",
    ),
)
