"""Trained parts of decoding systems: a safetensors file each, and beside it a JSON file, the card, that describes it.

A part belongs to one backbone. Its card has that backbone's fingerprint, so that a part of another one is refused
instead of drafting badly. The card also has the command that makes the part again.

A part that other programs have too may also be a folder in their layout (``AuxModel.folder``), which has no card.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from bebop.config.job import ModelConfig
from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.fingerprint import fingerprint
from bebop.systems import PARTS

SHIPPED = {"tiny": Path(__file__).parent / "tiny" / "parts"}  # model.path -> folder of the parts that come with it


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCard:
    """Description of a file of weights."""

    part: str  # a row of PARTS
    settings: dict[str, Any]  # arguments of the network's constructor
    backbone: str  # see ``backbone_fingerprint``
    data: dict[str, Any]  # training data
    seed: int
    command: str  # command that makes the part again
    results: dict[str, Any]  # on held-out data


def find_part(config: ModelConfig, name: str) -> Path:
    """Return the file of a part: the configured one, else the one shipped with the model.

    Raises:
        UserError: There is no such file.
    """
    given = config.parts.get(name)
    path = Path(given) if given else SHIPPED.get(config.path, Path()) / f"{name}.safetensors"
    if given and path.is_dir() and PARTS[name].folder is not None:
        return path
    if given and not (path.is_file() and card_of(path).is_file()):
        raise UserError(f"model.parts.{name}={given!r} is not possible: give a .safetensors file that has its .json")
    if not path.is_file():
        raise UserError(
            f"model.parts.{name} is missing, and {config.path} comes without: make it with python -m bebop.adapt "
            f"part={name} model.path={config.path}, and give model.parts.{name}=PATH"
        )
    return path


def part_settings(config: ModelConfig, name: str) -> dict[str, Any]:
    """Return the settings of a part's network, from its card or its folder; raise ``UserError`` if there is none.

    No weights are read.
    """
    path, folder = find_part(config, name), PARTS[name].folder
    if path.is_dir() and folder is not None:
        found: dict[str, Any] = folder().settings(path)
        return found
    return read_card(path, name).settings


def has_part(config: ModelConfig, name: str) -> bool:
    """Return whether the part has a file, configured or shipped."""
    try:
        find_part(config, name)
    except UserError:
        return False
    return True


def card_of(path: Path) -> Path:
    """Return the JSON file beside a file of weights."""
    return path.with_suffix(".json")


def read_card(path: Path, name: str | None = None) -> PartCard:
    """Return the card of a file of weights; raise ``UserError`` if it is invalid or of another part than ``name``."""
    try:
        card = PartCard(**json.loads(card_of(path).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{card_of(path)} cannot be read as the card of a trained part: {error}") from error
    if name not in (None, card.part):
        raise UserError(f"model.parts.{name}={str(path)!r} is not possible: the file holds the part {card.part!r}")
    return card


def save_part(path: Path, module: nn.Module, card: PartCard) -> None:
    """Write weights and buffers to ``path`` and the card beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach().cpu().contiguous() for name, tensor in module.state_dict().items()}, path)
    card_of(path).write_text(json.dumps(dataclasses.asdict(card), indent=2) + "\n", encoding="utf-8")


def make_module(name: str, settings: Mapping[str, Any]) -> nn.Module:
    """Return the network of a part."""
    network = PARTS[name].network
    assert network is not None, "it is in the checkpoint"
    return network()(**settings)


def load_part(name: str, path: Path, policy: Policy) -> nn.Module:
    """Return a part on the policy's device, ready for use.

    Beside a backbone without memory (``bebop.model.sharded``) the part stays on the CPU, and its backbone is not
    checked.

    Raises:
        UserError: It is another part, or a part of another backbone.
    """
    folder, device = PARTS[name].folder, policy.device if policy.device.type != "meta" else torch.device("cpu")
    if path.is_dir() and folder is not None:
        found: nn.Module = folder().load(path, policy)
        return found.to(device).eval().requires_grad_(False)
    card = read_card(path, name)
    if device == policy.device and card.backbone != backbone_fingerprint(policy):
        raise UserError(
            f"model.parts.{name}={str(path)!r} is not possible: it was made for another model; make one with "
            f"python -m bebop.adapt part={name} model.path=..."
        )
    return read_part(name, path).to(device).eval().requires_grad_(False)


def read_part(name: str, path: Path) -> nn.Module:
    """Return the network in a file of weights, for any model; raise ``UserError`` if it cannot be read."""
    try:
        module = make_module(name, read_card(path, name).settings)
        module.load_state_dict(load_file(path))
    except (SafetensorError, RuntimeError, TypeError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"model.parts.{name}={str(path)!r} cannot be loaded: {reason}") from error
    return module


def backbone_fingerprint(policy: Policy) -> str:
    """Return the fingerprint of the backbone in bfloat16: the same for any precision of its loaded weights."""
    return fingerprint(dict(policy.backbone.named_parameters()), torch.bfloat16)
