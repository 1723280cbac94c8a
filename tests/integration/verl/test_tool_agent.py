"""verl's own tool_agent loop over the embedded engine: what was sampled is what is read again, and read once."""

import itertools
import json
import os
from collections import defaultdict
from pathlib import Path
from typing import Any

from bebop.verl_job.example import write_example
from tests.integration.verl.builders import HERE, Job, run_job

STEPS, TURNS = 2, 3
MULTI = "actor_rollout_ref.rollout.multi_turn"


def start(folder: Path) -> Job:
    """The example job, in which every answer is a call of a tool."""
    example = folder / "example"
    write_example(example)
    (folder / "answers").mkdir()
    environment = {
        "VERL_USE_EXTERNAL_MODULES": "recorder,every_answer,parking_recorder",
        "PYTHONPATH": os.pathsep.join((str(HERE), os.environ.get("PYTHONPATH", ""))),
    }
    environment["RECORD_ANSWERS"] = str(folder / "answers")
    overrides = [
        "+bebop=example", "data.train_batch_size=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "data.max_response_length=320", f"reward.custom_reward_function.path={HERE / 'length_reward.py'}",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent", f"{MULTI}.enable=true",
        f"{MULTI}.format=every_answer", f"{MULTI}.function_tool_path={HERE / 'count_tool.py'}",
        f"{MULTI}.max_assistant_turns={TURNS}", f"{MULTI}.max_user_turns={TURNS}",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16", "actor_rollout_ref.rollout.n=4",
        f"trainer.total_training_steps={STEPS}",
    ]  # fmt: skip
    job = run_job(folder, example, overrides, environment, seconds=400)
    assert job.code == 0, job.output[-4000:]
    return job


def turns(folder: Path) -> list[list[dict[str, Any]]]:
    """Each trajectory's answers, in their order."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted((folder / "answers").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            found[row["request"]].append(row)
    return list(found.values())


def test_turns_go_on_where_the_one_before_ended(tmp_path: Path) -> None:
    job = start(tmp_path)
    played = turns(tmp_path)
    assert len(played) == STEPS * 4 * 4 and max(map(len, played)) == TURNS
    for rows in played:
        for before, row in itertools.pairwise(rows):
            history = [*before["prompt"], *before["ids"]]
            assert row["prompt"][: len(history)] == history  # tokens in, tokens out
    # Its requests have new names each turn; the caches are found by the tokens. All but the last token are fed.
    counts = max((row["extra"]["parking"] for rows in played for row in rows), key=lambda found: found["hits"])
    later = [rows[i - 1] for rows in played for i in range(1, len(rows))]
    fed = sum(len(row["prompt"]) + len(row["ids"]) for row in later)
    assert counts["hits"] == len(later) and 0.95 * fed < counts["reused"] < fed
    for row in job.rows:
        assert row["training/rollout_probs_diff_max"] < 1e-4  # trainer and engine, on the policy's tokens
        assert all(0 < row[f"turn/overlap/{turn}/1"] < 1 for turn in range(TURNS))
        assert row["training/num_turns/max"] == 2 * TURNS
