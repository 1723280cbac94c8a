"""Copy an installed program, apply a patch of ``patches/`` to the copy, and run a reproduction again in it."""

import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from bebop.errors import UserError

PATCHES = Path(__file__).parent / "patches"


def patch_of(name: str) -> Path:
    """Return the patch that fixes a defect; raise ``UserError`` if there is none."""
    path = PATCHES / f"{name}.patch"
    if not path.exists():
        there = ", ".join(sorted(found.stem for found in PATCHES.glob("*.patch")))
        raise UserError(f"{name!r} has no patch in recipes/upstream/patches: choose of {there}")
    return path


def patched_verdict(name: str, program: str) -> str:
    """Apply the patch to a copy of ``program`` and return the verdict of ``python -m recipes.upstream`` on the copy."""
    patch = patch_of(name)
    with tempfile.TemporaryDirectory() as folder:
        copy_with_patch(program, patch, Path(folder))
        paths = [folder, *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-m", "recipes.upstream", name]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    line = next((line for line in done.stdout.splitlines() if line.startswith(f"{name} ")), None)
    if line is None:
        raise UserError(f"the reproduction of {name} failed under its patch: {done.stderr.strip()[-300:]}")
    return line.split(maxsplit=1)[1]


def copy_with_patch(program: str, patch: Path, folder: Path) -> None:
    """Copy the installed package into ``folder`` and patch the copy; raise ``UserError`` if that fails."""
    spec = find_spec(program)
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / program, copy_function=_link)
    apply(patch, folder)


def apply(patch: Path, folder: Path) -> None:
    """Apply a patch to the packages in ``folder``; raise ``UserError`` if it does not apply."""
    for line in patch.read_text().splitlines():
        if line.startswith("+++ b/"):  # copy the file: a hard link would change the installed one, too
            path = folder / line.removeprefix("+++ b/")
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
    command = ["patch", "--batch", "--fuzz=0", "-p1", "-i", str(patch)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{patch.name} does not apply to what is installed: {done.stdout.strip()[-300:]}")


def _link(source: str, target: str) -> None:
    """Hard-link a file of the installed package if possible, else copy it: packages of engines are large."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
