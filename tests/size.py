"""Count what the project is made of: ``python -m tests.size`` prints lines, files, lonely files and import circles.

The product is ``bebop/``, ``rollout/``, ``trainer/``, ``kernels/`` and the recipes for verl and Megatron, which are
parts of the package in a wheel. A file is lonely if exactly one other file of the product imports it, and does so at
the top of a module, and if it is neither the twin of a kernel nor an entry point.
"""

import ast
import statistics
import sys
from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tests.tree import ROOT, files, module_name, parsed

PRODUCT = ("bebop/", "rollout/", "trainer/", "kernels/", "recipes/verl/", "recipes/megatron/")
TWINS = ("_triton.py", "_cpu.py")


def importers(sources: dict[str, str]) -> tuple[dict[str, set[str]], dict[str, set[str]]]:
    """Return which modules each module of ``sources`` imports: at its top, and anywhere."""
    top: dict[str, set[str]] = {name: set() for name in sources}
    anywhere: dict[str, set[str]] = {name: set() for name in sources}
    for name, source in sources.items():
        tree = parsed(source)
        outer = set(map(id, tree.body))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                found = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                found = [f if f in sources else node.module for f in full]
            else:
                continue
            known = {f for f in found if f in sources and f != name}
            anywhere[name] |= known
            if id(node) in outer:
                top[name] |= known
    return top, anywhere


def lonely(sources: dict[str, str], paths: dict[str, str]) -> list[str]:
    """Return the files that exactly one other file imports, and that have no reason to stand alone."""
    top, anywhere = importers(sources)
    by: dict[str, list[str]] = {name: [] for name in sources}
    for name, imported in anywhere.items():
        for other in imported:
            by[other].append(name)
    return [
        f"{paths[name]} ({len(sources[name].splitlines())} lines, for {paths[users[0]]})"
        for name, users in sorted(by.items())
        if len(users) == 1 and name in top[users[0]] and not paths[name].endswith((*TWINS, "__init__.py"))
        and '__name__ == "__main__"' not in sources[name]
    ]  # fmt: skip


def circle(sources: dict[str, str]) -> Iterable[str]:
    """Return the modules of a circle of imports, or nothing if there is none; imports inside functions count.

    A kernel's public function imports its twin where it calls it, and the twin its types: that is no circle.
    """
    twins = tuple(twin.removesuffix(".py") for twin in TWINS)
    graph = {
        name: {other for other in imported if not (other.endswith(twins) and name == other.rpartition("_")[0])}
        for name, imported in importers(sources)[1].items()
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        names: list[str] = error.args[1]
        return names
    return ()


def main(root: Path = ROOT) -> int:
    """Print the numbers."""
    texts = {path.as_posix(): (root / path).read_text() for path in files(root) if path.suffix == ".py"}
    groups = {
        "product": [name for name in texts if name.startswith(PRODUCT)],
        "tests": [name for name in texts if name.startswith("tests/")],
        "studies": [name for name in texts if name.startswith("recipes/") and not name.startswith(PRODUCT)],
        "benchmarks": [name for name in texts if name.startswith("benchmarks/")],
    }
    for group, names in groups.items():
        lengths = [len(texts[name].splitlines()) for name in names]
        print(f"{group}: {sum(lengths):,} lines in {len(names)} files, median {statistics.median(lengths):.0f}")
    words = sum(len((root / path).read_text().split()) for path in files(root) if path.suffix == ".md")
    rooms = [path for path in (root / "bebop").iterdir() if not path.name.startswith("__")]
    print(f"documents: {words:,} words; top level of bebop/: {len(rooms)} files and folders")
    product = {module_name(Path(name)): name for name in groups["product"]}
    sources = {module: texts[name] for module, name in product.items()}
    alone = lonely(sources, product)
    print(f"lonely files: {len(alone)}", *alone, sep="\n  ")
    print("import circle:", " -> ".join(circle(sources)) or "none")
    return 0


if __name__ == "__main__":
    sys.exit(main())
