"""Checkpoints of a run: written whole or not at all, checked before they are believed.

``<run>/checkpoints/step_000020/``::

    policy/        a Hugging Face folder in the model's dtype: what engines serve
    trainer.pt     fp32 master weights, optimizer, version, random generators: what an exact resume needs
    loop.pt        what the loop handed in (prompt cursor, buffered groups): opaque here
    manifest.json  size and SHA-256 of each file above

A checkpoint is written into a hidden folder beside its place, flushed to the disk, and renamed; a killed writer leaves
a hidden folder that nobody reads and that ``prune`` removes. ``loop.pt`` is a pickle: load your own checkpoints only.
"""

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.model.checkpoint import save_policy

FORMAT = 1
_STEP = re.compile(r"step_(\d{6,})")
_HIDDEN = ".partial-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a checkpoint holds beside the servable policy."""

    trainer: dict[str, Any]  # PolicyTrainer.state_dict()
    loop: dict[str, Any]


def folder_of(run_dir: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` updates belongs: ``<run>/checkpoints/step_000020``."""
    return run_dir / "checkpoints" / f"step_{step:06d}"


def write(
    folder: Path, policy: Policy, trainer: dict[str, Any], loop: dict[str, Any], dtype: torch.dtype | None = None
) -> None:
    """Write a checkpoint, atomically; one that is already at ``folder`` is replaced. ``dtype``: of ``policy/``."""
    partial = folder.with_name(_HIDDEN + folder.name)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_policy(policy, partial / "policy", dtype)
    torch.save(trainer, partial / "trainer.pt")
    torch.save(loop, partial / "loop.pt")
    entries = {name: _entry(partial / name) for name in sorted(_files(partial))}
    (partial / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": entries}, indent=2) + "\n")
    for path in (*partial.rglob("*"), partial):
        _flush(path)
    if folder.exists():
        old = folder.with_name(_HIDDEN + "old-" + folder.name)
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
        partial.rename(folder)
        shutil.rmtree(old)
    else:
        partial.rename(folder)
    _flush(folder.parent)


def steps(run_dir: Path) -> list[Path]:
    """The finished checkpoints of a run, oldest first."""
    found = [p for p in (run_dir / "checkpoints").glob("step_*") if _STEP.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step_")))


def latest(run_dir: Path) -> Path | None:
    """The newest finished checkpoint; None if there is none. It is not verified here: ``load`` does that."""
    found = steps(run_dir)
    return found[-1] if found else None


def load(folder: Path) -> Checkpoint:
    """Verify and read a checkpoint; ``UserError`` names the file that is missing or corrupt. Nothing is removed."""
    verify(folder)
    trainer = torch.load(folder / "trainer.pt", map_location="cpu", weights_only=True)
    try:
        loop = torch.load(folder / "loop.pt", map_location="cpu", weights_only=False)
    except (AttributeError, ImportError, pickle.UnpicklingError) as error:
        raise UserError(f"{folder / 'loop.pt'} was written by another version of bebop: {error}") from error
    return Checkpoint(trainer=trainer, loop=loop)


def verify(folder: Path) -> None:
    """Check every file against the manifest; ``UserError`` names the first that differs."""
    manifest = folder / "manifest.json"
    advice = f"remove {folder} to resume from an older checkpoint"
    try:
        content = json.loads(manifest.read_text())
        form, files = content["format"], content["files"]
    except FileNotFoundError:
        raise UserError(f"{manifest} is missing, so the checkpoint is incomplete: {advice}") from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{manifest} is corrupt: {advice}") from None
    if form != FORMAT:
        raise UserError(f"{manifest}: format {form!r} is not known, this version of bebop reads format {FORMAT}")
    for name, entry in files.items():
        if not (folder / name).is_file():
            raise UserError(f"{folder / name} is missing, so the checkpoint is incomplete: {advice}")
        if _entry(folder / name) != entry:
            raise UserError(f"{folder / name} is corrupt (size or checksum differ from manifest.json): {advice}")


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints, and what interrupted writers left. Not while one is writing."""
    for path in steps(run_dir)[: -max(1, keep)]:
        shutil.rmtree(path)
    for path in (run_dir / "checkpoints").glob(_HIDDEN + "*"):
        shutil.rmtree(path)


def _files(folder: Path) -> Iterator[str]:
    """Names, relative to ``folder``, of the files in it."""
    return (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def _entry(path: Path) -> dict[str, int | str]:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _flush(path: Path) -> None:
    """Have a file or folder on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
