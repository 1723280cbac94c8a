"""Weights of a Hugging Face folder, read one by one: each process reads only those of its part of the model.

Names are those of ``Policy.weights``: ``backbone.*`` as in transformers, ``mtp.*`` as in ``MTPHead``. Experts have
separate names (``mlp.experts.3.down_proj.weight``), as in most folders, even if the folder stacks them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import mtp_layout, refuse_own_head, resolve, trained_head
from bebop.model.layouts import LAYOUTS, SINGLE, STACKED, from_layout

HEAD = ("token_norm", "hidden_norm", "project", "final_norm")


class Checkpoint(Mapping[str, Tensor]):
    """Weights of a folder in the dtype in which they are stored; a missing MTP head is newly made."""

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
        self.own, self.layout = layout is not None, layout or "mimo"  # whether the folder has a head
        self._trained = None if self.own else trained_head(self.folder)  # the file of one that Bebop brings
        self.zero_first = LAYOUTS[self.layout].zero_first
        self.fresh = not self.own and self._trained is None
        self._head: dict[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        """Return one whole weight, on the CPU; of stacked experts, only this expert is read."""
        if not name.startswith("mtp."):
            own = name.removeprefix("backbone.")
            tied = own == "lm_head.weight" and own not in self._files
            return self._read("model.embed_tokens.weight" if tied else own)
        own = name.removeprefix("mtp.")
        if SINGLE.fullmatch(own):
            return self._read(self._prefix() + own.removeprefix("layer."))
        if own not in self.head():
            raise UserError(f"model.path={self.path!r}: weight {own} of the MTP head is missing")
        return self.head()[own]

    def __iter__(self) -> Iterator[str]:
        """Yield the backbone's names, then the head's."""
        prefix = LAYOUTS[self.layout].prefix.format(L=self.layers)
        yield from (f"backbone.{name}" for name in self._files if not (self.own and name.startswith(prefix)))
        yield from (f"mtp.{name}" for name in self.head())
        own = self._prefix()
        yield from (f"mtp.layer.{name.removeprefix(own)}" for name in self._files if _is_expert(name, own))

    def __len__(self) -> int:
        """Return the number of weights."""
        return sum(1 for _ in self)

    def head(self) -> dict[str, Tensor]:
        """Return the MTP head without its experts: the folder's, else the one that Bebop brings, else a new one made
        from the last layer.
        """
        if self._head is None and self._trained is not None:
            self._head = load_file(self._trained)
        elif self._head is None:
            self._head = self._read_head() if self.own else self._fresh_head()
        return self._head

    def _prefix(self) -> str:
        """Return the name prefix of the head's decoder layer in the folder, or of the last layer if it has no head."""
        layout = LAYOUTS[self.layout]
        last = f"model.layers.{self.layers - 1}."
        return layout.prefix.format(L=self.layers) + layout.layer if self.own else last

    def _read(self, name: str) -> Tensor:
        if name not in self._files:
            raise UserError(f"model.path={self.path!r}: weight {name} is missing")
        file, stored = self._files[name]
        with safe_open(file, framework="pt") as opened:
            if stored == name:
                return opened.get_tensor(name)
            parsed = SINGLE.fullmatch(name)
            assert parsed is not None
            matrix = opened.get_slice(stored)[int(parsed[2])]
            return matrix if parsed[3] == "down_proj" else matrix.chunk(2)[parsed[3] == "up_proj"]

    def _read_head(self) -> dict[str, Tensor]:
        layout, own = LAYOUTS[self.layout], self._prefix()
        prefix = layout.prefix.format(L=self.layers)
        names = [name for name in self._files if name.startswith(prefix) and not _is_expert(name, own)]
        wanted = [f"{name}.weight" for name in HEAD]
        wanted += [f"layer.{name}" for name in self._layer_names() if own + name in names]
        return from_layout({name: self._read(name) for name in names}, layout, self.layers, wanted)

    def _fresh_head(self) -> dict[str, Tensor]:
        """Make the head that ``bebop.model.mtp.init_from_backbone`` makes."""
        size = int(self.config.hidden_size)
        final = self._read("model.norm.weight")
        half = 0.5 * torch.eye(size, dtype=final.dtype)
        head = {"token_norm.weight": torch.ones_like(final), "hidden_norm.weight": torch.ones_like(final)}
        head |= {"project.weight": torch.cat([half, half], 1), "final_norm.weight": final}
        last = self._prefix()
        own = [name for name in self._files if name.startswith(last) and not _is_expert(name, last)]
        return head | {f"layer.{name.removeprefix(last)}": self._read(name) for name in own}

    def _layer_names(self) -> list[str]:
        """Return the names within decoder layers of any kind, without experts."""
        layers = [f"model.layers.{i}." for i in range(self.layers)]
        found = [name.removeprefix(x) for x in layers for name in self._files if name.startswith(x)]
        return [name for name in dict.fromkeys(found) if not SINGLE.fullmatch(name)]


def _is_expert(name: str, prefix: str) -> bool:
    """Return whether a weight is one of a decoder layer's experts."""
    return name.startswith(prefix) and SINGLE.fullmatch(name) is not None


def _listed(folder: Path) -> Iterator[tuple[str, tuple[Path, str]]]:
    """Yield the name of every tensor in a folder's safetensors files, with its file and its name there."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # safe_open is no mapping: it cannot be iterated
                stacked = STACKED.fullmatch(name)
                if stacked is None:
                    yield name, (file, name)
                    continue
                kinds = ("down_proj",) if stacked[2] == "down_proj" else ("gate_proj", "up_proj")
                for expert in range(opened.get_slice(name).get_shape()[0]):
                    yield from ((f"{stacked[1]}.{expert}.{kind}.weight", (file, name)) for kind in kinds)
