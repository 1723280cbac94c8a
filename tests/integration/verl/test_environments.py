"""Environments of ours in a job of verl: one that is lost too often is no row, whatever its group."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from bebop.verl_job.example import write_example
from tests.integration.verl.builders import HERE, run_job
from tests.rollout import echo_environments

STEPS, PROMPTS, GROUP = 2, 4, 4
PLAYED = f"{Path(echo_environments.__file__).resolve()}:Echo"


def test_what_is_lost_is_no_row(tmp_path: Path) -> None:
    """Of 16 environments four break, and one of them again: 15 rows; then nothing breaks."""
    example = tmp_path / "example"
    write_example(example)
    environment = {"PLAYED": PLAYED, "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
    batches = tmp_path / "batches"
    overrides = [
        "+bebop=example", f"data.train_batch_size={PROMPTS}", f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "data.max_response_length=400", "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=8192",
        "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=true", f"actor_rollout_ref.rollout.n={GROUP}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={HERE / 'loops.yaml'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=bebop_environment",
        f"trainer.total_training_steps={STEPS}", f"trainer.rollout_data_dir={batches}",
    ]  # fmt: skip
    job = run_job(tmp_path, example, overrides, environment, seconds=400)
    assert job.code == 0, job.output[-4000:]
    rows = [[json.loads(line) for line in (batches / f"{step}.jsonl").read_text().splitlines()] for step in (1, 2)]
    # verl fills a batch up with rows without a prompt, of which nothing is learned.
    groups = [Counter(row["input"] for row in step if row["input"]) for step in rows]
    assert [sorted(group.values()) for group in groups] == [[3, 4, 4, 4], [4, 4, 4, 4]]
    # A reward of 1 a turn that ended; what was lost would have none, or those of a part of it.
    for step, row in zip(rows, job.rows, strict=True):
        scores = [one["score"] for one in step if one["input"]]
        assert row["critic/score/mean"] == pytest.approx(sum(scores) / len(scores)) and max(scores) == 3
        assert row["training/rollout_probs_diff_max"] < 1e-4
        assert 0 < row["turn/overlap/1/1"] < 1
