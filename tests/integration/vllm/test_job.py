"""The whole job with vLLM as its engine, whose process is killed in the middle: nothing is lost, it goes on."""

import re
from pathlib import Path

import pytest

from tests import killed_engine


@pytest.mark.smoke("engine", "drafts", "update", "killed")
def test_a_job_whose_engine_is_killed(tmp_path: Path) -> None:
    arguments = killed_engine.command(tmp_path, "rollout=vllm", "rollout.vllm.monitor_every=1")
    errors = killed_engine.run(arguments, tmp_path, lambda worker: worker)  # the engine is in the worker
    assert re.search(r"died \(.*\); [1-9]\d* prompts start again", errors), errors
    killed_engine.check(tmp_path)


@pytest.mark.slow
def test_a_job_that_trains_an_adapter(tmp_path: Path) -> None:
    killed_engine.adapter_test(tmp_path, "rollout=vllm", "rollout.vllm.monitor_every=1")


@pytest.mark.slow
def test_a_job_on_a_model_with_sliding_windows(tmp_path: Path) -> None:
    killed_engine.windows_test(tmp_path, "rollout=vllm")
