"""verl's own GRPO job with verl's own vLLM rollout, real vLLM on the CPU: sampled drafts, statistics, the monitor."""

import os
from pathlib import Path

import numpy as np

from recipes.upstream.patched import PATCHES, apply, copy_with_patch
from tests.integration.verl.builders import HERE, Job, run_job

DRAFTS = 3
SMALL = (
    "+bebop=example_vllm", "data.train_batch_size=8", "data.max_response_length=48", "bebop.verify_every=1",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.optim.lr=1e-3",
    f"reward.custom_reward_function.path={HERE / 'length_reward.py'}",
)  # fmt: skip


def start(folder: Path, example: Path, *overrides: str) -> Job:
    job = run_job(folder, example, [*SMALL, *overrides], seconds=600)
    assert job.code == 0, job.output[-4000:]
    return job


def check(job: Job, steps: int) -> None:
    """Each step's answers follow the policy that is trained, and their drafts are accounted for."""
    assert len(job.rows) == steps and "bebop: rollout vllm, live: metrics, monitor" in job.output
    # Of answers by the weights of now: older ones differ by what the policy has learned since.
    fresh = [row for row in job.rows if row["training/off_policy/trajectory_staleness_worst/max"] == 0]
    assert fresh and max(row["training/rollout_probs_diff_max"] for row in fresh) < 1e-3
    assert all(1.5 < length < DRAFTS + 1 for length in job.column("rollout/accept_length"))
    accepted, overlap, argmax = (
        np.array([job.column(f"rollout/{name}/{k}") for k in range(1, DRAFTS + 1)])
        for name in ("accept_rate", "overlap", "target_only")
    )
    # A draft is accepted with the overlap: what was counted and what was measured estimate the same.
    assert np.abs(accepted[0] - overlap[0]).max() < 0.08 and np.abs(accepted - overlap).mean() < 0.05
    assert overlap[0].mean() > argmax[0].mean()  # sampled drafts, not the likeliest ones
    assert all(job.column("rollout/target_entropy")) and all(job.column("draft/entropy"))


def test_synchronous(tmp_path: Path, example: Path) -> None:
    job = start(tmp_path, example, "trainer.total_training_steps=3")
    check(job, 3)
    # verl's own numbers, which stock verl leaves out with vLLM.
    for name in ("rollout/spec_accept_rate", "rollout/spec_accept_length"):
        assert all(value > 0 for value in job.column(name))
    assert "drift/length_by_request" in job.rows[-1]


def test_asynchronous(tmp_path: Path, example: Path) -> None:
    """Answers are aborted for new weights and go on: their pieces are counted once."""
    job = start(tmp_path, example, "trainer.v1.trainer_mode=colocate_async", "trainer.total_training_steps=6")
    check(job, 6)
    assert max(job.column("training/off_policy/trajectory_staleness_worst/max")) >= 1


def test_the_second_model_runner(tmp_path: Path, example: Path) -> None:
    """Steps are launched ahead, in Triton's interpreter: few tokens, so that rates are not compared."""
    interpreter = os.pathsep.join((str(HERE / "interpreter"), os.environ.get("PYTHONPATH", "")))
    few = ("data.train_batch_size=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2", "actor_rollout_ref.rollout.n=4",
           "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
           "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
           "data.max_response_length=24", "bebop.model_runner=v2", "trainer.total_training_steps=3")  # fmt: skip
    job = run_job(tmp_path, example, [*SMALL, *few], {"PYTHONPATH": interpreter, "TRITON_INTERPRET": "1"}, seconds=900)
    assert job.code == 0, job.output[-4000:]
    assert len(job.rows) == 3 and max(job.column("training/rollout_probs_diff_max")) < 1e-3
    assert all(1 < length < DRAFTS + 1 for length in job.column("rollout/accept_length"))
    assert all(value > 0 for name in ("rollout/target_entropy", "draft/entropy") for value in job.column(name))
    overlap, argmax = (np.array(job.column(f"rollout/{name}/1")) for name in ("overlap", "target_only"))
    assert overlap.mean() > argmax.mean()  # sampled drafts, not the likeliest ones


def test_greedy_drafts_are_another_choice(tmp_path: Path, example: Path) -> None:
    """Broken on purpose: with vLLM's default the overlap is that of one-hot drafts."""
    greedy = "actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config.draft_sample_method=greedy"
    job = start(tmp_path, example, greedy, "trainer.total_training_steps=1")
    assert job.column("draft/entropy") == [0.0]
    assert abs(job.column("rollout/overlap/1")[0] - job.column("rollout/target_only/1")[0]) < 1e-6


def test_stock_verl_counts_drafts_under_its_patches(tmp_path: Path, example: Path) -> None:
    """Bebop's own metrics are off: what verl logs is verl's, also for answers that were aborted and resumed."""
    copy_with_patch("verl", PATCHES / "verl-vllm-counts.patch", tmp_path / "patched")
    apply(PATCHES / "verl-async-counts.patch", tmp_path / "patched")
    overrides = (*SMALL, "bebop.metrics=false", "bebop.monitor=false", "bebop.verify_every=0")
    steps = ("trainer.v1.trainer_mode=colocate_async", "trainer.total_training_steps=3")
    environment = {"PYTHONPATH": os.pathsep.join((str(tmp_path / "patched"), os.environ.get("PYTHONPATH", "")))}
    job = run_job(tmp_path, example, [*overrides, *steps], environment, seconds=600)
    assert job.code == 0, job.output[-4000:]
    assert all(0.3 < rate < 1 for rate in job.column("rollout/spec_accept_rate"))
    assert all(1.5 < length < DRAFTS + 1 for length in job.column("rollout/spec_accept_length"))
