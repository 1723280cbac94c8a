"""PIPO: a separate network reads and writes pairs of tokens."""

from dataclasses import dataclass
from typing import Any

from bebop.systems.base import AuxModel, PartClass
from bebop.systems.pipo.options import PipoOptions, PipoTraining
from bebop.systems.speculative import SpeculativeSystem


def _network() -> Any:
    from bebop.systems.pipo.network import PairModel

    return PairModel


def _job() -> Any:
    from bebop.systems.pipo.training import PairTrainer

    return PairTrainer


PIPO = AuxModel(
    name="pipo",
    summary="a network that reads and writes pairs of tokens",
    job=_job,
    network=_network,
    options=PipoTraining,
)


@dataclass(frozen=True, kw_only=True)
class PipoSystem(SpeculativeSystem):
    """System that decodes with a cycle of its own, without verification."""

    custom_cycle: bool = True
    draft_tokens: int = 1
    width: int = 1
    options: type | None = PipoOptions
    sampled: bool = False
    exact: bool = False

    def decoder(self) -> PartClass:
        """Return the decoding cycle of pairs."""
        from bebop.systems.pipo.decoding import PairDecoder

        return PairDecoder

    def training(self) -> tuple[AuxModel, ...]:
        """Return the pair network as the part to train."""
        return (PIPO,)


SYSTEMS = (
    PipoSystem(
        name="pipo",
        summary="pairs of tokens in and out, by a network of its own; a second token stands where a head trusts it",
        train_error="completions drawn in pairs cannot be scored again token by token, nor would that train the "
        "network that drew them: python -m bebop.adapt part=pipo options.stage=opd trains it on its own completions",
        serve_error="its caches hold an entry for two tokens, its passes end in a gate, and its network is in no "
        "checkpoint",
    ),
)
