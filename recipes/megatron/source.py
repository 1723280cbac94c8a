"""The weights of a Hugging Face folder, read one by one: each process reads what its part of the model needs.

Names are those of ``Policy.weights``: ``backbone.*`` as transformers has them, ``mtp.*`` as ``MTPHead`` has them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoConfig

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import mtp_layout, refuse_own_head, resolve
from bebop.model.layouts import LAYOUTS, from_layout

HEAD = ("token_norm", "hidden_norm", "project", "final_norm")


class Checkpoint(Mapping[str, Tensor]):
    """A folder's weights in the dtype in which they are stored; a missing MTP head is made afresh."""

    def __init__(self, config: ModelConfig) -> None:
        self.path, self.folder = config.path, resolve(config.path)
        try:
            self.config: Any = AutoConfig.from_pretrained(self.folder, local_files_only=True)
            self._files = dict(_listed(self.folder))
        except (OSError, ValueError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"model.path={self.path!r} cannot be loaded: {reason}") from error
        refuse_own_head(config, "megatron-core")
        self.layers = int(self.config.num_hidden_layers)
        layout = mtp_layout(self.folder, self.layers)
        self.fresh, self.layout = layout is None, layout or "mimo"
        self.zero_first = LAYOUTS[self.layout].zero_first
        self._head: dict[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        """Return one whole weight, on the CPU."""
        if name.startswith("mtp."):
            return self.head()[name.removeprefix("mtp.")]
        own = name.removeprefix("backbone.")
        if own == "lm_head.weight" and own not in self._files:
            own = "model.embed_tokens.weight"  # tied
        return self._read(own)

    def __iter__(self) -> Iterator[str]:
        """Yield the backbone's names, then the head's."""
        prefix = LAYOUTS[self.layout].prefix.format(L=self.layers)
        yield from (f"backbone.{name}" for name in self._files if self.fresh or not name.startswith(prefix))
        yield from (f"mtp.{name}" for name in self.head())

    def __len__(self) -> int:
        """Return the number of weights."""
        return sum(1 for _ in self)

    def head(self) -> dict[str, Tensor]:
        """Return the MTP head by the names of ``MTPHead``; made from the last layer if the folder has none."""
        if self._head is None:
            self._head = self._fresh_head() if self.fresh else self._read_head()
        return self._head

    def _read(self, name: str) -> Tensor:
        if name not in self._files:
            raise UserError(f"model.path={self.path!r}: weight {name} is missing")
        with safe_open(self._files[name], framework="pt") as opened:
            return opened.get_tensor(name)

    def _read_head(self) -> dict[str, Tensor]:
        layout = LAYOUTS[self.layout]
        prefix = layout.prefix.format(L=self.layers)
        tensors = {name: self._read(name) for name in self._files if name.startswith(prefix)}
        return from_layout(tensors, layout, self.layers, list(self._head_names()))

    def _fresh_head(self) -> dict[str, Tensor]:
        """Make the head that ``bebop.model.mtp.init_from_backbone`` makes."""
        size = int(self.config.hidden_size)
        final = self._read("model.norm.weight")
        half = 0.5 * torch.eye(size, dtype=final.dtype)
        head = {"token_norm.weight": torch.ones_like(final), "hidden_norm.weight": torch.ones_like(final)}
        head |= {"project.weight": torch.cat([half, half], 1), "final_norm.weight": final}
        last = f"model.layers.{self.layers - 1}."
        return head | {f"layer.{name}": self._read(last + name) for name in self._layer_names()}

    def _head_names(self) -> Iterator[str]:
        yield from (f"{name}.weight" for name in HEAD)
        yield from (f"layer.{name}" for name in self._layer_names())

    def _layer_names(self) -> list[str]:
        """Return the names within a decoder layer, read off the last one."""
        last = f"model.layers.{self.layers - 1}."
        return [name.removeprefix(last) for name in self._files if name.startswith(last)]


def _listed(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of every tensor in a folder's safetensors files, with its file."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # safe_open is no mapping: it cannot be iterated
                yield name, file
