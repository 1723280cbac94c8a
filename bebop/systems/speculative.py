"""What most systems have in common: rejection sampling, a fixed number of drafts, one cycle of draft and check."""

from dataclasses import dataclass

from bebop.systems.base import PartClass, System


@dataclass(frozen=True, kw_only=True)
class SpeculativeSystem(System):
    """Drafts and verifies by rejection sampling. As it is, it drafts nothing: one token per pass."""

    def rule(self) -> PartClass:
        """Return the class of its acceptance rule."""
        from bebop.rollout.decoding.rules import Rejection

        return Rejection

    def length(self) -> PartClass:
        """Return the class that says how many tokens are drafted."""
        from bebop.rollout.decoding.lengths import FixedLength

        return FixedLength

    def auto_length(self) -> PartClass:
        """Return the class behind ``draft_tokens=auto``: as many drafts in all rows as pay."""
        from bebop.rollout.decoding.timed_lengths import CostLength

        return CostLength

    def decoder(self) -> PartClass:
        """Return the class of its cycle."""
        from bebop.rollout.decoding.draft_verify import DraftVerify

        return DraftVerify


@dataclass(frozen=True, kw_only=True)
class MTPSystem(SpeculativeSystem):
    """Drafts a chain with the model's MTP head."""

    drafter_name: str = "mtp"
    head: bool = True
    supports_auto_temperature: bool = True

    def drafter(self) -> PartClass:
        """Return the drafter of a chain."""
        from bebop.rollout.decoding.mtp import MTPDrafter

        return MTPDrafter
