"""Triton's interpreter at less than half of its price."""

import functools
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Let no garbage be collected during a test.

    The interpreter parses each kernel. Python 3.11 raises SystemError ("recursion depth mismatch") where a collection
    in the middle of that runs a finalizer which parses, too, as showing the traceback of a lost exception does.
    """
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def patched_once() -> Iterator[None]:
    """Patch Triton's language once a launch.

    The interpreter does so again for every call of a function within a kernel, which is more than half of its time. The
    second patch of the same module in a launch changes nothing.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched: set[str] = set()

    @functools.cache
    def modules_of(function: Callable[..., Any]) -> frozenset[str]:
        """Return the names of the language's modules that a function sees."""
        seen = {id(value) for value in function.__globals__.values()}
        return frozenset(one.__name__ for one in (interpreter.tl, interpreter.tl.core) if id(one) in seen)

    def patch_once(function: Callable[..., Any]) -> Any:
        if modules_of(function) <= patched:
            return None  # a call within a kernel makes no use of what is returned
        patched.update(modules_of(function))
        return patch(function)

    def launch_anew(self: Any, *arguments: Any, **options: Any) -> Any:
        patched.clear()  # the launch before has put the language back
        return launch(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang", patch_once)
        context.setattr(interpreter.GridExecutor, "__call__", launch_anew)
        yield
