"""verl's own GRPO job with its SGLang rollout, SGLang 0.5.23 in Triton's interpreter (make test-verl-sglang)."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integration.verl.builders import HERE, Job, run_job

pytestmark = pytest.mark.skipif(find_spec("sglang") is None, reason="verl's environment has no SGLang")
STUBS = (HERE.parent / "sglang" / "stubs", HERE.parent / "stubs")  # packages that have no build for this torch
FEW = (
    "+bebop=example_sglang", "data.train_batch_size=4", "data.max_response_length=24", "bebop.verify_every=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", "actor_rollout_ref.rollout.n=2",
    f"reward.custom_reward_function.path={HERE / 'length_reward.py'}", "trainer.total_training_steps=3",
)  # fmt: skip


def run(folder: Path, example: Path, *overrides: str) -> Job:
    path = os.pathsep.join((*map(str, STUBS), os.environ.get("PYTHONPATH", "")))
    return run_job(folder, example, [*FEW, *overrides], {"PYTHONPATH": path}, seconds=1200)


def test_completions_follow_the_policy_that_is_trained(tmp_path: Path, example: Path) -> None:
    job = run(tmp_path, example)
    assert job.code == 0, job.output[-4000:]
    assert len(job.rows) == 3 and "bebop: rollout sglang, live: metrics, monitor, sessions" in job.output
    assert any(job.column("actor/grad_norm")), "the policy has to move, or old weights would do"
    assert max(job.column("training/rollout_probs_diff_max")) < 1e-3
    for name in ("rollout/accept_length", "rollout/spec_accept_length"):
        assert all(1.5 < length < 4 for length in job.column(name))
    assert all(value > 0 for name in ("rollout/target_entropy", "draft/entropy") for value in job.column(name))
    assert all(0 < share <= 1 for k in (1, 2, 3) for share in job.column(f"rollout/overlap/{k}"))


def test_without_sessions_verl_cannot_start_this_version(tmp_path: Path, example: Path) -> None:
    job = run(tmp_path, example, "bebop.sessions=false")
    assert job.code != 0 and job.rows == [] and "must be called with a dataclass" in job.output
