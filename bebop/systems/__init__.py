"""The decoding systems and their trained parts, by name.

Every module and folder of this package that has ``SYSTEMS`` is found, see ``base.py``. A new system is a new folder; no
other file is touched. The registry is readable without torch.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from bebop.systems.base import AuxModel, System
from bebop.systems.plain import HEAD


def find_systems() -> Iterator[System]:
    """Yield the systems of every module of this package, those that need the model alone first."""
    for name in sorted((module.name for module in iter_modules(__path__)), key=lambda name: (name != "plain", name)):
        yield from getattr(import_module(f"{__name__}.{name}"), "SYSTEMS", ())


SYSTEMS: dict[str, System] = {system.name: system for system in find_systems()}
PARTS: dict[str, AuxModel] = {HEAD.name: HEAD} | {p.name: p for system in SYSTEMS.values() for p in system.training()}
