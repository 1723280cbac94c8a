"""Checkpoints of an adaptation, ``<run>/checkpoints/head_000100/``: the backbone is frozen and not in them.

How they appear, are found and go: ``bebop.store``.
"""

from pathlib import Path
from typing import Any

from bebop import codec
from bebop.store import HEADS, Store, seal, verify

STATE = "head"  # of head.json and head.safetensors


def store(folder: Path) -> Store:
    """The checkpoints of an adaptation."""
    return Store(folder, HEADS)


def write(folder: Path, state: dict[str, Any], keep: int) -> Path:
    """Write the checkpoint of a state with a ``version``; all but the newest ``keep`` go. Returns its place."""
    checkpoints = store(folder)
    staged = checkpoints.staging(state["version"])
    staged.mkdir(parents=True)
    codec.save(state, staged / STATE)
    seal(staged)
    path = checkpoints.publish(staged, state["version"])
    checkpoints.prune(keep, path)
    return path


def read(path: Path) -> dict[str, Any]:
    """The state in a checkpoint; ``UserError`` if it is damaged."""
    verify(path)
    state: dict[str, Any] = codec.load(path / STATE)
    return state
