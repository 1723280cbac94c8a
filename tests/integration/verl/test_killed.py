"""A short GRPO job whose decoding process is killed: verl ends it, and the same command goes on from a checkpoint."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from bebop.verl_job.example import write_example
from tests.integration.verl.builders import HERE, Job, run_job

SERVER = "ray::VerlServer"  # as Ray names the process of the embedded engine
PATIENCE = 600  # seconds; a busy machine takes minutes to start


def newest(folder: Path) -> int:
    """The last step of which there is a whole checkpoint."""
    told = folder / "checkpoints" / "latest_checkpointed_iteration.txt"
    return int(told.read_text()) if told.exists() else 0


def kill_server(job: "subprocess.Popen[str]", folder: Path) -> None:
    """Once there is a checkpoint, the process that decodes, as the kernel would when memory is short."""
    ends = time.monotonic() + PATIENCE
    while not newest(folder):
        assert job.poll() is None and time.monotonic() < ends, (folder / "output.txt").read_text()[-4000:]
        time.sleep(0.2)
    family = psutil.Process(job.pid).children(recursive=True)
    (server,) = (child for child in family if SERVER in " ".join(child.cmdline()))
    os.kill(server.pid, signal.SIGKILL)


def run(folder: Path, example: Path, steps: int, kill: bool) -> Job:
    overrides = ["+bebop=example", "data.train_batch_size=4", "data.max_response_length=24"]
    overrides += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "actor_rollout_ref.actor.optim.lr=1e-3"]
    overrides += [f"trainer.total_training_steps={steps}"]
    overrides += [f"reward.custom_reward_function.path={HERE / 'length_reward.py'}"]
    overrides += [f"trainer.default_local_dir={folder / 'checkpoints'}", "trainer.save_freq=1"]
    overrides += ["trainer.resume_mode=auto", "bebop.train_head=true", "bebop.head.lr=1e-3"]
    watch = (lambda job: kill_server(job, folder)) if kill else None
    return run_job(folder, example, overrides, seconds=PATIENCE, watch=watch)


@pytest.mark.smoke("engine", "drafts", "update", "killed")
def test_a_job_whose_engine_is_killed_ends_and_goes_on(tmp_path: Path) -> None:
    write_example(tmp_path / "example", train=64, test=4)
    dead = run(tmp_path, tmp_path / "example", 100, kill=True)
    assert dead.code != 0 and "Died" in dead.output
    last = newest(tmp_path)
    assert 0 < last < 100
    job = run(tmp_path, tmp_path / "example", last + 2, kill=False)
    assert job.code == 0, job.output[-4000:]
    assert [row["training/global_step"] for row in job.rows] == [last + 1, last + 2]
    assert "bebop: rollout bebop, live: metrics, monitor, train_head" in job.output
    # The engine has the weights of the checkpoint, then those of one more update, and drafts with the head.
    assert max(job.column("training/rollout_probs_diff_mean")) < 1e-5
    assert all(1 < length <= 4 for length in job.column("rollout/accept_length"))
    assert all(0 < loss < 1 for loss in job.column("head/loss"))
    assert newest(tmp_path) == last + 2
