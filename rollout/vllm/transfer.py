"""Ways to transfer weights to vLLM: from this process's memory, or through a folder."""

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
TABLES: dict[int, Mapping[str, Tensor]] = {}  # weights for ``transfer_engine`` to load, by number
_numbers = count()


@contextmanager
def table(weights: Mapping[str, Tensor]) -> Iterator[int]:
    """Register ``weights`` in ``TABLES`` under a number while the block lasts."""
    number = next(_numbers)
    TABLES[number] = weights
    try:
        yield number
    finally:
        del TABLES[number]


def shares(load: WeightUpdate) -> dict[str, Mapping[str, Tensor]]:
    """Return the weights to send, by role. A role without weights is left out: loading processes its weights again."""
    return {role: weights for role, weights in (("target", load.target), ("draft", load.draft)) if weights}


class WeightTransfer(Protocol):
    """A way to transfer weights to an engine that runs no step meanwhile."""

    def refuse(self, load: WeightUpdate) -> None:
        """Raise ``UserError`` for weights that vLLM would not load as intended."""

    def send(self, core: Core, load: WeightUpdate) -> None:
        """Load the weights into vLLM."""


class Whole:
    """Base class of both transfers: each sends whole models."""

    def __init__(self, names: Mapping[str, Collection[str]]) -> None:
        """Keep the ``names`` of each model's weights in checkpoints, by role."""
        self.names = {role: frozenset(own) for role, own in names.items()}

    def refuse(self, load: WeightUpdate) -> None:
        """Raise ``UserError`` for a part of a model: its layers would keep the other weights, or lose them."""
        for role, weights in shares(load).items():
            if lacking := sorted(self.names[role] - set(weights)):
                raise UserError(
                    f"version {load.version} has {len(weights)} tensors of the {role} and lacks {lacking[0]!r}: vLLM "
                    "takes whole models"
                )


class MemoryTransfer(Whole):
    """Transfer of tensors in this process, into which the object store's are mapped."""

    def send(self, core: Core, load: WeightUpdate) -> None:
        """Let vLLM load the tensors by number."""
        for role, weights in shares(load).items():
            with table(weights) as number:
                core.load(role, {"table": number})


class FileTransfer(Whole):
    """Transfer by a folder of safetensors files; only the newest versions stay."""

    def __init__(self, folder: Path, names: Mapping[str, Collection[str]]) -> None:
        super().__init__(names)
        self.folder = folder / f"worker-{os.getpid()}"
        self.versions: list[Path] = []

    def send(self, core: Core, load: WeightUpdate) -> None:
        """Write the tensors and let vLLM read them."""
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
