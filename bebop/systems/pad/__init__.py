"""PAD: MTP drafts, where a classifier may accept rejected drafts that do not matter for the result."""

from dataclasses import dataclass
from typing import Any

from bebop.systems.base import AuxModel, PartClass
from bebop.systems.pad.options import PadOptions, PivotTraining
from bebop.systems.speculative import MTPSystem


def _network() -> Any:
    from bebop.systems.pad.network import PivotNetwork

    return PivotNetwork


def _job() -> Any:
    from bebop.systems.pad.training import PivotAdaptation

    return PivotAdaptation


PIVOT = AuxModel(
    name="pivot", summary="which rejected drafts matter", job=_job, network=_network, options=PivotTraining
)


@dataclass(frozen=True, kw_only=True)
class PadSystem(MTPSystem):
    """System that overrides rejections. Its output distribution is not the target's, but each token's log-prob is
    known.
    """

    rule_name: str = "pivot_override"
    options: type | None = PadOptions
    exact: bool = False
    has_logprobs: bool = True

    def rule(self) -> PartClass:
        """Return rejection sampling with overrides."""
        from bebop.systems.pad.decoding import PivotOverride

        return PivotOverride

    def training(self) -> tuple[AuxModel, ...]:
        """Return the classifier as the part to train."""
        return (PIVOT,)


SYSTEMS = (
    PadSystem(
        name="pad",
        summary="bebop, rejected drafts accepted where a classifier finds that they do not matter",
    ),
)
