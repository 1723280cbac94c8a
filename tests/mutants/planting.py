"""Loads one module of the project with a fault in it; nothing on the disk changes, not even the bytecode cache."""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from tests.mutants.fault import ROOT, Fault


class _Planted(SourceFileLoader):
    """A source file as usual, but for its text."""

    def __init__(self, name: str, path: str, source: str) -> None:
        super().__init__(name, path)
        self.source = source

    def get_code(self, fullname: str) -> CodeType:
        return compile(self.source, self.path, "exec", dont_inherit=True)

    def get_source(self, fullname: str) -> str:
        return self.source


class _Finder(MetaPathFinder):
    """Finds every module as Python does, and gives that of ``file`` another loader, whatever link leads to it."""

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
        loader: Loader = _Planted(fullname, spec.origin, self.source)
        spec.loader, spec.cached = loader, None
        return spec


def plant(fault: Fault) -> _Finder:
    """From now on this process imports the faulty module. Nothing of the project may be there yet."""
    early = [name for name in sys.modules if name.split(".")[0] in ("bebop", "recipes")]
    assert not early, f"imported before the fault was planted: {early[:3]}"
    finder = _Finder((ROOT / fault.file).resolve(), fault.mutated())
    sys.meta_path.insert(0, finder)
    return finder
