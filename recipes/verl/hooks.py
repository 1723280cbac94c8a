"""Changes to verl's modules, made when verl imports them: no fork, no import of verl ahead of time, nothing silent.

A hook waits for a module and is run once right after it; one that fails stops the import. ``applied`` is what the
self-test reads.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bebop.errors import UserError

VERSIONS = "0.9"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One change: ``function`` ("module.name" in ``bebop.verl_job``) is called with ``module`` after its import."""

    module: str
    function: str

    def run(self, module: ModuleType) -> None:
        """Make the change."""
        file, name = self.function.rsplit(".", 1)
        getattr(importlib.import_module(f"bebop.verl_job.{file}"), name)(module)
        APPLIED.append(self.function)


WAITING: dict[str, list[Hook]] = {}
APPLIED: list[str] = []


def install(hooks: Sequence[Hook]) -> None:
    """Let hooks wait for their modules; those of modules that are there already run now."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for hook in hooks:
        module = sys.modules.get(hook.module)
        if module is not None and not _half_imported(module):
            hook.run(module)
        else:
            WAITING.setdefault(hook.module, []).append(hook)


def applied() -> tuple[str, ...]:
    """The functions that ran in this process."""
    return tuple(APPLIED)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Put ``around(original, *args, **kwargs)`` in the place of ``owner.name``; ``UserError`` if there is no such."""
    original = getattr(owner, name, None)
    if original is None:
        where = getattr(owner, "__qualname__", getattr(owner, "__name__", repr(owner)))
        raise UserError(f"this verl has no {where}.{name}, which bebop builds on: versions {VERSIONS}.x are supported")

    @functools.wraps(original)
    def plain(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    @functools.wraps(original)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        return await around(original, *args, **kwargs)

    # Ray and verl look at a method to see whether it is a coroutine.
    setattr(owner, name, coroutine if inspect.iscoroutinefunction(around) else plain)


def _half_imported(module: ModuleType) -> bool:
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: lets the others find a module that is waited for, and follows its loading."""

    def __init__(self) -> None:
        self._busy: set[str] = set()

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """See ``MetaPathFinder``."""
        if name not in WAITING or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """The module's own loader; then its hooks."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """See ``Loader``."""
        created: ModuleType | None = self._own.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        """See ``Loader``."""
        self._own.exec_module(module)
        for hook in WAITING.pop(module.__name__, []):
            hook.run(module)
