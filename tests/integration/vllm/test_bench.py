"""Engines side by side, vLLM's in processes of their own."""

import multiprocessing

from bebop.bench import told
from bebop.bench.engines import CHOICE, arms, run
from bebop.bench.rollout import RolloutBench
from bebop.config import ModelConfig, TaskConfig


def test_every_arm_answers_the_same_requests() -> None:
    bench = RolloutBench(
        model=ModelConfig(path="tiny", device="cpu", dtype="float32"),
        task=TaskConfig(),
        systems=CHOICE,
        batches=(4,),
        draft_tokens=3,
        rounds=1,
        waves=1,
        max_new_tokens=8,
    )
    rows = {row["arm"]: row for row in run(bench)}
    assert list(rows) == list(arms(CHOICE)) and {row["requests"] for row in rows.values()} == {12}
    assert all(row["tokens/s"] > 0 and row["version"] != "unknown" for row in rows.values())
    assert rows["vllm, autoregressive"]["accept length"] == 1 < rows["vllm, bebop"]["accept length"] <= 4
    assert not multiprocessing.active_children()


def test_what_was_told_is_accepted_more_often() -> None:
    """In this process, which vLLM leaves as it was."""
    model = ModelConfig(path="tiny", device="cpu", dtype="float32")
    rows = told.run(told.ToldBench(model=model, task=TaskConfig(), prompts=6, answers=2, max_new_tokens=24))
    assert [(row["arm"], row["known"]) for row in rows] == [(arm, known) for arm in told.ARMS for known in told.KNOWN]
    lengths = [row["accept length"]["value"] for row in rows]
    assert all(own > nothing >= 1 for nothing, own in zip(lengths[::3], lengths[2::3], strict=True))
