"""Checkpoints of a run: written whole or not at all, checked before they are believed.

``<run>/checkpoints/step_000020/``::

    policy/        a Hugging Face folder in the model's dtype: what engines serve
    trainer.pt     fp32 master weights, optimizer, version, random generators: what an exact resume needs
    loop.pt        what the loop handed in (prompt cursor, buffered groups): opaque here
    manifest.json  size and SHA-256 of each file above

How they appear, are found and go: ``bebop.store``. The trainer's process fills a hidden folder, and the process that
has the run folder's lock lets it appear: a trainer that outlives its driver adds nothing to a run that goes on without
it. ``loop.pt`` is a pickle: load your own checkpoints only.
"""

import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.checkpoint import save_policy
from bebop.store import STEPS, Store, seal, verify


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds beside the servable policy."""

    trainer: dict[str, Any]  # PolicyTrainer.state_dict()
    loop: dict[str, Any]


def store(run_dir: Path) -> Store:
    """The checkpoints of a run."""
    return Store(run_dir, STEPS)


def write(
    folder: Path, policy: Policy, trainer: dict[str, Any], loop: dict[str, Any], dtype: torch.dtype | None = None
) -> None:
    """Fill and seal ``folder``, which must not exist (``Store.staging``). ``dtype``: of ``policy/``."""
    folder.mkdir(parents=True)
    save_policy(policy, folder / "policy", dtype)
    torch.save(trainer, folder / "trainer.pt")
    torch.save(loop, folder / "loop.pt")
    seal(folder)


def load(folder: Path) -> Checkpoint:
    """Verify and read a checkpoint; ``UserError`` names the file that is missing or corrupt. Nothing is removed."""
    verify(folder)
    trainer = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
    try:
        loop = torch.load(folder / "loop.pt", map_location="cpu", weights_only=False)
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder / 'loop.pt'} was written by another version of bebop: {error}") from error
    return Checkpoint(trainer=trainer, loop=loop)
