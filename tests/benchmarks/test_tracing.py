"""The benchmark of traces: every arm decodes the same tokens, and what is traced is what the arm says."""

import pytest

from bebop.bench import tracing
from bebop.bench.tracing import TraceBench, Turn, compared
from bebop.config.job import ModelConfig, TaskConfig
from bebop.errors import UserError
from bebop.trajectory import DecodeStats


def bench(vocabulary: int) -> TraceBench:
    return TraceBench(
        model=ModelConfig(path="tiny", device="cpu"), task=TaskConfig(), batches=(3,), rounds=2,
        vocabulary=vocabulary, prompts=2, tokens=(6, 3), hidden=28,
    )  # fmt: skip


@pytest.mark.slow
def test_every_model_and_arm_has_a_row() -> None:
    rows = tracing.run(bench(1200))
    assert [(row["vocabulary"], row["trace"]) for row in rows] == [
        (size, arm) for size in (512, 1200) for arm in ("off", "sample", "all")
    ]
    for off, sample, every in (rows[:3], rows[3:]):
        assert off["accept length"] == sample["accept length"] == every["accept length"]
        assert [row["traced %"] for row in (off, every)] == [0, 100] and 20 < sample["traced %"] < 80
        assert "bytes/token" not in off and sample["bytes/token"] == every["bytes/token"] == 126
        assert 0 <= off["timed %"] < sample["timed %"] < every["timed %"] and off["added %"] == 0


def test_what_is_added_is_total_over_total() -> None:
    def arm(*costs: float) -> list[Turn]:
        stats = DecodeStats(tokens=10, cycles=5)
        return [Turn(cost=cost, inside=cost / 4, seconds=cost, stats=stats, traces=()) for cost in costs]

    row = compared({"off": arm(1.0, 3.0), "all": arm(1.5, 3.5)})[1]
    assert row["added %"] == pytest.approx(25) and row["timed %"] == pytest.approx(100 * 0.625 / 2)
    assert row["tokens/s"] == 10 / 1.5 and row["cost ms/token"] == pytest.approx(250)


def test_a_vocabulary_that_lacks_the_prompts_is_one_line() -> None:
    with pytest.raises(UserError, match="--vocabulary 100 is not possible: give at least 512"):
        tracing.run(bench(100))
