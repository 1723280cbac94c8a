"""Base classes of most systems: rejection sampling, a fixed number of drafts, and a draft-and-verify cycle."""

from dataclasses import dataclass

from bebop.systems.base import PartClass, System


@dataclass(frozen=True, kw_only=True)
class SpeculativeSystem(System):
    """System that drafts and verifies by rejection sampling. The base class drafts nothing: one token per pass."""

    def rule(self) -> PartClass:
        """Return the class of its acceptance rule."""
        from bebop.rollout.decoding.rules import Rejection

        return Rejection

    def length(self) -> PartClass:
        """Return the class that decides the number of drafts."""
        from bebop.rollout.decoding.lengths import FixedLength

        return FixedLength

    def auto_length(self) -> PartClass:
        """Return the class behind ``draft_tokens=auto``: as many drafts in all rows as pay off."""
        from bebop.rollout.decoding.timed_lengths import CostLength

        return CostLength

    def decoder(self) -> PartClass:
        """Return the class of its decoding cycle."""
        from bebop.rollout.decoding.draft_verify import DraftVerify

        return DraftVerify


@dataclass(frozen=True, kw_only=True)
class MTPSystem(SpeculativeSystem):
    """System that drafts a chain with the model's MTP head."""

    drafter_name: str = "mtp"
    head: bool = True
    supports_auto_temperature: bool = True

    def drafter(self) -> PartClass:
        """Return the drafter of chains."""
        from bebop.rollout.decoding.mtp import MTPDrafter

        return MTPDrafter
