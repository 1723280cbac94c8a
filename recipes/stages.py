"""Stages of a recipe: each writes one folder, wholly or not at all, and a finished stage is not repeated."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bebop.command import writing
from bebop.errors import UserError

SETTINGS = "settings.json"
STAGE = "stage.json"  # of a finished stage: its seconds, and what it measured


def claim(plan: Any, out: Path) -> None:
    """Create the folder, or check that it belongs to the same plan, a dataclass with ``seeds``."""
    path, wanted = out / SETTINGS, dataclasses.asdict(plan)
    if path.is_file():
        found = json.loads(path.read_text())
        # More seeds only add jobs to the finished ones.
        if {**found, "seeds": 0} != {**wanted, "seeds": 0}:
            differing = ", ".join(name for name in wanted if found.get(name) != wanted[name])
            raise UserError(f"--out {out} was begun with other settings ({differing}): give another folder")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(wanted, indent=1) + "\n")


def once(folder: Path, stage: Callable[[Path], Mapping[str, Any]]) -> None:
    """Run a stage unless it is finished; a stopped stage starts again from the beginning."""
    if (folder / STAGE).is_file():
        return
    shutil.rmtree(folder, ignore_errors=True)
    began, processor = time.perf_counter(), processor_seconds()
    measured = stage(folder)
    took = {"seconds": time.perf_counter() - began, "processor_seconds": processor_seconds() - processor}
    scratch = folder / f"{STAGE}.new"
    with writing(folder):
        scratch.write_text(json.dumps({**took, **measured}, indent=1) + "\n")
        scratch.replace(folder / STAGE)


def read(folder: Path) -> dict[str, Any]:
    """Return the measurements of a finished stage."""
    found: dict[str, Any] = json.loads((folder / STAGE).read_text())
    return found


def bebop(command: str, *overrides: str) -> None:
    """Run one of Bebop's commands in its own process, with its own progress bars; raise ``UserError`` if it fails."""
    done = subprocess.run([sys.executable, "-m", f"bebop.{command}", *overrides], check=False)
    if done.returncode != 0:
        raise UserError(f"bebop.{command} ended with status {done.returncode}; run it again to go on from this stage")


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its finished children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
