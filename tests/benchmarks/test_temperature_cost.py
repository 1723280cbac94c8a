"""What choosing draft temperatures costs: what is timed, and of which cycles."""

import time

import pytest

from bebop.bench import temperature_cost
from bebop.bench.temperature_cost import CostBench, turn, with_head
from bebop.config.job import ModelConfig, TaskConfig
from bebop.rollout.decoding.temperature import DraftTemperature
from tests.builders import tiny_policy


def test_every_model_and_batch_has_a_row() -> None:
    model = ModelConfig(path="tiny", device="cpu", dtype="float32")
    bench = CostBench(models=(model,), task=TaskConfig(), batches=(1, 2), rounds=2, cycles=3, draft_tokens=2)
    rows = temperature_cost.run(bench)
    assert [(row["model"], row["vocabulary"], row["batch"]) for row in rows] == [("tiny", 512, 1), ("tiny", 512, 2)]
    for row in rows:
        assert 0 < row["choosing ms"] <= row["largest ms"] <= row["cycle ms"] * 3
        assert row["holds"] == (row["share %"] <= temperature_cost.BUDGET)


@pytest.mark.parametrize("method", ["choose", "observe"])
def test_both_halves_of_choosing_are_timed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of a cycle's processor time and more, where a method is made slow."""
    own = getattr(DraftTemperature, method)

    def slow(*args: object) -> object:
        until = time.process_time() + 0.1
        while time.process_time() < until:
            pass
        return own(*args)

    monkeypatch.setattr(DraftTemperature, method, slow)
    row = turn(tiny_policy(), [(1, 2, 3)], 2, 2)
    assert row["choosing ms"] > 100 and row["share %"] > 50 and not row["holds"]
    assert row["largest ms"] >= row["choosing ms"]


def test_a_model_without_a_head_gets_one() -> None:
    policy = tiny_policy()
    assert with_head(policy) is policy
    policy.mtp = None
    assert with_head(policy).mtp is not None and policy.mtp is None
