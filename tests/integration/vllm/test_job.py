"""The whole job with vLLM as its engine, whose process is killed in the middle: nothing is lost, it goes on."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests import killed_engine


@pytest.mark.smoke("engine", "drafts", "update", "killed")
def test_a_job_whose_engine_is_killed(tmp_path: Path) -> None:
    arguments = killed_engine.command(tmp_path, "rollout=vllm", "rollout.vllm.monitor_every=1")
    errors = killed_engine.run(arguments, tmp_path, lambda worker: worker)  # the engine is in the worker
    assert re.search(r"died \(.*\); [1-9]\d* prompts start again", errors), errors
    killed_engine.check(tmp_path)


@pytest.mark.smoke("second runner")
def test_a_job_on_the_second_model_runner(tmp_path: Path) -> None:
    """Sampled drafts, steps that are launched ahead, two updates; few tokens, as Triton is interpreted here."""
    few = ("trainer.steps=2", "trainer.groups_per_step=2", "trainer.group_size=2", "rollout.vllm.model_runner=v2")
    arguments = killed_engine.command(tmp_path, "rollout=vllm", "rollout.vllm.monitor_every=1", *few)
    (tmp_path / "killed").touch()  # nobody is killed here, nor waited for
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    job = subprocess.run(arguments, capture_output=True, text=True, timeout=900, check=False, env=environment)
    assert job.returncode == 0, job.stderr[-4000:]
    found = killed_engine.rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2]
    for row in found:
        assert row["rollout/logprob_diff_current"] < 1e-4 and row["rollout/accept_length"] > 1
        assert row["draft/entropy"] > 0


@pytest.mark.slow
def test_a_job_that_trains_an_adapter(tmp_path: Path) -> None:
    killed_engine.adapter_test(tmp_path, "rollout=vllm", "rollout.vllm.monitor_every=1")


@pytest.mark.slow
def test_a_job_on_a_model_with_sliding_windows(tmp_path: Path) -> None:
    killed_engine.windows_test(tmp_path, "rollout=vllm")
