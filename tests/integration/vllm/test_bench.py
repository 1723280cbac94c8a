"""Engines side by side, vLLM's in processes of their own."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

from bebop.bench import history_priming
from bebop.bench.engines import CHOICE, arms, run
from bebop.bench.rollout import RolloutBench
from bebop.config.job import ModelConfig, TaskConfig
from tests.tree import ROOT


def test_every_arm_answers_the_same_requests() -> None:
    bench = RolloutBench(
        model=ModelConfig(path="tiny", device="cpu", dtype="float32"), task=TaskConfig(), systems=CHOICE,
        batches=(4,), draft_tokens=3, rounds=1, waves=1, max_new_tokens=8,
    )  # fmt: skip
    rows = {row["arm"]: row for row in run(bench)}
    assert list(rows) == list(arms(CHOICE)) and {row["requests"] for row in rows.values()} == {12}
    assert all(row["tokens/s"] > 0 and row["version"] != "unknown" for row in rows.values())
    assert rows["vllm, autoregressive"]["accept length"] == 1 < rows["vllm, bebop"]["accept length"] <= 4
    assert not multiprocessing.active_children()


def test_what_was_told_is_accepted_more_often() -> None:
    """In this process, which vLLM leaves as it was."""
    model = ModelConfig(path="tiny", device="cpu", dtype="float32")
    rows = history_priming.run(
        history_priming.PrimingBench(model=model, task=TaskConfig(), prompts=6, answers=2, max_new_tokens=24)
    )
    assert [(row["arm"], row["known"]) for row in rows] == [
        (arm, known) for arm in history_priming.ARMS for known in history_priming.KNOWN
    ]
    lengths = [row["accept length"]["value"] for row in rows]
    assert all(own > nothing >= 1 for nothing, own in zip(lengths[::3], lengths[2::3], strict=True))


def test_what_a_gpu_measures_of_vllm_runs_on_a_cpu(tmp_path: Path) -> None:
    """Every arm of the dry form: log-probs are the model's, and sampled drafts are accepted as they should be."""
    command = [sys.executable, "-m", "bebop.bench.gpu.vllm_run", "--device", "cpu", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + (tmp_path / "vllm.log").read_text()[-3000:]
    rows = json.loads((tmp_path / "vllm.json").read_text())["rows"]
    cycles = {(row["system"], row["batch"]): row for row in rows if row["what"] == "cycle"}
    assert {system for system, _ in cycles} == {"autoregressive", "bebop", "target_only"}
    assert all(row["value"] > 0 and row["of_plain"] for row in cycles.values())
    assert cycles["autoregressive", 4]["tokens a row"] == 1 and 2.8 < cycles["bebop", 4]["tokens a row"] <= 4
