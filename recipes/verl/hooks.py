"""Hooks that change verl's modules when verl imports them: no fork, no early import of verl, no silent failure.

A hook runs once, right after its module is imported. If it fails, the import stops. The self-test reads ``applied``.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import wrapt

from bebop.errors import UserError

VERSIONS = "0.9"
APPLIED: list[str] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Hook:
    """One change: ``function`` ("module.name" in ``bebop.verl_job``) is called with ``module`` after its import.

    The function is named, not imported: its module may need torch, Ray or verl, which are imported later.
    """

    module: str
    function: str

    def run(self, module: ModuleType) -> None:
        """Import the function, call it with the module, and record it as applied."""
        file, name = self.function.rsplit(".", 1)
        getattr(importlib.import_module(f"bebop.verl_job.{file}"), name)(module)
        APPLIED.append(self.function)


def install(hooks: Sequence[Hook]) -> None:
    """Register hooks; hooks of modules that are already imported run now."""
    for hook in hooks:
        wrapt.register_post_import_hook(hook.run, hook.module)


def applied() -> tuple[str, ...]:
    """Return the functions of the hooks that ran in this process."""
    return tuple(APPLIED)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, *args, **kwargs)``.

    It raises ``UserError`` if there is no such attribute. It does not use ``wrapt.wrap_function_wrapper``, which binds
    the original and passes a tuple: that hides the arguments' names.
    """
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

    # Ray and verl inspect whether a method is a coroutine function.
    setattr(owner, name, coroutine if inspect.iscoroutinefunction(around) else plain)
