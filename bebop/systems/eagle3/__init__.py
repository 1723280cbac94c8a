"""EAGLE-3 drafts: a network with features of three target layers, its own cache, head and draft vocabulary."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bebop.systems.base import AuxModel, PartClass
from bebop.systems.eagle3.options import Eagle3Training
from bebop.systems.speculative import SpeculativeSystem


def _network() -> Any:
    from bebop.systems.eagle3.network import Eagle3Network

    return Eagle3Network


def _job() -> Any:
    from bebop.systems.eagle3.training import Eagle3Trainer

    return Eagle3Trainer


def _export() -> Callable[..., str]:
    from bebop.systems.eagle3.layout import export

    return export


def _folder() -> Any:
    from bebop.systems.eagle3.layout import Eagle3Folder

    return Eagle3Folder


def _backend() -> Any:
    from bebop.systems.eagle3.training import Eagle3Backend

    return Eagle3Backend


EAGLE3 = AuxModel(
    name="eagle3",
    summary="an EAGLE-3 drafter",
    job=_job,
    network=_network,
    export=_export,
    options=Eagle3Training,
    folder=_folder,
    backend=_backend,
)


@dataclass(frozen=True, kw_only=True)
class Eagle3System(SpeculativeSystem):
    """System that drafts a chain with an EAGLE-3 network."""

    drafter_name: str = "eagle3"
    supports_auto_temperature: bool = True

    def drafter(self) -> PartClass:
        """Return the drafter of chains."""
        from bebop.systems.eagle3.decoding import Eagle3Drafter

        return Eagle3Drafter

    def training(self) -> tuple[AuxModel, ...]:
        """Return the drafter's network as the part to train."""
        return (EAGLE3,)


SYSTEMS = (
    Eagle3System(
        name="eagle3",
        summary="drafts sampled from an EAGLE-3 drafter, accepted with the overlap of draft and target",
        other="eagle3_target_only",
        static=True,
    ),
    Eagle3System(
        name="eagle3_target_only",
        summary="greedy drafts of an EAGLE-3 drafter, accepted with p(argmax q)",
        draft_temperature=0.0,
        supports_auto_temperature=False,
        sampled=False,
        other="eagle3",
        static=True,
    ),
)
