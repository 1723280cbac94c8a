"""Drafts from history: tokens that followed the same text in other completions of the same prompt."""

from dataclasses import dataclass

from bebop.systems.base import PartClass
from bebop.systems.history.options import HistoryOptions
from bebop.systems.speculative import SpeculativeSystem


@dataclass(frozen=True, kw_only=True)
class HistorySystem(SpeculativeSystem):
    """System that drafts only from history."""

    drafter_name: str = "history"
    history: bool = True
    static_verify: bool = True
    draft_tokens: int = 16
    options: type | None = HistoryOptions

    def drafter(self) -> PartClass:
        """Return the drafter without a head."""
        from bebop.systems.history.decoding import HistoryDrafter

        return HistoryDrafter

    def auto_length(self) -> PartClass:
        """Return the class behind ``draft_tokens=auto``: as many drafts in each row as pay off."""
        from bebop.rollout.decoding.timed_lengths import RowCostLength

        return RowCostLength

    @property
    def supports_auto_length(self) -> bool:
        """Return True: each row has its own number of drafts."""
        return True

    @property
    def most_drafts(self) -> int:
        """Return the maximum number of drafts of a row: history may be sure of many tokens."""
        return self.draft_tokens


@dataclass(frozen=True, kw_only=True)
class HistoryMTPSystem(HistorySystem):
    """System that drafts from a mixture of history and the MTP head."""

    drafter_name: str = "history_mtp"
    head: bool = True
    serve_error: str = (
        "its drafts are drawn from a mixture of history and MTP head, which the embedded engine alone computes"
    )

    def drafter(self) -> PartClass:
        """Return the drafter of the mixture."""
        from bebop.systems.history.decoding import HistoryMTPDrafter

        return HistoryMTPDrafter


SYSTEMS = (
    HistorySystem(
        name="history",
        summary="drafts sampled from what followed the same words in other completions of the prompt",
    ),
    HistoryMTPSystem(
        name="bebop_history",
        summary="drafts sampled from a mixture of history and MTP head, weighted by how far history was right",
    ),
)
