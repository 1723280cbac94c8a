"""What the trainings of parts have in common: one process, answers of the model itself, a checkpoint, a card."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bebop.adaptation import checkpoint
from bebop.adaptation.part_card import part_card
from bebop.adaptation.ranks import Ranks
from bebop.command import writing
from bebop.config_adapt import AdaptConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.parts import save_part
from bebop.parsing import check


class PartJob:
    """``python -m bebop.adapt part=NAME`` makes one in the run folder, then calls ``prepare`` and ``run``."""

    policy: Policy
    found: Path | None = None  # the checkpoint that it goes on from

    def __init__(self, config: AdaptConfig, folder: Path, ranks: Ranks) -> None:
        """``UserError`` for several processes, and for text that the model did not write."""
        check(ranks.world == 1, "part", config.part, "its training runs in one process: start it without torchrun")
        check(config.data.source == "sample", "data.source", config.data.source, f"part={config.part} takes sample")
        self.config, self.folder = config, folder
        torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)

    def written(self) -> dict[str, Path]:
        """What a finished run leaves for its user."""
        return {"part": Path(self.config.out or self.folder / f"{self.config.part}.safetensors")}

    def resumed(self) -> dict[str, Any] | None:
        """The newest checkpoint if ``resume`` is set; ``UserError`` if there is none. Writes nothing."""
        if not self.config.resume:
            return None
        self.found = checkpoint.store(self.folder).newest_sound()
        if self.found is None:
            raise UserError(f"resume=true: {self.folder} holds no finished checkpoint")
        return checkpoint.read(self.found)

    def save(self, network: nn.Module, settings: Mapping[str, Any], results: Mapping[str, Any]) -> None:
        """Write the part; ``settings``: what its network is made with."""
        path = self.written()["part"]
        with writing(path):
            save_part(path, network, part_card(self.config, self.folder, self.policy, settings, results))

    def label(self, text: str) -> str | None:
        """Of a progress bar; None where none is wanted."""
        return text if self.config.progress else None
