"""SGLang, read without importing it."""

import ast
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from recipes.upstream.defect import Defect


def the_engine_passes_fewer_fields_on() -> bool:
    """``extra_key`` keeps one version's prefixes from another's: over HTTP, not by ``Engine.async_generate``."""
    engine = _class("srt/entrypoints/engine.py", "Engine")
    (call,) = (node for node in engine.body if getattr(node, "name", "") == "async_generate")
    assert isinstance(call, ast.AsyncFunctionDef)
    passed = {argument.arg for argument in call.args.args + call.args.kwonlyargs}
    return "extra_key" not in passed


def errors_of_plugins_are_swallowed() -> bool:
    """A plugin that raises while it is loaded is logged, and the server starts without it."""
    tree = ast.parse((_root() / "srt/plugins/__init__.py").read_text())
    handlers = [node for node in ast.walk(tree) if isinstance(node, ast.ExceptHandler)]
    return any(not any(isinstance(node, ast.Raise) for node in ast.walk(handler)) for handler in handlers)


@cache
def _root() -> Path:
    spec = find_spec("sglang")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def _class(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((_root() / path).read_text())
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)
    return found


DEFECTS = (
    Defect(name="sglang-fields", program="sglang", version="0.5.23", there=the_engine_passes_fewer_fields_on),
    Defect(name="sglang-plugins", program="sglang", version="0.5.23", there=errors_of_plugins_are_swallowed),
)
