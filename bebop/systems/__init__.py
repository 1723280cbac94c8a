"""Registry of the decoding systems and their trained parts, by name.

It finds every module and folder of this package with a ``SYSTEMS`` attribute, see ``base.py``. A new system is a new
folder, and no other file changes. The registry can be read without torch.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from bebop.systems.base import AuxModel, System


def _modules() -> Iterator[ModuleType]:
    """Yield every module of this package; that of the systems that need only the model comes first."""
    names = sorted((module.name for module in iter_modules(__path__)), key=lambda name: (name != "plain", name))
    yield from (import_module(f"{__name__}.{name}") for name in names)


def find_systems() -> Iterator[System]:
    """Yield the systems of every module of this package."""
    for module in _modules():
        yield from getattr(module, "SYSTEMS", ())


SYSTEMS: dict[str, System] = {system.name: system for system in find_systems()}
# Parts in the model's own checkpoint, and parts that systems need.
PARTS: dict[str, AuxModel] = {part.name: part for module in _modules() for part in getattr(module, "PARTS", ())}
PARTS |= {part.name: part for system in SYSTEMS.values() for part in system.training()}
