"""Which hooks a process gets, and vLLM's distribution for CPUs under the name that verl asks for."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import pytest

from bebop.verl_job.plugin import PARTS, alias_vllm_cpu, wanted
from bebop.verl_job.settings import EXTERNAL, MODULE, VARIABLE, VerlConfig, to_variable
from bebop.verl_job.vllm_worker import find_draft


def functions(**environment: str) -> set[str]:
    return {hook.function for hook in wanted(environment)}


STOCK = {"choices.add_adapter", "choices.add_replica", "choices.add_transfer", "driver.hand_over"}


def test_without_a_job_that_asks_there_are_only_choices() -> None:
    assert functions() == STOCK
    assert functions(**{VARIABLE: to_variable(VerlConfig())}) == STOCK


def test_every_part_alone_brings_its_own_hooks_and_the_self_test() -> None:
    for part, hooks in PARTS.items():
        found = functions(**{VARIABLE: to_variable(VerlConfig(**{part: True}))})
        tested = {"selftest.check_trainer", "selftest.answer_worker"}
        assert found - STOCK == {hook.function for hook in hooks} | tested | {"vllm_worker.find_draft"}


class Worker:
    """In the place of verl's extension of vLLM's workers, with a runner that is the second one."""

    model_runner = SimpleNamespace(vllm_config="its settings", get_draft_model=lambda: "the head", model="the target")

    def _get_drafter_model(self) -> Any:
        return None

    def update_weights_from_ipc(self, use_shm: bool = False) -> Any:
        return VALIDATION.checks, use_shm


def load_quanted_weights(weights: Any, model_runner: Any, is_drafter: bool = False) -> Any:
    return weights, model_runner.drafter.model if is_drafter else model_runner.model, model_runner.vllm_config


@contextmanager
def disable_mtp_completeness_check() -> Iterator[None]:
    VALIDATION.checks = False
    yield
    VALIDATION.checks = True


VALIDATION = SimpleNamespace(disable_mtp_completeness_check=disable_mtp_completeness_check, checks=True)


def test_the_second_model_runner_has_its_head_found(monkeypatch: pytest.MonkeyPatch) -> None:
    found = functions(**{VARIABLE: to_variable(VerlConfig(model_runner="v2"))})
    assert found - STOCK == {"vllm_worker.find_draft"}
    assert functions(**{VARIABLE: to_variable(VerlConfig(model_runner="v1"))}) == STOCK
    trained = [functions(**{VARIABLE: to_variable(VerlConfig(train_head=True, model_runner=n))}) for n in (None, "v1")]
    assert trained[0] - trained[1] == {"vllm_worker.find_draft"}, "vLLM chooses its second runner itself"
    extension = type("Extension", (Worker,), {})
    utils: Any = SimpleNamespace(vLLMColocateWorkerExtension=extension, load_quanted_weights=load_quanted_weights)
    find_draft(utils)
    worker: Any = extension()
    assert worker._get_drafter_model() == "the head"
    for drafter, model in ((True, "the head"), (False, "the target")):
        loaded = utils.load_quanted_weights("weights", worker.model_runner, is_drafter=drafter)
        assert loaded == ("weights", model, "its settings")
    module = "vllm.model_executor.model_loader.mtp_validation"
    monkeypatch.setitem(sys.modules, module, None)
    assert worker.update_weights_from_ipc(use_shm=True) == (True, True), "an older vLLM has no such check"
    monkeypatch.setitem(sys.modules, module, VALIDATION)
    assert worker.update_weights_from_ipc(use_shm=True) == (False, True) and VALIDATION.checks


def test_a_process_that_was_told_nothing_checks_itself() -> None:
    assert "selftest.check_trainer" in functions(**{EXTERNAL: f"somebody.elses,{MODULE}"})


def test_the_cpu_is_a_platform_where_it_is_asked_for() -> None:
    assert "cpu.register_platform" in functions(VERL_PLATFORM="cpu")
    assert "cpu.register_platform" not in functions(VERL_PLATFORM="nvidia")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found: dict[str, str] = {"vllm-cpu": "0.31.0"}

    def version(name: str) -> str:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", version)
    return found


def test_the_build_for_cpus_answers(installed: dict[str, str]) -> None:
    alias_vllm_cpu()
    assert metadata.version("vllm") == "0.31.0+cpu" and metadata.version("vllm-cpu") == "0.31.0"
    installed["vllm"] = "0.33.0"
    assert metadata.version("vllm") == "0.33.0"


def test_what_is_not_there_is_still_not_there(installed: dict[str, str]) -> None:
    installed.clear()
    alias_vllm_cpu()
    for name in ("vllm", "sglang"):
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version(name)
