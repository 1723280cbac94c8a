"""Folders that are there whole or not at all: how every checkpoint is written, found again and cleared away.

A checkpoint is a folder ``<run>/checkpoints/<prefix>000020``. It is filled under a hidden name, sealed (a manifest with
size and SHA-256 of every file; files and folders flushed to the disk), and appears by *one* rename to a free name.
Nothing is ever replaced: saving a step once more gives ``<prefix>000020.2``, and the older one goes afterwards. So a
crash leaves what was there before, or what is there now, and at worst a hidden folder that nobody reads.
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


class DamagedError(UserError):
    """A checkpoint that is incomplete or corrupt, in one line."""


@dataclass(frozen=True, slots=True)
class Store:
    """The checkpoints of one run, of one kind: ``Store(run_dir, "step_")``."""

    run_dir: Path
    prefix: str

    @property
    def folder(self) -> Path:
        """Where they are."""
        return self.run_dir / "checkpoints"

    def path(self, step: int) -> Path:
        """The name under which the first checkpoint of a step appears."""
        return self.folder / f"{self.prefix}{step:06d}"

    def staging(self, step: int) -> Path:
        """A fresh hidden name to fill; it does not exist yet."""
        return self.folder / f"{HIDDEN}{self.path(step).name}-{uuid.uuid4().hex[:8]}"

    def publish(self, staged: Path, step: int) -> Path:
        """Let a sealed folder appear, the only step that counts; returns its place. One writer at a time."""
        place, again = self.path(step), 1
        while os.path.lexists(place):
            again += 1
            place = self.folder / f"{self.path(step).name}.{again}"
        os.rename(staged, place)
        flush(self.folder)
        return place

    def all(self) -> list[Path]:
        """Every checkpoint that has appeared, oldest first; of one step, in the order in which they were written."""
        if not self.folder.is_dir():
            return []
        return sorted((p for p in self.folder.iterdir() if self._place(p) and p.is_dir()), key=self._place)

    def step(self, path: Path) -> int:
        """After how many updates a checkpoint was written."""
        return self._place(path)[0]

    def newest_sound(self) -> Path | None:
        """The newest checkpoint that is whole; None if there is none at all.

        Warns of each damaged one that is passed over. ``UserError`` if all are damaged.
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
        """Rename what is newer than the checkpoint that a run goes on from: it is not of this run any more."""
        newer = [path for path in self.all() if newest is None or self._place(path) > self._place(newest)]
        for path in newer:
            os.rename(path, self.folder / f"{ASIDE}{path.name}-{uuid.uuid4().hex[:8]}")
        if newer:
            flush(self.folder)

    def prune(self, keep: int, written: Path) -> None:
        """Remove all but the newest ``keep`` checkpoints, and what interrupted writers left. Not while one is writing.

        ``written`` is the one that this process has just published. It stays; and should it not be as it was written
        (judged by names and sizes), everything does.
        """
        try:
            verify(written, contents=False)
        except DamagedError as damage:
            log.warning("%s; older checkpoints are kept", damage)
            return
        newest: dict[int, Path] = {self.step(path): path for path in self.all()}  # the last of each step
        steps = [step for step in sorted(newest) if step != self.step(written)]
        kept = {written, *(newest[step] for step in steps[max(0, len(steps) - (max(1, keep) - 1)) :])}
        for path in self.all():
            if path not in kept:
                self._remove(path)
        for path in self.folder.iterdir():
            if HIDDEN in path.name:
                shutil.rmtree(path, ignore_errors=True)

    def _remove(self, path: Path) -> None:
        """By its name first, so that a half removed checkpoint is none."""
        hidden = path.with_name(f"{HIDDEN}old-{path.name}-{uuid.uuid4().hex[:8]}")
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)

    def _place(self, path: Path) -> tuple[int, ...]:
        """Step and how often it had been saved; empty for another name."""
        match = re.fullmatch(re.escape(self.prefix) + r"(\d{6,})(?:\.(\d+))?", path.name)
        return (int(match[1]), int(match[2] or 1)) if match else ()


def seal(folder: Path) -> None:
    """Write the manifest of a folder that is complete, and have all of it on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    entries = {path.relative_to(folder).as_posix(): _entry(path) for path in files}
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": entries}, indent=2) + "\n")
    for path in (*folder.rglob("*"), folder, folder.parent, folder.parent.parent):
        flush(path)


def verify(folder: Path, contents: bool = True) -> None:
    """Check every file against the manifest; ``DamagedError`` names the first that differs.

    ``contents`` False reads nothing but the manifest: names and sizes. ``UserError`` for an unknown format.
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
    """Replace a file in one step, on the disk when this returns: a reader finds the old text or the new one."""
    scratch = path.with_name(f".{path.name}.new")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    flush(path.parent)


def flush(path: Path) -> None:
    """Have a file, or a folder's list of names, on the disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        # Some file systems cannot flush folders and say so; there is nothing else to do there.
        with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _entry(path: Path) -> dict[str, Any]:
    """Size and checksum of a file."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}
