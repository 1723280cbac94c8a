"""Systems without trained parts: plain decoding, drafts of the model's MTP head, and n-gram lookup in the context."""

from dataclasses import dataclass
from typing import Any

from bebop.systems.base import AuxModel, PartClass
from bebop.systems.speculative import MTPSystem, SpeculativeSystem


def _head_job() -> Any:
    from bebop.adaptation.job import Adaptation

    return Adaptation


PARTS = (AuxModel(name="head", summary="the MTP head of the checkpoint", job=_head_job),)


@dataclass(frozen=True, kw_only=True)
class AdaptiveSystem(MTPSystem):
    """System that drafts only while the draft's entropy makes it pay off."""

    length_name: str = "entropy"

    def length(self) -> PartClass:
        """Return the draft length that depends on entropy."""
        from bebop.rollout.decoding.lengths import EntropyLength

        return EntropyLength


@dataclass(frozen=True, kw_only=True)
class BlockVerifySystem(MTPSystem):
    """System that verifies the drafts of a cycle as a whole."""

    rule_name: str = "block"

    def rule(self) -> PartClass:
        """Return block verification."""
        from bebop.rollout.decoding.rules import BlockRule

        return BlockRule


@dataclass(frozen=True, kw_only=True)
class NgramSystem(SpeculativeSystem):
    """System that looks up drafts in the context."""

    drafter_name: str = "ngram"
    sampled: bool = False

    def drafter(self) -> PartClass:
        """Return the n-gram lookup drafter."""
        from bebop.rollout.decoding.ngram import NgramDrafter

        return NgramDrafter


SYSTEMS = (
    SpeculativeSystem(name="autoregressive", summary="plain decoding, one token per pass", static=True),
    MTPSystem(
        name="target_only",
        summary="greedy MTP drafts, accepted with p(argmax q)",
        draft_temperature=0.0,
        supports_auto_temperature=False,
        sampled=False,
        other="bebop",
        static=True,
    ),
    MTPSystem(
        name="bebop",
        summary="sampled MTP drafts, accepted with the overlap of draft and target",
        other="target_only",
        static=True,
    ),
    AdaptiveSystem(
        name="bebop_adaptive",
        summary="bebop, drafting on only while the draft's entropy makes it pay",
        draft_tokens=5,
        static=True,
    ),
    BlockVerifySystem(name="bebop_block", summary="bebop, the drafts of a cycle verified as a whole", static=True),
    NgramSystem(name="ngram", summary="drafts looked up in the context", static_verify=True),
)
