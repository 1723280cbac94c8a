"""A copy of an installed program with a patch of ``patches/``, in which a reproduction is run again."""

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
    """Return the patch that mends a defect; ``UserError`` if there is none."""
    path = PATCHES / f"{name}.patch"
    if not path.exists():
        there = ", ".join(sorted(found.stem for found in PATCHES.glob("*.patch")))
        raise UserError(f"{name!r} has no patch in recipes/upstream/patches: choose of {there}")
    return path


def patched_verdict(name: str, program: str) -> str:
    """Apply the patch to a copy of ``program`` and return what ``python -m recipes.upstream`` says of it then."""
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
    """Copy the installed package into ``folder`` and patch it there; ``UserError`` if the patch does not apply."""
    spec = find_spec(program)
    assert spec is not None and spec.origin is not None
    shutil.copytree(Path(spec.origin).parent, folder / program, copy_function=_link)
    apply(patch, folder)


def apply(patch: Path, folder: Path) -> None:
    """Apply a patch to the packages in ``folder``; ``UserError`` if it does not apply."""
    for line in patch.read_text().splitlines():
        if line.startswith("+++ b/"):  # a file of its own, as a link would change the installed one, too
            path = folder / line.removeprefix("+++ b/")
            content = path.read_bytes()
            path.unlink()
            path.write_bytes(content)
    command = ["patch", "--batch", "--fuzz=0", "-p1", "-i", str(patch)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"{patch.name} does not apply to what is installed: {done.stdout.strip()[-300:]}")


def _link(source: str, target: str) -> None:
    """Share a file with the installed package where both lie on one file system: packages of engines are large."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
