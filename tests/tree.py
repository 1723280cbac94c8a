"""The project's files as the rules about it see them: sources by module name, and what each imports."""

import ast
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINKS = ("rollout", "trainer", "kernels", "conf")  # bebop/<name> -> ../<name>
# bebop/<value> -> ../<key>, for the wheel
LENT = {"recipes/verl": "verl_job", "recipes/megatron": "megatron_job", "benchmarks": "bench"}
SKIPPED = (".git", ".venv*", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info", "runs", "build", "dist", "outputs")


def files(root: Path = ROOT) -> Iterator[Path]:
    """Every file of the project once, relative to ``root``: not through links, no caches, no run folders."""
    for path in sorted(root.iterdir()):
        if path.is_symlink() or any(fnmatch(path.name, pattern) for pattern in SKIPPED):
            continue
        if path.is_dir():
            yield from (path.relative_to(root) / inner for inner in files(path))
        else:
            yield path.relative_to(root)


def lent(path: Path) -> Path | None:
    """Where a file of a lent folder stands in the wheel: recipes/verl/plugin.py -> bebop/verl_job/plugin.py."""
    folders = (Path(key) for key in LENT if path.is_relative_to(key))
    return next((Path("bebop", LENT[str(f)], path.relative_to(f)) for f in folders), None)


def module_name(path: Path) -> str:
    """rollout/decoding/sampling.py -> bebop.rollout.decoding.sampling; recipes/verl/plugin.py ->
    bebop.verl_job.plugin."""
    if (place := lent(path)) is not None:
        return ".".join([*place.parts[:-1], place.stem])
    parts = [*path.parts[:-1], *([] if path.stem == "__init__" else [path.stem])]
    return ".".join(["bebop", *parts] if parts[0] in LINKS else parts)


def sources() -> dict[str, str]:
    """Module name -> source, for everything but the tests."""
    mine = ("bebop", "recipes", "benchmarks", *LINKS)
    return {module_name(f): (ROOT / f).read_text() for f in files() if f.suffix == ".py" and f.parts[0] in mine}


@cache
def parsed(source: str) -> ast.Module:
    """A source's syntax tree; every rule asks for it."""
    return ast.parse(source)


def imports(source: str, modules: Sequence[str]) -> list[str]:
    """Every import in a source, wherever it stands; ``from a import b`` is a.b where that is one of ``modules``."""
    found = []
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            full = [f"{start}.{alias.name}" for alias in node.names]
            found += [name if name in modules else start for name in full]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            found += [a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    return found


def under(module: str, prefix: str) -> bool:
    """Whether ``module`` is ``prefix`` or inside it; a trailing _ matches the start of a file's name."""
    return module == prefix or module.startswith(prefix if prefix.endswith("_") else prefix + ".")
