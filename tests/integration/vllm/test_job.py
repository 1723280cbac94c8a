"""The whole job with vLLM as its engine, whose process is killed in the middle: nothing is lost, it goes on."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.served_models import checkpoint

STEPS, PROMPTS, GROUP = 4, 4, 4


def command(folder: Path, model: Path) -> list[str]:
    (folder / "task.jsonl").write_text("".join(json.dumps({"question": q, "answer": "a"}) + "\n" for q in ("ab", "ba")))
    (folder / "reward.py").write_text("def reward(text, item):\n    return text.count('a') / max(1, len(text))\n")
    return [
        sys.executable, "-m", "bebop.run", "rollout=vllm", "model=folder", f"model.path={model}", "model.device=cpu",
        "model.dtype=float32", "task=file", f"task.path={folder}/task.jsonl", f"task.reward={folder}/reward.py:reward",
        "task.system=null", "cotrain=always", f"runtime.dir={folder}/run", "runtime.progress=false",
        f"trainer.steps={STEPS}", f"trainer.groups_per_step={PROMPTS}", f"trainer.group_size={GROUP}",
        "trainer.lr=1e-2", "trainer.lr_warmup_steps=0", "rollout.max_length=64", "rollout.sampling.max_new_tokens=8",
        "rollout.vllm.monitor_every=1", "decoding.draft_tokens=2", "monitor.tensorboard=false", "monitor.plots=false",
        "monitor.ray_metrics=false", "monitor.probe_every=0",
    ]  # fmt: skip


def rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def worker(folder: Path) -> int:
    """The process that decodes: vLLM's engine is in it."""
    lines = (folder / "run" / "pids.txt").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rollout"))


@pytest.mark.smoke("engine", "drafts", "update", "killed")
def test_a_job_whose_engine_is_killed(tmp_path: Path) -> None:
    run = subprocess.Popen(
        command(tmp_path, checkpoint(tmp_path / "model")), stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while not rows(tmp_path):
            assert run.poll() is None, run.stderr and run.stderr.read()
            time.sleep(0.2)
        children = psutil.Process(run.pid).children(recursive=True)
        os.kill(worker(tmp_path), signal.SIGKILL)
        _, errors = run.communicate(timeout=400)
    finally:
        if run.poll() is None:
            os.killpg(run.pid, signal.SIGKILL)
    assert run.returncode == 0, errors
    assert re.search(r"died \(.*\); [1-9]\d* prompts start again", errors), errors
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [row["version"] for row in found] == list(range(1, STEPS + 1))
    assert found[-1]["rollout/restarts"] == 1
    assert found[-1]["samples/prompts"] == STEPS * PROMPTS and found[-1]["samples/trained"] == STEPS * PROMPTS * GROUP
    assert max(row["staleness/max"] for row in found) <= 1
    # The trainer computes the same distribution, and corrects for what it does not.
    assert all(row["rollout/logprob_diff"] >= 0 and row["train/tis_mean"] > 0 for row in found)
    assert found[0]["rollout/logprob_diff_current"] < 1e-4 and found[0]["train/ratio_error_max"] < 1e-3
    assert found[-1]["reward/mean"] > found[0]["reward/mean"] + 0.2
    assert all(1 < row["rollout/accept_length"] <= 3 for row in found)
    # The head was trained and sent; no fingerprint or version was another than it should be, whatever else was noticed.
    seen = [json.loads(line) for line in (tmp_path / "run" / "drift.jsonl").read_text().splitlines()]
    assert not [line for line in seen if line.get("health")], seen
    gone = psutil.wait_procs(children, timeout=20)[1]
    assert not [process for process in gone if process.status() != psutil.STATUS_ZOMBIE]
