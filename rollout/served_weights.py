"""New weights for a server that loads checkpoints: their names, and a check that an update arrived."""

import atexit
import json
import shutil
import tempfile
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
from bebop.model.checkpoint import mtp_layout, read_config, read_draft, resolve
from bebop.model.fingerprint import fingerprint
from bebop.model.layouts import LAYOUTS, TABLES, from_layout, join_experts, split_experts, to_layout
from bebop.model.parts import find_part, part_settings, read_part
from bebop.rollout.engine import EngineDied
from bebop.systems import PARTS, SYSTEMS

Selector = Literal["target", "draft", "all"]
Sums = Mapping[str, Mapping[str, str]]  # target, draft -> name -> checksum
Rename = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]
ToUpdate = Callable[[Mapping[str, Tensor], int], "WeightUpdate"]  # from ``Policy.weights`` and a version
MIMO = "MiMoForCausalLM"
CONSTANT = ".e_score_correction_bias"  # end of the names of biases by which routers choose experts: never trained
UNSENT = (*TABLES, CONSTANT)  # ends of names in an MTP layer whose values no update changes
SAMPLE = 1 << 16  # elements of a tensor that tell whether it changed


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightUpdate:
    """Weights of an update, under the names of checkpoints."""

    target: dict[str, Tensor]
    draft: dict[str, Tensor]
    version: int

    @property
    def selector(self) -> Selector:
        """Return which models the update is for.

        A frozen draft must be left out: loading would process its weights again.
        """
        if self.target and self.draft:
            return "all"
        return "target" if self.target else "draft"


def update(
    weights: Mapping[str, Tensor],
    version: int,
    layout: str,
    layers: int,
    rename: Rename = split_experts,
    *,
    drafts: bool = True,
    drafter: "ServedDrafter | None" = None,
    constants: Mapping[str, Tensor] | None = None,
) -> WeightUpdate:
    """Return ``Policy.weights`` under checkpoint names; the head's go under the names of its layout.

    Args:
        weights: as ``Policy.weights`` names them.
        version: of the weights.
        layout: of the head, in ``LAYOUTS``.
        layers: of the backbone.
        rename: gives the target's weights the names and pieces that the server reads, see
            ``bebop.model.checkpoint.named_as_served``.
        drafts: whether the server drafts with the head; False: with a model whose weights stay.
        drafter: the part that drafts in place of the MTP head.
        constants: see ``constants``; they go with the model that they belong to.
    """
    backbone, head = "backbone.", "mtp."
    target = {name.removeprefix(backbone): t for name, t in weights.items() if name.startswith(backbone)}
    own = {name.removeprefix(head): t for name, t in weights.items() if name.startswith(head)}
    assert len(target) + len(own) == len(weights), f"unknown weights among {list(weights)[:3]}, ..."
    target = rename(target)
    draft = {} if not drafts else drafter.whole(own) if drafter else to_layout(own, LAYOUTS[layout], layers)
    prefix = LAYOUTS[layout].prefix.format(L=layers)
    for name, tensor in (constants or {}).items():
        of_head = name.startswith(prefix)
        model = draft if of_head else target
        if model and not (of_head and drafter):  # else it takes no part in this update
            model.setdefault(name, tensor)
    return WeightUpdate(target=target, draft=draft, version=version)


def constants(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint that are no parameters: no trainer sends them, but vLLM loads whole layers.

    They are the biases by which routers choose experts (DeepSeek-V3, GLM-4.5, MiniMax-M2, dots1), of [E] float32 each.
    """
    found: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_tensor(name) for name in opened.keys() if name.endswith(CONSTANT)}
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedDrafter:
    """A trained part in the folder that a server loads it from, under the part's own names."""

    folder: Path
    weights: Mapping[str, Tensor]  # its parameters
    constants: Mapping[str, Tensor]  # other tensors in the folder, such as a map of tokens

    def whole(self, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return weights and constants as the folder holds them; nothing if no weights are sent."""
        return {**own, **self.constants} if own else {}


def find_drafter(config: JobConfig, name: str) -> ServedDrafter | None:
    """Return the part that a server drafts with, in its public layout; None for a server that drafts without one.

    A part of ``bebop.adapt`` is written into a temporary folder, which is deleted when this process ends.
    """
    if not name:
        return None
    path, layout = find_part(config.model, name), PARTS[name].folder
    assert layout is not None, "it has no layout that servers read"
    folder = path
    if not path.is_dir():
        folder = Path(tempfile.mkdtemp(prefix=f"bebop-{name}-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        layers = int(AutoConfig.from_pretrained(resolve(config.model.path), local_files_only=True).num_hidden_layers)
        layout().write(read_part(name, path), layers, folder, getattr(torch, config.model.dtype))
    weights: Mapping[str, Tensor] = layout().weights(folder)
    constants = {key: tensor for key, tensor in weights.items() if not tensor.is_floating_point()}
    own = {key: tensor for key, tensor in weights.items() if key not in constants}
    return ServedDrafter(folder=folder, weights=own, constants=constants)


def refuse_drafter(config: JobConfig, name: str, engine: str, whole: bool) -> None:
    """Raise ``UserError`` for a drafter that a server cannot host, or a target whose layers the server does not expose.

    ``whole``: whether the server can verify only drafts of the whole vocabulary.
    """
    if not name:
        return
    settings = part_settings(config.model, name)
    drafted, vocabulary = settings.get("draft_vocab_size") or settings["vocab_size"], settings["vocab_size"]
    if whole and drafted < vocabulary:
        raise UserError(
            f"decoding.system={config.decoding.system!r} is not possible with {engine} for a drafter of {drafted} of "
            f"{vocabulary} tokens: it verifies sampled drafts of the whole vocabulary; adapt with "
            "options.draft_vocab=null, or use rollout=vllm"
        )
    found = json.loads((resolve(config.model.path) / "config.json").read_text(encoding="utf-8"))
    if MIMO in found.get("architectures", ()):
        raise UserError(
            f"decoding.system={config.decoding.system!r} is not possible with {engine} for a {MIMO}: it does not hand "
            "out the layers that the drafter reads; use rollout=torch, or a model without an MTP head"
        )


def find_head(folder: Path) -> tuple[int, str | None, dict[str, Tensor]]:
    """Return the layers of a checkpoint's backbone, the layout of its MTP head (None: it has none), and the head."""
    layers = int(AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().num_hidden_layers)
    layout = mtp_layout(folder, layers)
    return layers, layout, {} if layout is None else stored_head(folder, layout, layers)


def refuse_missing_head(config: JobConfig, engine: str) -> None:
    """Raise ``UserError`` where a system needs an MTP head and the checkpoint has none."""
    folder = resolve(config.model.path)
    layers = int(AutoConfig.from_pretrained(folder, local_files_only=True).get_text_config().num_hidden_layers)
    if SYSTEMS[config.decoding.system].head and mtp_layout(folder, layers) is None:
        raise UserError(
            f"model.path={config.model.path!r} has no MTP weights, and {engine} serves checkpoints as they are: train "
            "a head with bebop.adapt first, or set decoding.system=autoregressive"
        )


def draft_folder(config: JobConfig, engine: str) -> Path:
    """Return the folder of a job's draft model; raise ``UserError`` unless its vocabulary is as large as the target's.

    Servers verify logits of one size, whatever the tokenizers say.
    """
    target, draft = (one.get_text_config().vocab_size for one in (read_config(config.model), read_draft(config.model)))
    if target != draft:
        raise UserError(
            f"model.draft={config.model.draft!r} is not possible with {engine}: its vocabulary has {draft} rows, that "
            f"of model.path {target}; give one of as many, or rollout=torch"
        )
    return resolve(str(config.model.draft))


def stored_head(folder: Path, layout: str, layers: int) -> dict[str, Tensor]:
    """Return the trained weights of the head in a checkpoint, under the names of ``MTPHead``.

    Updates send no other tensors: neither copies of the model's tables nor the biases by which routers choose experts.
    """
    kind = LAYOUTS[layout]
    prefix = kind.prefix.format(L=layers)
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            names = (name for name in opened.keys() if name.startswith(prefix) and not name.endswith(UNSENT))
            tensors |= {name: opened.get_tensor(name) for name in names}
    tensors = join_experts(tensors)
    return from_layout(tensors, kind, layers, [_own_name(name.removeprefix(prefix), layout) for name in tensors])


def _own_name(name: str, layout: str) -> str:
    """Return our name of a head weight: ``hidden_norm.weight`` for ``hidden_layernorm.weight``."""
    for own, theirs in LAYOUTS[layout].names.items():
        if name.startswith(theirs + "."):
            return own + name.removeprefix(theirs)
    return "layer." + name.removeprefix(LAYOUTS[layout].layer)


@dataclass(slots=True)
class WeightWatch:
    """A comparison of a server's checksums before and after an update with the weights sent.

    Weights that were not sent must not change (a draft that was zeroed, or processed again). Weights that were sent
    with other values must change (else they are stale). Values are compared as ``dtype``, the engine's.
    """

    dtype: torch.dtype
    sums: Sums = field(default_factory=dict)
    sent: dict[str, str] = field(default_factory=dict)  # role -> mark of what it holds

    def begin(self, sums: Sums, draft: Mapping[str, Tensor]) -> None:
        """Keep the first checksums; ``draft`` is the checkpoint's head."""
        self.sums = sums
        if draft:
            self.sent["draft"] = self._mark(draft)

    def marks(self, load: WeightUpdate) -> dict[str, str]:
        """Return a fingerprint of the weights sent, by role; compute it before decoding stops for them."""
        shares = {"target": load.target, "draft": load.draft}
        return {role: self._mark(tensors) for role, tensors in shares.items() if tensors}

    def verify(self, now: Sums, load: WeightUpdate, marks: Mapping[str, str] | None = None) -> None:
        """Raise ``EngineDied`` if the current checksums do not follow from the earlier ones and the weights sent.

        ``marks`` are those of ``load``; None: they are computed now.
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

    def check_kept(self, now: Sums) -> None:
        """Raise ``EngineDied`` if weights changed that nobody sent."""
        for role in ("target", "draft"):
            if now.get(role) != self.sums.get(role):
                raise EngineDied(f"the {role}'s weights changed while memory was released")

    def _mark(self, tensors: Mapping[str, Tensor]) -> str:
        """Return a fingerprint of the beginning of each tensor, which is fast to read and which an update changes."""
        return fingerprint({name: t.reshape(-1)[:SAMPLE] for name, t in tensors.items()}, self.dtype)
