"""Drafts of a separate, smaller causal language model with the same tokenizer."""

from dataclasses import dataclass

from bebop.systems.base import PartClass
from bebop.systems.speculative import SpeculativeSystem


@dataclass(frozen=True, kw_only=True)
class DraftModelSystem(SpeculativeSystem):
    """System that drafts a chain with the model named by ``model.draft``."""

    drafter_name: str = "draft_model"
    separate: bool = True
    supports_auto_temperature: bool = True

    def drafter(self) -> PartClass:
        """Return the drafter that runs the draft model."""
        from bebop.systems.draft_model.decoding import ModelDrafter

        return ModelDrafter


SYSTEMS = (
    DraftModelSystem(
        name="draft_model",
        summary="drafts sampled from a smaller model (model.draft), accepted with the overlap of draft and target",
        static=True,
    ),
)
