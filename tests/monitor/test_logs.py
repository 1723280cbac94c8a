"""Groups and logs in, the same records out; foreign names; one-line errors."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bebop.errors import UserError
from bebop.monitor.drift_monitor import DriftMonitor, Explanation, MonitorSettings
from bebop.monitor.logs import log_row, read_log
from bebop.monitor.probe_set import ProbeReading, Sweep
from bebop.monitor.records import PER_ROW, StepRecords, from_averages, from_groups, from_stats, merge_records
from bebop.monitor.window import Measure, Window
from bebop.trajectory import DRAFT_STATS, Completion, DecodeStats, Group, Prompt, Trajectory
from tests.cases import slow_but
from tests.monitor.synthetic import Truth, constant, ramp, run, stats, step_records, sweep_of

SETTINGS = MonitorSettings(draws=100)
RUN = Truth(entropy=ramp(0.5, 0.3), mismatch=constant(0))


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def records_of(path: Path, names: dict[str, str] | None = None) -> list[StepRecords]:
    return [step.records for step in read_log(path, names)]


def group(index: int, *stats: DecodeStats, versions: tuple[int, ...] = (3, 3, 4)) -> Group:
    tokens = {"token_ids": np.arange(3), "logprobs": np.zeros(3, np.float32), "versions": np.array(versions)}
    trajectories = tuple(Trajectory.single(Completion(**tokens, stats=s), reward=0.0) for s in stats)
    prompt = Prompt(index=index, task=f"task{index % 2}", text="", token_ids=(1,), item={})
    return Group(prompt=prompt, trajectories=trajectories)


def test_groups_become_rows() -> None:
    records = from_groups(
        [group(5, stats(10, 6, 3), stats(4, 1)), group(6, stats(2, 0, 0), DecodeStats())], 9, version=5
    )
    assert len(records) == 3  # the answer without drafts is left out
    assert records.unit.tolist() == [5, 5, 6] and records.task.tolist() == ["task1", "task1", "task0"]
    assert records.version.tolist() == [3, 3, 3] and records.lag.tolist() == [2, 2, 2]
    assert records.emitted.tolist() == [19, 5, 2] and records.reached.tolist() == [[10, 6], [4, 0], [2, 0]]
    assert records.entropy_sum / records.entropy_count == pytest.approx(0.5)
    assert not len(from_groups([], 0))


def test_a_log_replays_a_run(tmp_path: Path) -> None:
    reading = ProbeReading(overlap=np.linspace(0.5, 0.9, 20), entropy=np.linspace(0.1, 0.9, 20), chance=0.2)
    records = step_records(RUN, 1, np.random.default_rng(1))
    hotter = [
        dataclasses.replace(records, entropy_sum=temperature * records.entropy_sum)
        for temperature in (0.5, 0.8, 1.0, 1.3)
    ]
    measured = sweep_of(hotter, Measure())
    sweep = dataclasses.replace(measured, readings=(reading, reading))
    assert measured.entropy[2] == pytest.approx(records.entropy_sum.sum() / records.entropy_count.sum())
    assert measured.length == pytest.approx([records.emitted.sum() / records.cycles.sum()] * 4)
    steps = run(RUN, 0)
    sweeps = [sweep if i == 1 else None for i in range(len(steps))]
    live = DriftMonitor(SETTINGS)
    readings = [reading if i % 5 == 0 else None for i in range(len(steps))]
    explanations = [live.observe(*step) for step in zip(steps, readings, sweeps, strict=True)]
    rows = [log_row(*step) for step in zip(steps, readings, sweeps, strict=True)]
    monitor = DriftMonitor(SETTINGS)
    again = [step.feed(monitor) for step in read_log(write(tmp_path / "drift.jsonl", *rows))]
    for a, b in zip(explanations, again, strict=True):
        assert a is not None and b is not None and a.state == b.state
        assert a.step < 1 or a.slopes["temperature"].value.known
        assert a.metrics() == pytest.approx(b.metrics(), rel=1e-6, abs=1e-9)


def test_a_sweep_that_does_not_fit_together_is_refused() -> None:
    with pytest.raises(UserError, match="3, 4"):
        Sweep(entropy=(0.3, 0.4, 0.5, 0.7), length=(2.9, 2.8, 2.75), sums=np.ones((4, 5, 4)))
    with pytest.raises(UserError, match="prompts, 4"):
        Sweep(entropy=(0.3,), length=(2.9,), sums=np.ones((1, 5, 3)))


def test_rows_survive_json_even_unmeasured(tmp_path: Path) -> None:
    bare = dataclasses.replace(stats(10, 6, 3), overlap=np.zeros(2))
    records = from_stats([bare, stats(3, 1, 0)], 4)
    records = dataclasses.replace(records, target_only=np.full((2, 2), np.nan))
    read = StepRecords.from_row(json.loads(json.dumps(records.to_row())))
    for name in (*PER_ROW, *DRAFT_STATS):
        np.testing.assert_allclose(getattr(read, name), getattr(records, name), rtol=1e-6)
    with pytest.raises(UserError, match="step 4"):
        StepRecords.from_row(records.to_row() | {"cycles": [1.0]})


def test_own_metrics_are_averages(tmp_path: Path) -> None:
    row = {"rollout/accept_length": 1 + 0.8 + 0.8 * 0.5, "rollout/target_entropy": 0.3, "policy/entropy": 0.9}
    row |= {"response/tokens": 2200.0, "rollout/accept_rate/1": 0.8, "rollout/accept_rate/2": 0.5}
    row |= {"rollout/overlap/1": 0.81, "rollout/overlap/2": 0.49}
    steps = records_of(write(tmp_path / "metrics.jsonl", *({"step": i + 1, **row} for i in range(4))))
    assert [records.step for records in steps] == [1, 2, 3, 4]
    window = Window.of(merge_records(steps))
    assert window.value(Measure()).point == pytest.approx(2.2)
    assert window.value(Measure(position=2)).point == pytest.approx(0.5)
    assert window.value(Measure(position=1, rate="overlap")).point == pytest.approx(0.81)
    assert window.entropy(Measure()).point == pytest.approx(0.3)  # our own entropy goes before the policy's
    assert steps[0].cycles[0] == pytest.approx(1000)


def test_foreign_names_are_mapped(tmp_path: Path) -> None:
    path = write(tmp_path / "log.jsonl", {"iter": 3, "sd/len": 2.5, "H": 0.4}, {"iter": 4, "sd/len": 2.4, "H": 0.5})
    names = {"step": "iter", "accept_length": "sd/len", "entropy": "H"}
    assert [r.emitted[0] / r.cycles[0] for r in records_of(path, names)] == pytest.approx([2.5, 2.4])
    slime = write(tmp_path / "slime.jsonl", {"rollout/step": 0, "rollout/spec_accept_length": 3.0})
    assert records_of(slime, {"step": "rollout/step"})[0].emitted[0] == 3.0


def averages(seed: int, change: float) -> tuple[DriftMonitor, Explanation | None]:
    """A log of averages over 40 steps; after 20 the accept length moves by ``change``. What its last step shows."""
    rng = np.random.default_rng([41, seed])
    monitor = DriftMonitor(MonitorSettings(draws=200, window_steps=8, reference_steps=10))
    for step in range(40):
        entropy = 0.5 + 0.05 * rng.normal()
        length = 2.8 - 0.8 * (entropy - 0.5) + (change if step > 20 else 0) + 0.02 * rng.normal()
        last = monitor.observe(from_averages(step, length=length, entropy=entropy, cycles=1.0))
    return monitor, last


@pytest.mark.parametrize("seeds", slow_but([1], [1, 15]))
def test_averages_get_intervals_from_the_scatter_of_steps(seeds: int) -> None:
    held = alarms = 0
    for seed in range(seeds):
        still = averages(seed, 0.0)[1]
        assert still is not None
        held += still.parts["length"].mismatch.low <= 0 <= still.parts["length"].mismatch.high
        alarms += still.state != "steady"
        fallen = averages(seed, -0.3)[1]
        assert fallen is not None and fallen.state == "mismatch-driven"
        assert fallen.parts["length"].source == "early"
    assert held >= 13 / 15 * seeds and alarms <= seeds / 15


def test_averages_that_collapse_are_broken() -> None:
    monitor, _ = averages(3, 0.0)
    fallen = monitor.observe(from_averages(40, length=1.02, entropy=0.5, cycles=1.0))
    assert fallen is not None and fallen.state == "broken"


def test_the_later_of_two_lines_counts(tmp_path: Path) -> None:
    rows = [{"step": s, "accept_length": v} for s, v in ((1, 2.0), (2, 2.1), (2, 2.9))]
    assert [r.emitted[0] for r in records_of(write(tmp_path / "x.jsonl", *rows))] == [2.0, 2.9]


def test_a_position_that_is_drafted_no_more_is_not_measured(tmp_path: Path) -> None:
    rng, rows = np.random.default_rng(5), []
    for step in range(1, 14):
        rates = (0.8 + 0.01 * rng.normal(size=3))[: 3 if step <= 10 else 2]
        row = {"step": step, "accept_length": 1 + np.cumprod(rates).sum(), "entropy": 0.5 + 0.05 * rng.normal()}
        rows.append(row | {f"accept_rate/{k}": rate for k, rate in enumerate(rates, 1)})
    monitor = DriftMonitor(SETTINGS)
    last = [step.feed(monitor) for step in read_log(write(tmp_path / "x.jsonl", *rows))][-1]
    assert last is not None and last.parts["position/2"].change.known and not last.parts["position/3"].change.known


def test_requests_of_one_step_are_joined(tmp_path: Path) -> None:
    old = {"completion_tokens": 30, "spec_verify_ct": 10, "spec_accept_token_num": 20, "spec_draft_token_num": 30}
    new = {"completion_tokens": 12, "spec_verify_ct": 10, "spec_num_correct_drafts": 2, "spec_num_proposed_drafts": 30}
    rows = [
        {"step": 1, "prompt": 7, "task": "gcd", "meta_info": old},
        {"step": 1, "prompt": 7, "meta_info": new},
        {"step": 1, "meta_info": new},
        {"step": 1, "meta_info": {"completion_tokens": 1, "spec_verify_ct": 0, "spec_num_correct_drafts": 0}},
        {"step": 2, "meta_info": old, "entropy": 0.4},
    ]
    first, second = records_of(write(tmp_path / "x.jsonl", *rows))
    assert len(first) == 3 and len(np.unique(first.unit)) == 2 and len(np.unique(first.answer)) == 3
    assert first.emitted.sum() / first.cycles.sum() == pytest.approx(54 / 30)
    assert Window.of(second).entropy(Measure()).point == pytest.approx(0.4)


def test_vllm_rows_are_differences(tmp_path: Path) -> None:
    def row(step: int, drafts: int, accepted: int, entropy: float) -> dict[str, Any]:
        counters = {"drafts": drafts, "draft_tokens": 2 * drafts, "accepted_tokens": accepted}
        counters |= {"accepted_tokens_per_pos": [0.6 * accepted, 0.4 * accepted]}
        counted = {f"vllm:spec_decode_num_{name}_total": value for name, value in counters.items()}
        return {"step": step, "entropy": entropy, **counted}

    path = write(tmp_path / "x.jsonl", row(1, 100, 100, 0.3), row(2, 300, 200, 0.4), row(3, 300, 200, 0.4))
    steps = records_of(path)
    assert [r.emitted[0] / r.cycles[0] for r in steps] == pytest.approx([2.0, 1.5])
    assert Window.of(steps[1]).value(Measure(position=2)).point == pytest.approx(40 / 60)
    assert Window.of(steps[1]).entropy(Measure(position=1)).point == pytest.approx(0.4)


BROKEN = [
    ("{\n{}\n", "line 1 is not JSON"), ("[1]\n", "line 1 is not an object"),
    ('{"accept_length": 2.0}\n', "step=NAME"), ('{"step": 1, "loss": 2.0}\n', "keys: loss, step.*accept_length=NAME"),
    ('{"step": 1, "accept_length": 0.7}\n', "add 1"),
    ('{"step": 1, "meta_info": {"spec_accept_rate": 0.5}}\n', "line 1: .*spec_verify_ct"),
    ('{"step": 1, "vllm:spec_decode_num_drafts": 5}\n', "num_draft_tokens is missing"),
    ('{"step": 1, "reached": [], "unit": [1]}\n', "drift.jsonl"), ("", "no acceptance"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BROKEN)
def test_mistakes_are_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(UserError, match=message) as error:
        read_log(path)
    assert "\n" not in str(error.value)


def test_a_missing_file_and_an_unknown_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_log(tmp_path / "nothing.jsonl")
    with pytest.raises(UserError, match=r"accept_lenght.*accept_length"):
        read_log(tmp_path / "nothing.jsonl", {"accept_lenght": "x"})


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "accept_length": 2.0}\n{"step": 2, "acc')
    assert len(records_of(path)) == 1
