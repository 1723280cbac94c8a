"""A Python file of the user's as a module, which leaves nothing beside it."""

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


class _Unwritten(SourceFileLoader):
    """Keeps no bytecode: a refused job writes nothing, and a file that changed within a second is read anew."""

    def set_data(self, path: str, data: object, *, _mode: int = 0o666) -> None:
        """Where importlib would write ``__pycache__``."""


def load_file(path: Path, kind: str) -> ModuleType:
    """Run a file as the module ``bebop_KIND_STEM``; what it raises comes out.

    The module is known by its name while it runs: there dataclasses look for the types of their fields.
    """
    name = f"bebop_{kind}_{path.stem}"
    loader = _Unwritten(name, str(path))
    spec = spec_from_file_location(name, path, loader=loader)
    assert spec is not None, "a file with a loader has a spec"
    module = module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
