"""Bounds by memory and arithmetic: what a cycle has to do, by hand and against the modules, and a row made of it."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Qwen2Config

from bebop.bench import roofline
from bebop.bench.roofline import RooflineBench, Turn, Work
from bebop.config.job import ModelConfig, TaskConfig
from bebop.model.checkpoint import load_policy
from tests.builders import tiny_policy

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "TURNS", 2)
    monkeypatch.setattr(roofline, "SECONDS", 0.001)


def test_work_is_that_of_the_modules() -> None:
    for policy in (tiny_policy(), load_policy(ModelConfig(device="cpu"))):
        linear = [m for m in policy.backbone.modules() if isinstance(m, torch.nn.Linear)]
        assert Work.of(policy.backbone.config).weights == sum(m.weight.numel() for m in linear)


def test_work_by_hand() -> None:
    """Heads of 8, a group of two, 3 layers; where two shapes are equal both count."""
    config = Qwen2Config(
        vocab_size=100, hidden_size=32, intermediate_size=16, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    work = Work.of(config)
    assert work.matrices == {(64, 32): 3, (32, 32): 6, (32, 16): 3, (100, 32): 1}
    weights = 3 * (64 * 32 + 2 * 32 * 32 + 32 * 16) + 3200
    assert work.weights == weights and work.cache(10) == 3 * 10 * 2 * 2 * 8
    assert work.operations(10) == 2 * weights + 3 * 10 * 4 * 4 * 8


def test_a_row_holds_a_cycle_against_the_larger_of_two_times(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(matrices={(100, 50): 2}, layers=2, heads=4, kv_heads=2, head_dim=5)
    read = []
    monkeypatch.setattr(roofline, "peak_bandwidth", lambda size: read.append(size) or 1e6)
    monkeypatch.setattr(roofline, "peak_arithmetic", lambda rows, shapes: 1e8)
    monkeypatch.setattr(roofline, "products", lambda work, arms: [0.25, 0.5, 0.2])
    row = roofline.bound(work, 8, Turn(0.2, 10.0), 0.05, (40, 1e-5))
    cache = 8 * 4 * 2 * 2 * 2 * 5 * 10
    assert read == [40_000 + cache] and row["bound by memory"] == pytest.approx(8e6 / (40_000 + cache))
    assert row["bound by arithmetic"] == pytest.approx(1e8 / (20_000 + 1_600))
    assert row["roof"] == row["bound by memory"] and row["tokens/s"] == 40
    assert row["of the roof %"] == pytest.approx(100 * 40 / row["roof"]) and row["products alone"] == 32
    assert (row["products ms"], row["products of libraries ms"]) == (250, 500)
    assert row["products, x one row"] == 1.25
    assert row["reading, of products %"] == pytest.approx(100 * 0.04 / 0.25)
    assert row["of roof and calls %"] == pytest.approx(row["of the roof %"] + 25)
    assert row["operators ms"] == pytest.approx(0.4)
    monkeypatch.setattr(roofline, "peak_arithmetic", lambda rows, shapes: 1e4)
    assert roofline.bound(work, 8, Turn(0.2, 10.0), 0.05, (40, 1e-5))["roof"] == pytest.approx(1e4 / 21_600)


@pytest.mark.parametrize("built_in", [False, True])
def test_the_narrow_model_makes_the_same_calls(built_in: bool) -> None:
    policy = load_policy(ModelConfig(device="cpu")) if built_in else tiny_policy(layers=3)
    hollow = roofline.narrow(policy)
    calls = roofline.operators(policy, PROMPTS)
    assert calls > 100 and roofline.operators(hollow, [[1] * len(p) for p in PROMPTS]) == calls
    layers = policy.backbone.config.num_hidden_layers
    assert Work.of(hollow.backbone.config).weights == layers * (128 + 64 + 128 + 64) + 128  # states of 8 numbers
    assert roofline.operators(roofline.narrow(tiny_policy(layers=2)), PROMPTS) < calls


def test_a_turn_counts_what_rows_look_at() -> None:
    """Behind a prompt of three tokens, the third of four cycles looks at five entries and its own."""
    assert roofline.turn(tiny_policy(), [[1, 2, 3]], 4).context == 3 + 2 + 1.5
    assert roofline.turn(tiny_policy(), PROMPTS, 2).context == pytest.approx((5.5 + 4.5) / 2)


def test_rates_are_work_over_processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    spent = {"process_time": 0.0, "perf_counter": 0.0}

    def call() -> None:
        spent["process_time"] += 0.0003
        spent["perf_counter"] += 1.0  # it is asleep most of the time

    monkeypatch.setattr(roofline, "time", SimpleNamespace(**{name: lambda name=name: spent[name] for name in spent}))
    assert roofline.fastest(call) == pytest.approx(0.0003)
    assert spent["perf_counter"] == 1 + 1 + 2 + 4 + 4  # until they are long enough for the clock, and one turn more
    monkeypatch.setattr(roofline, "fastest", lambda work: work() is not None and 0.5)
    assert roofline.peak_bandwidth(4096 * 40 + 3) == 2 * 4096 * 40
    assert roofline.peak_arithmetic(3, [(8, 16), (16, 32)]) == 2 * 2 * 3 * 16 * 32
    assert roofline.call_seconds() == 0.005


@pytest.mark.slow
def test_every_model_and_batch_has_a_row_and_its_bars() -> None:
    model = ModelConfig(path="tiny", device="cpu", dtype="float32")
    rows = roofline.run(RooflineBench(models=(model,), task=TaskConfig(), batches=(1, 2), rounds=1, cycles=2))
    assert [(row["model"], row["batch"]) for row in rows] == [("tiny", 1), ("tiny", 2)]
    for row in rows:
        assert row["cycle ms"] > 0 and row["operators"] > 300
        assert row["roof"] == min(row["bound by memory"], row["bound by arithmetic"])
    bars = roofline.charted(rows)
    assert len(bars) == 8 and bars[0] == {
        "case": "tiny, batch 1", "what": "measured", "tokens/s": rows[0]["tokens/s"]
    }  # fmt: skip
