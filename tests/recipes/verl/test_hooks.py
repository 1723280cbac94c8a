import asyncio
import inspect
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from bebop.errors import UserError
from bebop.verl_job import hooks
from bebop.verl_job.hooks import Hook, install, wrap


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A package with a module ``leaf``, and a place for hooks ``probe`` in ``bebop.verl_job``."""
    name = f"planted_{tmp_path.name.replace('-', '_')}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "leaf.py").write_text("def greet():\n    return 'stock'\n")
    (folder / "twig.py").write_text(f"from {name}.leaf import greet\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    probe = ModuleType("bebop.verl_job.probe")
    probe.change = lambda module: wrap(module, "greet", lambda original: original() + ", changed")  # type: ignore[attr-defined]
    probe.fail = lambda module: wrap(module, "absent", lambda original: None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "bebop.verl_job.probe", probe)
    monkeypatch.setattr(hooks, "APPLIED", [])
    return name


def load(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def test_a_hook_runs_right_after_its_module_is_imported_and_before_anybody_uses_it(package: str) -> None:
    install([Hook(module=f"{package}.leaf", function="probe.change")])
    assert hooks.applied() == ()
    assert load(f"{package}.twig").greet() == "stock, changed"  # imported from the leaf, so the hook came first
    assert hooks.applied() == ("probe.change",)


def test_a_module_that_is_there_already_is_changed_at_once(package: str) -> None:
    leaf = load(f"{package}.leaf")
    install([Hook(module=f"{package}.leaf", function="probe.change")])
    assert leaf.greet() == "stock, changed"


def test_without_a_hook_nothing_changes(package: str) -> None:
    install([Hook(module=f"{package}.other", function="probe.change")])
    assert load(f"{package}.twig").greet() == "stock"
    assert hooks.applied() == ()


def test_a_hook_that_finds_something_else_than_it_expects_stops_the_import(package: str) -> None:
    install([Hook(module=f"{package}.leaf", function="probe.fail")])
    with pytest.raises(UserError, match=r"no .*leaf.absent.*0.9.x are supported"):
        load(f"{package}.leaf")
    assert hooks.applied() == ()


def test_what_was_a_coroutine_function_stays_one() -> None:
    async def answer() -> int:
        return 1

    async def around(original: Any) -> int:
        return 1 + await original()

    owner = SimpleNamespace(answer=answer)
    wrap(owner, "answer", around)
    assert inspect.iscoroutinefunction(owner.answer)
    assert asyncio.run(owner.answer()) == 2
