"""Description of the machine and software of a run or a measurement: commit, processor, GPU and versions.

It imports nothing heavy, so a driver without torch can use it.
"""

import os
import platform
import re
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MACHINE = "machine.json"  # in a run folder: the machine of its newest start
PACKAGES = ("bebop-rl", "torch", "transformers", "ray")
GPUS = Path("/proc/driver/nvidia/gpus")


@cache
def machine() -> dict[str, object]:
    """Return commit, processor, GPU and versions, as stored in ``machine.json``; None for unknown values.

    The result is cached per process: a process runs the code that it imported, whatever is committed meanwhile.

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
    """Return the commit of a checkout, and whether its files differ from it (``dirty``).

    ``dirty`` is None without a repository, and if $BEBOP_COMMIT names the commit, since files copied to another machine
    cannot be compared. An installed package is no checkout, whatever repository it lies in.
    """
    given = os.environ.get("BEBOP_COMMIT")
    top = None if given else _git(root, "rev-parse", "--show-toplevel")
    if top is None or Path(top).resolve() != root.resolve():
        return {"commit": given or "unknown", "dirty": None}
    return {"commit": _git(root, "rev-parse", "HEAD") or "unknown", "dirty": bool(_git(root, "status", "--porcelain"))}


def processor() -> str:
    """Return the processor's name and the number of its cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def version_of(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def without_folders(word: str) -> str:
    """Return a setting or a word of a command with absolute paths cut to their last part, as the rest is
    machine-specific.
    """
    return re.sub(r"(?:^|(?<=[=\[,{('\" ]))/(?:[^/,\]}]+/)+(?=[^/])", "", word)


def _gpu(path: Path) -> str:
    found = re.search(r"^Model:\s*(.+?)\s*$", path.read_text(errors="replace"), re.M)
    return found[1] if found else "GPU"


def _git(root: Path, *arguments: str) -> str | None:
    """Return the output of a git command; None if there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
