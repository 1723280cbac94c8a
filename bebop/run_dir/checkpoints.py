"""Writes, finds and removes checkpoints, which exist completely or not at all.

A checkpoint is a folder ``<run>/checkpoints/<prefix>000020``. Invariants:

- It is written under a hidden name and sealed: a manifest has size and SHA-256 of every file, and files and folders
  are flushed to the disk. Then *one* rename moves it to a free name.
- Nothing is ever replaced: saving a step once more gives ``<prefix>000020.2``. Once the older one
  has been removed, another single rename gives it the step's first name.
- So a crash leaves the checkpoints from before or those from after, and at worst a hidden folder that nobody reads.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop.errors import UserError

log = logging.getLogger(__name__)
FORMAT = 1
MANIFEST = "manifest.json"
HIDDEN = ".partial-"
ASIDE = "aside-"
STEPS, HEADS = "step_", "head_"  # prefixes: of a run, of an adaptation
MODEL = "model"  # in a run folder: a link to the newest policy of a run, the folder that an adaptation wrote
POLICY = "policy"  # in a checkpoint of a run: the model as a Hugging Face folder, or the adapter that was trained
ADAPTER = "adapter_config.json"  # in a folder that peft writes


class DamagedError(UserError):
    """Incomplete or corrupt checkpoint, described in one line."""


@dataclass(frozen=True, slots=True)
class Store:
    """Checkpoints of one kind in one run: ``Store(run_dir, "step_")``."""

    run_dir: Path
    prefix: str

    @property
    def folder(self) -> Path:
        """Return the folder of the checkpoints."""
        return self.run_dir / "checkpoints"

    def path(self, step: int) -> Path:
        """Return the path of the first checkpoint of a step."""
        return self.folder / f"{self.prefix}{step:06d}"

    def staging(self, step: int) -> Path:
        """Return a new hidden path to write a checkpoint to; it does not exist yet."""
        return self.folder / f"{HIDDEN}{self.path(step).name}-{uuid.uuid4().hex[:8]}"

    def publish(self, staged: Path, step: int) -> Path:
        """Rename a sealed folder to its public path and return that path. Only one process may do so at a time."""
        newest = self.newest(step)
        place, again = newest or self.path(step), 1 if newest is None else self._place(newest)[1]
        while os.path.lexists(place):
            again += 1
            place = self.folder / f"{self.path(step).name}.{again}"
        os.rename(staged, place)
        flush(self.folder)
        return place

    def rename(self, path: Path) -> Path:
        """Give a checkpoint the first name of its step if it is the only one left of it, and return its path."""
        first, step = self.path(self.step(path)), self.step(path)
        if os.path.lexists(first) or any(other != path for other in self.all() if self.step(other) == step):
            return path
        os.rename(path, first)
        flush(self.folder)
        return first

    def all(self) -> list[Path]:
        """Return every published checkpoint, oldest first, those of one step in the order of writing."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if self._place(p) and p.is_dir()), key=self._place)

    def step(self, path: Path) -> int:
        """Return the step of a checkpoint: the number of updates before it was written."""
        return self._place(path)[0]

    def newest(self, step: int) -> Path | None:
        """Return the newest checkpoint of a step; None if there is none."""
        return next((path for path in reversed(self.all()) if self.step(path) == step), None)

    def newest_sound(self) -> Path | None:
        """Return the newest intact checkpoint; None if there is no checkpoint.

        Logs a warning for each damaged one that is skipped; raises ``UserError`` if all are damaged.
        """
        saved, damages = self.all(), []
        for path in reversed(saved):
            try:
                verify(path)
            except DamagedError as damage:
                damages.append(damage)
                continue
            for skipped in damages:
                log.warning("%s; going on from %s", skipped, path.name)
            return path
        if saved:
            raise UserError(f"{self.folder} holds no checkpoint that is whole: {'; '.join(map(str, damages))}")
        return None

    def set_aside(self, newest: Path | None) -> None:
        """Rename the checkpoints after ``newest``, from which the run continues: they no longer belong to it."""
        newer = [path for path in self.all() if newest is None or self._place(path) > self._place(newest)]
        for path in newer:
            os.rename(path, self.folder / f"{ASIDE}{path.name}-{uuid.uuid4().hex[:8]}")
        if newer:
            flush(self.folder)

    def prune(self, keep: int, written: Path, best: int | None = None) -> None:
        """Remove all but the newest ``keep`` checkpoints and the files of interrupted writers; never run it beside a
        writer.

        The checkpoint of step ``best`` is kept in addition.

        ``written``, which this process has just published, stays. If its file names or sizes have changed since then,
        everything stays.
        """
        try:
            verify(written, contents=False)
        except DamagedError as damage:
            log.warning("%s; older checkpoints are kept", damage)
            return
        newest: dict[int, Path] = {self.step(path): path for path in self.all()}  # the last of each step
        steps = [step for step in sorted(newest) if step != self.step(written)]
        kept = {written, *(newest[step] for step in steps[max(0, len(steps) - (max(1, keep) - 1)) :])}
        if best is not None and best in newest:
            kept.add(newest[best])
        for path in self.all():
            if path not in kept:
                self._remove(path)
        for path in self.folder.iterdir():
            if HIDDEN in path.name:
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """Rename a checkpoint before removing it, so that a half-removed folder does not count as a checkpoint."""
        hidden = path.with_name(f"{HIDDEN}old-{path.name}-{uuid.uuid4().hex[:8]}")
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _place(self, path: Path) -> tuple[int, ...]:
        """Return a checkpoint's step and its number among those of the step; empty for another name."""
        match = re.fullmatch(re.escape(self.prefix) + r"(\d{6,})(?:\.(\d+))?", path.name)
        return (int(match[1]), int(match[2] or 1)) if match else ()


def link_model(run_dir: Path, newest: Path | None) -> None:
    """Point ``RUN/model`` to the policy of checkpoint ``newest``, or remove the link if it is None.

    The link is relative, so that a run folder may move. If a user has put something else in its place, that stays. A
    file system without links leaves the model in its checkpoint only.
    """
    link = run_dir / MODEL
    if os.path.lexists(link) and not _leads_to_checkpoint(link):
        return
    if newest is None:
        link.unlink(missing_ok=True)
        return
    scratch = run_dir / f".{MODEL}-{uuid.uuid4().hex[:8]}"
    try:
        os.symlink((newest / POLICY).relative_to(run_dir), scratch, target_is_directory=True)
        os.replace(scratch, link)
    except OSError as error:
        log.warning("%s cannot be made (%s): the model is %s", link, error.strerror, newest / POLICY)


def newest_model(run_dir: Path) -> Path | None:
    """Return the path of a run's newest model, relative to its folder: ``model`` if that links to a checkpoint that is
    there, else the policy of the newest checkpoint; None before the first checkpoint.
    """
    if _leads_to_checkpoint(run_dir / MODEL) and (run_dir / MODEL).exists():  # a crash may end a save in between
        return Path(MODEL)
    saved = Store(run_dir, STEPS).all()
    return (saved[-1] / POLICY).relative_to(run_dir) if saved else None


def holds_adapter(folder: Path) -> bool:
    """Return whether a folder holds a LoRA adapter without its model."""
    return (folder / ADAPTER).is_file() and not (folder / "config.json").is_file()


def _leads_to_checkpoint(link: Path) -> bool:
    """Return whether ``link`` was made by ``link_model``."""
    return link.is_symlink() and link.readlink().parts[:1] == ("checkpoints",)


def seal(folder: Path) -> None:
    """Write the manifest of a complete folder, and flush the whole folder to the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {path.relative_to(folder).as_posix(): _entry(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": entries}, indent=2) + "\n")
    for path in (*folder.rglob("*"), folder, folder.parent, folder.parent.parent):
        flush(path)


def verify(folder: Path, contents: bool = True) -> None:
    """Check every file against the manifest; without ``contents`` only names and sizes.

    Raise ``DamagedError`` with the first file that differs, and ``UserError`` for an unknown format.
    """
    manifest = folder / MANIFEST
    try:
        content = json.loads(manifest.read_text())
        form, files = content["format"], content["files"]
    except FileNotFoundError:
        raise DamagedError(f"{manifest} is missing, so the checkpoint is incomplete") from None
    except OSError as error:
        raise DamagedError(f"{manifest} cannot be read ({error.strerror})") from None
    except (ValueError, KeyError, TypeError):
        raise DamagedError(f"{manifest} is corrupt") from None
    if form != FORMAT:
        raise UserError(f"{manifest}: format {form!r} is not known, this version of bebop reads format {FORMAT}")
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{path} is missing, so the checkpoint is incomplete")
        try:
            same = path.stat().st_size == entry["bytes"] and (not contents or _entry(path) == entry)
        except OSError as error:
            raise DamagedError(f"{path} cannot be read ({error.strerror})") from None
        if not same:
            raise DamagedError(f"{path} is corrupt (size or checksum differ from {MANIFEST})")


def write_text(path: Path, text: str) -> None:
    """Replace a file atomically and flush it to the disk: a reader finds the old text or the new one."""
    scratch = path.with_name(f".{path.name}.new")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Flush a file, or a folder's list of names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some file systems cannot flush folders and raise an error; nothing else can be done there.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(path: Path) -> dict[str, Any]:
    """Return size and checksum of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
