"""The whole job with SGLang as its engine, whose scheduler is killed in the middle: nothing is lost, it goes on."""

import re
from pathlib import Path

import pytest

from tests import killed_engine


def scheduler(worker: int) -> int:
    """The process that decodes, below the rollout worker's; killed as the kernel would when memory is short."""
    # The kernel keeps 15 characters of a name.
    return next(child for child, title in killed_engine.below(worker).items() if "sglang::schedul" in title)


@pytest.mark.smoke("engine", "drafts", "update", "killed")
def test_a_job_whose_engine_is_killed(tmp_path: Path) -> None:
    arguments = killed_engine.command(
        tmp_path, "rollout=sglang", "rollout.sglang.cache_tokens=4096", "rollout.sglang.monitor_every=1"
    )
    errors = killed_engine.run(arguments, tmp_path, scheduler)
    assert re.search(r"died \(.*ended\); [1-9]\d* prompts start again", errors), errors
    killed_engine.check(tmp_path)


@pytest.mark.slow
def test_a_job_that_trains_an_adapter(tmp_path: Path) -> None:
    killed_engine.adapter_test(
        tmp_path, "rollout=sglang", "rollout.sglang.cache_tokens=4096", "rollout.sglang.monitor_every=1"
    )
