"""verl's own GRPO job with the embedded engine behind its rollout interface, in its modes, on two CPU cores."""

import json
from collections import defaultdict
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import PreTrainedTokenizerFast

from bebop.model.fingerprint import fingerprint
from tests.integration.verl.builders import HERE, Job, free_port, run_job, scraped

STEPS = 20
SMALL = (  # short answers, and a reward that every character of them counts for
    "data.train_batch_size=8",
    "data.max_response_length=48",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    f"reward.custom_reward_function.path={HERE / 'length_reward.py'}",
)
STATS = "bebop_stats"


def start(folder: Path, example: Path, *overrides: str, main: str = "verl.trainer.main_ppo") -> Job:
    """The example job; its answers are written down on the way, and its batches by verl."""
    (folder / "answers").mkdir(parents=True)
    environment = {"VERL_USE_EXTERNAL_MODULES": "recorder", "PYTHONPATH": str(HERE)}
    environment["RECORD_ANSWERS"] = str(folder / "answers")
    environment["VERL_LOGGING_LEVEL"] = "WARNING"  # verl 0.9.1 fails on a log line of separate_async at INFO
    place = [f"trainer.rollout_data_dir={folder / 'batches'}", f"trainer.default_local_dir={folder / 'checkpoints'}"]
    job = run_job(folder, example, ["+bebop=example", *SMALL, *place, *overrides], environment, seconds=600, main=main)
    assert job.code == 0, job.output[-4000:]
    return job


def answers(folder: Path, example: Path) -> dict[tuple[str, str], list[list[dict[str, Any]]]]:
    """Every answer by the texts of its prompt and itself: its pieces, as the servers sent them."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(example / "tokenizer")
    pieces: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for file in sorted((folder / "answers").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            row = json.loads(line)
            pieces[row["request"]].append(row)
    found: dict[tuple[str, str], list[list[dict[str, Any]]]] = defaultdict(list)
    for rows in pieces.values():
        ids = list(chain.from_iterable(row["ids"] for row in rows))
        key = [tokenizer.decode(part, skip_special_tokens=True) for part in (rows[0]["prompt"], ids)]
        found[key[0], key[1]].append([row["extra"] for row in rows])
    return found


def recomputed(folder: Path, example: Path, step: int) -> dict[str, float]:
    """Accept length and rates of the batch of a step, from the texts that verl says it learned from."""
    known = answers(folder, example)
    cycles = tokens = 0
    reached, accepted = np.zeros(3), np.zeros(3)
    for line in (folder / "batches" / f"{step}.jsonl").read_text().splitlines():
        row = json.loads(line)
        for extra in known[row["input"], row["output"]].pop(0):
            cycles += extra["spec_num_verify_steps"]
            tokens += extra[STATS]["tokens"] - extra[STATS]["prefilled"]
            reached += np.array(extra[STATS]["reached"])
            accepted += np.array(extra[STATS]["accepted"])
    rates = enumerate(zip(accepted, reached, strict=True), 1)
    found = {f"rollout/accept_rate/{k}": float(a / r) for k, (a, r) in rates if r}
    return found | {"rollout/accept_length": tokens / cycles}


def check(job: Job, folder: Path, example: Path, steps: int) -> None:
    """What holds in every mode."""
    assert len(job.rows) == steps
    assert "bebop: rollout bebop, live: metrics, monitor" in job.output
    # Of answers by the weights of now: older ones differ by what the policy has learned since.
    fresh = [row for row in job.rows if row["training/off_policy/trajectory_staleness_worst/max"] == 0]
    assert fresh and max(row["training/rollout_probs_diff_mean"] for row in fresh) < 1e-5
    for step in (1, steps):
        row = job.rows[step - 1]
        own = {
            name: value for name, value in row.items() if name.startswith(("rollout/accept_length", "rollout/accept_r"))
        }
        assert own == pytest.approx(recomputed(folder, example, step), abs=1e-9), step
        assert 0 < row["rollout/overlap/1"] <= 1 and row["rollout/target_entropy"] > 0
        assert 1 < row["rollout/spec_accept_length"] <= 4  # verl's own, which its asynchronous modes lack
    assert any(name.startswith("drift/length/mismatch") for name in job.rows[-1])


def other_batches_differ(job: Job, folder: Path, example: Path) -> bool:
    """Whether ``check`` would notice statistics of another batch."""
    other = recomputed(folder, example, 2)
    return all(abs(job.rows[0].get(name, 0.0) - value) > 1e-6 for name, value in other.items())


def rises(values: list[float]) -> bool:
    """Whether the slope over the steps is above zero, beyond chance (one-sided, 1 %)."""
    fit = stats.linregress(range(len(values)), values)
    return bool(fit.slope > 0 and fit.pvalue / 2 < 0.01)


def test_synchronous(tmp_path: Path, example: Path) -> None:
    job = start(tmp_path, example, f"trainer.total_training_steps={STEPS}")
    check(job, tmp_path, example, STEPS)
    assert other_batches_differ(job, tmp_path, example)
    rewards = job.column("critic/score/mean")
    assert rises(rewards) and not rises(rewards[::-1])
    assert max(job.column("training/off_policy/trajectory_staleness/max")) == 0


@pytest.mark.slow
def test_colocated_and_asynchronous(tmp_path: Path, example: Path) -> None:
    port = free_port()
    mode = ("trainer.v1.trainer_mode=colocate_async", "bebop.prometheus=true")
    export = f"+ray_kwargs.ray_init._metrics_export_port={port}"
    with scraped(port) as names:
        job = start(tmp_path, example, *mode, export, f"trainer.total_training_steps={STEPS}")
    assert {"ray_bebop_rollout_accept_length", "ray_bebop_rollout_overlap_1", "ray_bebop_drift_state"} <= names
    check(job, tmp_path, example, STEPS)
    assert rises(job.column("critic/score/mean"))
    assert max(job.column("training/off_policy/trajectory_staleness_worst/max")) >= 1


def test_separate_and_asynchronous_with_a_head_that_is_trained(tmp_path: Path, example: Path) -> None:
    mode = ("trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1")
    place = ("actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.hybrid_engine=false")
    transfer = "actor_rollout_ref.rollout.checkpoint_engine.backend=bebop"
    head = ("bebop.train_head=true", "bebop.head.lr=1e-3", "trainer.save_freq=5")
    job = start(tmp_path, example, *mode, *place, transfer, *head, "trainer.total_training_steps=6")
    check(job, tmp_path, example, 6)
    assert all(0 < loss < 1 for loss in job.column("head/loss"))
    kept = torch.load(tmp_path / "checkpoints" / "global_step_5" / "actor" / "bebop_head.pt", weights_only=True)
    drafted = {extra["bebop_head"] for pieces in answers(tmp_path, example).values() for p in pieces for extra in p}
    assert fingerprint(kept["state"]["weights"]) in drafted and len(drafted) >= 5


@pytest.mark.slow
def test_fully_asynchronous(tmp_path: Path, example: Path) -> None:
    """verl's other trainer, which holds whole batches: six updates, some of them on answers of older weights."""
    place = ("rollout.nnodes=1", "rollout.n_gpus_per_node=1", "rollout.n=8", "rollout.total_rollout_steps=48")
    place += ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.checkpoint_engine.backend=bebop")
    pace = ("async_training.trigger_parameter_sync_step=1", "async_training.staleness_threshold=0.5")
    data = ("data.train_batch_size=0", "data.gen_batch_size=1", "ray_kwargs.ray_init.num_cpus=64")
    main = "verl.experimental.fully_async_policy.fully_async_main"
    job = start(tmp_path, example, *place, *pace, *data, main=main)
    rows = [row for row in job.rows if "rollout/accept_length" in row]
    assert len(rows) >= 5
    assert all(1 < row["rollout/accept_length"] <= 4 and 0 < row["rollout/overlap/1"] <= 1 for row in rows)
    assert rows[-1]["fully_async/count/stale_trajectory_processed"] > 0
    assert any(name.startswith("drift/length/mismatch") for name in rows[-1])
