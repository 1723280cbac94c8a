"""Block drafts: a small network drafts a whole block in one pass, and the block size may adapt."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bebop.systems.base import AuxModel, PartClass
from bebop.systems.block.options import BlockLengthTraining, BlockTraining, EmaOptions
from bebop.systems.speculative import SpeculativeSystem


def _network() -> Any:
    from bebop.systems.block.network import BlockDraftNetwork

    return BlockDraftNetwork


def _job() -> Any:
    from bebop.systems.block.training import BlockTrainer

    return BlockTrainer


def _export() -> Callable[..., str]:
    from bebop.systems.block.dflash import export

    return export


def _length_network() -> Any:
    from bebop.systems.block.network import BlockLengthNetwork

    return BlockLengthNetwork


def _length_job() -> Any:
    from bebop.systems.block.training import BlockLengthTrainer

    return BlockLengthTrainer


BLOCK = AuxModel(
    name="block",
    summary="a drafter of whole blocks",
    job=_job,
    network=_network,
    export=_export,
    options=BlockTraining,
)
BLOCK_LENGTH = AuxModel(
    name="block_length",
    summary="the choice of a block size from a prompt",
    job=_length_job,
    network=_length_network,
    options=BlockLengthTraining,
)


@dataclass(frozen=True, kw_only=True)
class BlockSystem(SpeculativeSystem):
    """System that drafts the tokens of a block in parallel."""

    drafter_name: str = "block"
    draft_tokens: int = 7

    def drafter(self) -> PartClass:
        """Return the drafter of blocks."""
        from bebop.systems.block.decoding import BlockDrafter

        return BlockDrafter

    def training(self) -> tuple[AuxModel, ...]:
        """Return the drafter's network as the part to train."""
        return (BLOCK,)


@dataclass(frozen=True, kw_only=True)
class BlockPilotSystem(BlockSystem):
    """System that chooses a request's block size from its prompt."""

    length_name: str = "block_length"

    def length(self) -> PartClass:
        """Return the draft length that a network chooses."""
        from bebop.systems.block.decoding import BlockLength

        return BlockLength

    def training(self) -> tuple[AuxModel, ...]:
        """Return the drafter's network and the network that chooses the size."""
        return (BLOCK, BLOCK_LENGTH)


@dataclass(frozen=True, kw_only=True)
class BlockEmaSystem(BlockSystem):
    """System that chooses the size of each block from recent acceptance."""

    length_name: str = "ema"

    def length(self) -> PartClass:
        """Return the draft length that follows acceptance."""
        from bebop.systems.block.decoding import EmaLength

        return EmaLength


SYSTEMS = (
    BlockSystem(
        name="block",
        summary="drafts of a whole block in one pass, sampled, accepted with the overlap of draft and target",
        other="block_target_only",
        static=True,
    ),
    BlockSystem(
        name="block_target_only",
        summary="drafts of a whole block in one pass, greedy, accepted with p(argmax q)",
        draft_temperature=0.0,
        sampled=False,
        other="block",
        static=True,
    ),
    BlockPilotSystem(
        name="blockpilot",
        summary="block, of a size that is chosen for each request from its prompt",
        static_verify=True,
        draft_tokens=9,
    ),
    BlockEmaSystem(
        name="block_ema",
        summary="block, of a size that is chosen for each cycle from what was accepted lately",
        static_verify=True,
        options=EmaOptions,
        draft_tokens=9,
    ),
)
