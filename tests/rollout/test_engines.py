"""The table of engines: every name that a job may give has a module, which offers what the others rely on."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from typing import get_args, get_type_hints

import pytest

from bebop.config.fields import from_dict
from bebop.config.job import JobConfig, RolloutConfig, RuntimeConfig
from bebop.errors import UserError
from bebop.rollout.engines import ENGINES, EngineModule, engine_module
from tests.tree import sources


def test_there_is_a_module_for_every_engine_that_a_job_may_name() -> None:
    assert set(ENGINES) == set(get_args(get_type_hints(RolloutConfig)["engine"]))
    assert engine_module(JobConfig()).__name__ == ENGINES["torch"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ENGINES)
def test_a_module_offers_what_others_rely_on(name: str) -> None:
    module = import_module(ENGINES[name])
    assert isinstance(module.EMBEDDED, bool)
    for function in ("check", "gpus", "make"):
        wanted = inspect.signature(getattr(EngineModule, function)).parameters
        assert list(inspect.signature(getattr(module, function)).parameters) == [n for n in wanted if n != "self"]


def compared(source: str) -> list[str]:
    """Comparisons with the name of the engine that a job asks for."""
    found = [ast.unparse(node) for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Compare)]
    return [text for text in found if "rollout.engine" in text]


def test_engines_are_asked_for_their_properties_and_not_for_their_names() -> None:
    texts = {module: source for module, source in sources().items() if "rollout.engine" in source}
    assert {module: found for module, source in texts.items() if (found := compared(source))} == {}
    assert compared("if self.config.rollout.engine == 'torch': pass") and compared("x = rollout.engine in ('a', 'b')")


@pytest.mark.slow
def test_the_table_and_the_modules_load_nothing_heavy() -> None:
    """Settings are checked, and GPUs counted, before anything that takes long is imported."""
    script = "import sys; from bebop.rollout.engines import ENGINES; print('torch' in sys.modules); "
    script += "[__import__(m) for m in ENGINES.values()]; print('sglang' in sys.modules, 'ray' in sys.modules)"
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split()[1:] == ["False", "False"]


def test_the_embedded_engine_must_fit_the_machine_that_it_runs_on() -> None:
    sections = {"rollout": {"slots": 10**6, "max_length": 10**6}, "model": {"device": "cpu"}}
    config = from_dict(JobConfig, sections)
    with pytest.raises(UserError, match="lower one of them"):
        engine_module(config).check(config)
    elsewhere = from_dict(JobConfig, sections | {"runtime": {"address": "ray://far:10001"}})
    assert isinstance(elsewhere.runtime, RuntimeConfig)
    engine_module(elsewhere).check(elsewhere)
