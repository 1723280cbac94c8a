"""Where a run or a measurement was made: commit, processor and versions, without which a number means nothing.

Nothing heavy is imported: a driver without torch can ask.
"""

import os
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MACHINE = "machine.json"  # of a run folder: the machine of its newest start
PACKAGES = ("bebop-rl", "torch", "transformers", "ray")
GPUS = Path("/proc/driver/nvidia/gpus")


@cache
def machine() -> dict[str, object]:
    """Commit, processor, GPU and versions, as ``machine.json`` has them; None for what is not there.

    Asked once a process: what a process runs is what it has imported, whatever is committed meanwhile.

    >>> machine()  # doctest: +SKIP
    {'commit': '3f2c...', 'dirty': False, 'processor': 'AMD EPYC, 2 cores', 'gpu': None, 'python': '3.11.9', ...}
    """
    models = [_gpu(path) for path in sorted(GPUS.glob("*/information"))]
    return {
        **commit(),
        "processor": processor(),
        "gpu": f"{len(models)} x {models[0]}" if models else None,
        "python": platform.python_version(),
        **{package: version_of(package) for package in PACKAGES},
    }


def commit(root: Path = ROOT) -> dict[str, object]:
    """The commit of a checkout, and whether its files differ from it.

    ``dirty`` is None without a repository, and where $BEBOP_COMMIT says which commit it is: files that were copied to
    another machine cannot tell. An installed package is no checkout, whatever repository it lies in.
    """
    told = os.environ.get("BEBOP_COMMIT")
    top = None if told else _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return {"commit": told or "unknown", "dirty": None}
    return {"commit": _git(root, "rev-parse", "HEAD") or "unknown", "dirty": bool(_git(root, "status", "--porcelain"))}


def processor() -> str:
    """Its name, and how many cores there are."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def version_of(package: str) -> str | None:
    """None where it is not installed: decoding and kernels need no ray."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def without_folders(word: str) -> str:
    """A setting or a word of a command, with the last part of absolute paths alone: the rest is of one machine."""
    return re.sub(r"(?:^|(?<=[=\[,{('\" ]))/(?:[^/,\]}]+/)+(?=[^/])", "", word)


def _gpu(path: Path) -> str:
    found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(errors="replace"), re.M)
    return found[1] if found else "GPU"


def _git(root: Path, *arguments: str) -> str | None:
    """What git says; None where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
