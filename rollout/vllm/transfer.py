"""Ways for weights to travel to vLLM: as they lie in this process, or through a folder."""

import os
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Protocol

from safetensors.torch import save_file
from torch import Tensor

from bebop.command import writing
from bebop.errors import UserError
from bebop.rollout.served_weights import WeightUpdate
from bebop.rollout.vllm.core import Core

KEPT = 2  # versions that stay on disk
TABLES: dict[int, Mapping[str, Tensor]] = {}  # weights that ``transfer_engine`` is to take, by number
_numbers = count()


@contextmanager
def table(weights: Mapping[str, Tensor]) -> Iterator[int]:
    """Give the number of ``weights`` while the block lasts."""
    number = next(_numbers)
    TABLES[number] = weights
    try:
        yield number
    finally:
        del TABLES[number]


def shares(load: WeightUpdate) -> dict[str, Mapping[str, Tensor]]:
    """Return the weights to send, by role. Others take no part, since loading processes a model's weights again."""
    return {role: weights for role, weights in (("target", load.target), ("draft", load.draft)) if weights}


class WeightTransfer(Protocol):
    """A way for weights to travel, to an engine that does not step meanwhile."""

    def refuse(self, load: WeightUpdate) -> None:
        """Raise ``UserError`` for weights that vLLM would not take as they are meant."""

    def send(self, core: Core, load: WeightUpdate) -> None:
        """Put them in."""


class Whole:
    """What both ways share: they take whole models."""

    def __init__(self, names: Mapping[str, Collection[str]]) -> None:
        """``names`` of each model's weights in checkpoints, by role."""
        self.names = {role: frozenset(own) for role, own in names.items()}

    def refuse(self, load: WeightUpdate) -> None:
        """Raise ``UserError`` for a part of a model: its layers would keep the rest, or lose it."""
        for role, weights in shares(load).items():
            if lacking := sorted(self.names[role] - set(weights)):
                raise UserError(
                    f"version {load.version} has {len(weights)} tensors of the {role} and lacks {lacking[0]!r}: vLLM "
                    "takes whole models"
                )


class MemoryTransfer(Whole):
    """Tensors of this process, where the object store's are mapped."""

    def send(self, core: Core, load: WeightUpdate) -> None:
        """Have vLLM take the tensors by number."""
        for role, weights in shares(load).items():
            with table(weights) as number:
                core.load(role, {"table": number})


class FileTransfer(Whole):
    """A folder of safetensors files, of which the newest stay."""

    def __init__(self, folder: Path, names: Mapping[str, Collection[str]]) -> None:
        super().__init__(names)
        self.folder = folder / f"worker-{os.getpid()}"
        self.versions: list[Path] = []

    def send(self, core: Core, load: WeightUpdate) -> None:
        """Write the tensors and have vLLM read them."""
        place = self.folder / f"version-{load.version}"
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
            for role, weights in shares(load).items():
                save_file(
                    {name: t.detach().cpu().contiguous() for name, t in weights.items()}, place / f"{role}.safetensors"
                )
        for role in shares(load):
            core.load(role, {"path": str(place / f"{role}.safetensors")})
        self.versions = [*(v for v in self.versions if v != place), place]
        while len(self.versions) > KEPT:
            shutil.rmtree(self.versions.pop(0), ignore_errors=True)
