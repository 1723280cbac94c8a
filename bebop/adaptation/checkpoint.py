"""Checkpoints of an adaptation: one file each, written whole or not at all. The backbone is frozen and not in them."""

import os
from pathlib import Path
from typing import Any

import torch

from bebop.errors import UserError


def write(folder: Path, state: dict[str, Any], keep: int) -> Path:
    """Write ``checkpoints/head_000100.pt`` for a state with ``version`` 100; all but the newest ``keep`` go."""
    path = folder / "checkpoints" / f"head_{state['version']:06d}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.new")
    with scratch.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    scratch.replace(path)
    for old in _all(folder)[:-keep]:
        old.unlink()
    return path


def latest(folder: Path) -> Path | None:
    """The newest checkpoint; None if there is none."""
    found = _all(folder)
    return found[-1] if found else None


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint; ``UserError`` if the file is damaged."""
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises what its zip and pickle readers raise, RuntimeError among others
        raise UserError(f"{path} is corrupt ({type(error).__name__}): remove it to resume from an older one") from error
    return state


def _all(folder: Path) -> list[Path]:
    return sorted((folder / "checkpoints").glob("head_*.pt"))
