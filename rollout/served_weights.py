"""New weights for a server that loads checkpoints: their names, and a check of the change that they made."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig

from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.model.checkpoint import mtp_layout, resolve
from bebop.model.fingerprint import fingerprint
from bebop.model.layouts import LAYOUTS, from_layout, join_experts, split_experts, to_layout
from bebop.rollout.engine import EngineDied
from bebop.systems import SYSTEMS

Selector = Literal["target", "draft", "all"]
Sums = Mapping[str, Mapping[str, str]]  # target, draft -> name -> checksum
Rename = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
ToUpdate = Callable[[Mapping[str, Tensor], int], "WeightUpdate"]  # from ``Policy.weights`` and a version
SAMPLE = 1 << 16  # elements of a tensor that tell whether it changed


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights under the names that checkpoints have."""

    target: dict[str, Tensor]
    draft: dict[str, Tensor]
    version: int

    @property
    def selector(self) -> Selector:
        """Return which models take part. A frozen draft must not: loading would process its weights again."""
        if self.target and self.draft:
            return "all"
        return "target" if self.target else "draft"


def update(
    weights: Mapping[str, Tensor], version: int, layout: str, layers: int, rename: Rename = split_experts
) -> WeightUpdate:
    """Return ``Policy.weights`` under checkpoint names; the head's go under the names of its layout.

    ``rename`` gives the target's weights the names and pieces that the server reads, see
    ``bebop.model.checkpoint.named_as_served``.
    """
    backbone, head = "backbone.", "mtp."
    target = {name.removeprefix(backbone): t for name, t in weights.items() if name.startswith(backbone)}
    own = {name.removeprefix(head): t for name, t in weights.items() if name.startswith(head)}
    assert len(target) + len(own) == len(weights), f"unknown weights among {list(weights)[:3]}, ..."
    return WeightUpdate(target=rename(target), draft=to_layout(own, LAYOUTS[layout], layers), version=version)


def find_head(folder: Path) -> tuple[int, str | None, dict[str, Tensor]]:
    """Return the layers of a checkpoint's backbone, the layout of its MTP head (None: it has none), and the head."""
    layers = int(AutoConfig.from_pretrained(folder, local_files_only=True).num_hidden_layers)
    layout = mtp_layout(folder, layers)
    return layers, layout, {} if layout is None else stored_head(folder, layout, layers)


def refuse_missing_head(config: JobConfig, engine: str) -> None:
    """Raise ``UserError`` where a system needs an MTP head and the checkpoint has none."""
    folder = resolve(config.model.path)
    layers = int(AutoConfig.from_pretrained(folder, local_files_only=True).num_hidden_layers)
    if SYSTEMS[config.decoding.system].head and mtp_layout(folder, layers) is None:
        raise UserError(
            f"model.path={config.model.path!r} has no MTP weights, and {engine} serves checkpoints as they are: train "
            "a head with bebop.adapt first, or set decoding.system=autoregressive"
        )


def stored_head(folder: Path, layout: str, layers: int) -> dict[str, Tensor]:
    """Return the head in a checkpoint, under the names that ``MTPHead`` has."""
    kind = LAYOUTS[layout]
    prefix = kind.prefix.format(L=layers)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys() if name.startswith(prefix)}
    tensors = join_experts(tensors)
    return from_layout(tensors, kind, layers, [_own_name(name.removeprefix(prefix), layout) for name in tensors])


def _own_name(name: str, layout: str) -> str:
    """Return our name of a part: ``hidden_norm.weight`` for ``hidden_layernorm.weight``."""
    for own, theirs in LAYOUTS[layout].names.items():
        if name.startswith(theirs + "."):
            return own + name.removeprefix(theirs)
    return "layer." + name.removeprefix(LAYOUTS[layout].layer)


@dataclass(slots=True)
class WeightWatch:
    """A comparison of a server's checksums before and after an update with the weights sent.

    What was not sent must not change (a draft that was zeroed, or processed again), and what was sent with other
    values must change (a stale one). Values are compared as ``dtype``, the engine's.
    """

    dtype: torch.dtype
    sums: Sums = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)  # role -> mark of what it holds

    def begin(self, sums: Sums, draft: Mapping[str, Tensor]) -> None:
        """Take checksums as the state that holds; ``draft`` is the checkpoint's head."""
        self.sums = sums
        if draft:
            self.sent["draft"] = self._mark(draft)

    def marks(self, load: WeightUpdate) -> dict[str, str]:
        """Return a mark of the weights sent, by role: to be made before decoding stops for them."""
        shares = {"target": load.target, "draft": load.draft}
        return {role: self._mark(tensors) for role, tensors in shares.items() if tensors}

    def verify(self, now: Sums, load: WeightUpdate, marks: Mapping[str, str] | None = None) -> None:
        """Raise ``EngineDied`` if the current checksums do not follow from the earlier ones and the weights sent.

        ``marks``: of ``load``; None: they are made now.
        """
        marks = self.marks(load) if marks is None else marks
        for role, tensors in (("target", load.target), ("draft", load.draft)):
            before, after = self.sums.get(role, {}), now.get(role, {})
            changed = sorted(name for name in after if before and before.get(name) != after[name])
            if changed and not tensors:
                raise EngineDied(f"version {load.version} was not for the {role}, but its {changed[0]} changed")
            if not tensors:
                continue
            if before and not changed and self.sent.get(role, marks[role]) != marks[role]:
                raise EngineDied(f"version {load.version} of the {role} was sent and did not arrive")
            self.sent[role] = marks[role]
        self.sums = now

    def check_draft(self, now: Sums) -> None:
        """Raise ``EngineDied`` if the draft is not what it was; the target may be."""
        if now.get("draft") != self.sums.get("draft"):
            raise EngineDied("the draft's weights changed while memory was released")

    def _mark(self, tensors: Mapping[str, Tensor]) -> str:
        """Return a fingerprint of the beginning of each tensor: an update changes some of it, and it is soon read."""
        return fingerprint({name: t.reshape(-1)[:SAMPLE] for name, t in tensors.items()}, self.dtype)
