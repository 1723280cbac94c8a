"""Changes to verl's modules, made when verl imports them: no fork, no import of verl ahead of time, nothing silent.

A hook runs once, right after its module is imported. One that fails stops the import. ``applied`` is for the self-test.
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

    The function is named, not imported: its module may need torch, Ray or verl, which come later.
    """

    module: str
    function: str

    def run(self, module: ModuleType) -> None:
        """Make the change."""
        file, name = self.function.rsplit(".", 1)
        getattr(importlib.import_module(f"bebop.verl_job.{file}"), name)(module)
        APPLIED.append(self.function)


def install(hooks: Sequence[Hook]) -> None:
    """Register hooks; those of modules that are imported already run now."""
    for hook in hooks:
        wrapt.register_post_import_hook(hook.run, hook.module)


def applied() -> tuple[str, ...]:
    """Return the functions of the hooks that ran in this process."""
    return tuple(APPLIED)


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``around(original, *args, **kwargs)``; ``UserError`` if there is no such attribute.

    Not ``wrapt.wrap_function_wrapper``: it binds the original and hands over a tuple, which hides the arguments' names.
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

    # Ray and verl look at a method to see whether it is a coroutine.
    setattr(owner, name, coroutine if inspect.iscoroutinefunction(around) else plain)
