"""What ``make lint`` checks beside ruff and mypy: who imports whom, and how long files and functions are.

``python -m tests.lint [ROOT]`` exits with 1 if a contract of ``[tool.importlinter]`` in pyproject.toml is broken or a
Python file or function is too long.

import-linter follows no links and wants an ``__init__.py`` in every package. ``bebop/rollout`` and others are links to
folders that must not have one. So it reads a copy of the sources in which they are ordinary packages.
"""

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.tree import LENT, ROOT, files

PACKAGES = ("bebop", "recipes")
FILE, FUNCTION = 600, 80  # lines; ruff counts statements only


def copy_packages(root: Path, target: Path) -> None:
    """Write the Python files of the packages below ``target``; what a link lends to bebop stands there only."""
    for package in PACKAGES:
        for place, folders, names in os.walk(root / package, followlinks=True):
            here = Path(place).relative_to(root)
            folders[:] = [name for name in folders if name != "__pycache__" and f"{here}/{name}" not in LENT]
            (target / here).mkdir()
            (target / here / "__init__.py").touch()
            for name in names:
                if name.endswith(".py"):
                    shutil.copyfile(Path(place, name), target / here / name)


def check_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter with the contracts of ``root``, and return its exit code and report."""
    with tempfile.TemporaryDirectory() as folder:
        copy_packages(root, Path(folder))
        linter = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
        return subprocess.run([*linter, str(root / "pyproject.toml")], cwd=folder, capture_output=True, text=True)


def too_long(name: str, source: str) -> Iterator[str]:
    """Yield one line for a file and one for each function, decorators included, that is longer than it may be."""
    if (count := len(source.splitlines())) > FILE:
        yield f"{name}: {count} lines, {FILE} are allowed in a file"
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(n.lineno for n in (node, *node.decorator_list))
            if (count := (node.end_lineno or first) - first + 1) > FUNCTION:
                yield f"{name}:{first}: {node.name} has {count} lines, {FUNCTION} are allowed in a function"


def main(root: Path = ROOT) -> int:
    """Print what is wrong, or what was checked; return the exit code."""
    imports = check_imports(root)
    print(imports.stdout + imports.stderr, end="")
    texts = {str(path): (root / path).read_text() for path in files(root) if path.suffix == ".py"}
    long = [line for name, text in texts.items() for line in too_long(name, text)]
    print("\n".join(long) or f"Lengths: {len(texts)} files of at most {FILE} lines, functions of at most {FUNCTION}.")
    return int(imports.returncode != 0 or bool(long))


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:])))
