"""Import one module of the project with a fault in it. Nothing on disk changes, not even the bytecode cache."""

import linecache
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutants.fault import ROOT, Fault


class _FaultyLoader(SourceFileLoader):
    """Load a source file from the text given instead of the one on disk."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        # Triton reads the text of a kernel again, and would read it from disk. Without a time of change it stays.
        linecache.cache[self.path] = len(self.source), None, self.source.splitlines(keepends=True), self.path
        return compile(self.source, self.path, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        return self.source


class _Finder(MetaPathFinder):
    """Find modules as Python does, but give the module of ``file`` the faulty loader, through whatever link."""

    def __init__(self, file: Path, source: str) -> None:
        self.file, self.source = file, source
        self.loaded = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(("bebop", "recipes")):
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or not spec.has_location or spec.origin is None or Path(spec.origin).resolve() != self.file:
            return None
        self.loaded = True
        loader: Loader = _FaultyLoader(fullname, spec.origin, self.source)
        spec.loader, spec.cached = loader, None
        return spec


def plant(fault: Fault) -> _Finder:
    """Make this process import the faulty module. No module of the project may have been imported before."""
    early = [name for name in sys.modules if name.split(".")[0] in ("bebop", "recipes")]
    assert not early, f"imported before the fault was planted: {early[:3]}"
    finder = _Finder(ROOT / fault.place().file, fault.mutated())
    sys.meta_path.insert(0, finder)
    return finder
