"""Metrics merge as if computed on the union; sinks keep each step exactly once."""

import io
import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.errors import UserError
from bebop.metrics.metrics import Max, Mean, Metric, Metrics, Percentile, SampleSize, Sum, merge, values
from bebop.metrics.sinks import JsonlSink, ProgressLine, TensorBoardSink, WandbSink, read_jsonl

numbers = st.lists(st.integers(-50, 50), min_size=1, max_size=12)


def all_kinds(data: list[int]) -> Metrics:
    return {
        "mean": Mean.of(data), "sum": Sum(float(sum(data))), "sample size": SampleSize.of(data),
        "max": Max(max(data)), "median": Percentile.of(data, 0.5),
    }  # fmt: skip


@given(numbers, numbers, numbers)
@settings(max_examples=60, deadline=None)
def test_merging_parts_equals_the_union(a: list[int], b: list[int], c: list[int]) -> None:
    assert merge(all_kinds(a), all_kinds(b), all_kinds(c)) == all_kinds(a + b + c)


def test_averaging_values_is_not_merging() -> None:
    one, many = Mean.of([0.0]), Mean.of([1.0] * 9)
    assert (one + many).value == 0.9
    assert np.mean([one.value, many.value]) == 0.5  # the broken variant


def test_weighted_mean_by_hand() -> None:
    assert Mean.of([1.0, 4.0], weights=[3.0, 1.0]) == Mean(7.0, 4.0)
    assert Mean.of([[1.0, 2.0], [3.0, 4.0]], weights=[1.0, 0.0]).value == 2.0
    assert math.isnan(Mean.of([]).value)


def test_effective_sample_size_by_hand() -> None:
    assert SampleSize.of([2.0] * 7).value == 1.0
    assert SampleSize.of([1.0, 0.0, 0.0, 0.0]).value == 0.25
    assert (SampleSize.of([3.0]) + SampleSize.of([1.0])).value == pytest.approx(16 / 20)  # each alone would be 1
    assert math.isnan(SampleSize.of([]).value)


def test_a_mean_of_means_is_refused() -> None:
    with pytest.raises(TypeError, match="never averaged"):
        Mean.of([Mean.of([1.0]), Mean.of([2.0])])  # type: ignore[list-item]
    with pytest.raises(TypeError):
        _ = Mean.of([1.0]) + 2.0  # type: ignore[operator]
    with pytest.raises(TypeError, match="reward/mean is a float"):
        merge({"reward/mean": Mean.of([1.0])}, values({"reward/mean": Mean.of([2.0])}))  # type: ignore[arg-type]


@pytest.mark.parametrize("other", [Sum(1.0), SampleSize.of([1]), Max(1.0), Percentile.of([1], 0.5)])
def test_kinds_do_not_mix(other: Metric) -> None:
    with pytest.raises(TypeError, match=f"x cannot merge Mean with {type(other).__name__}"):
        merge({"x": Mean.of([1.0])}, {"x": other})


def test_nan_reaches_the_maximum_from_either_side() -> None:
    assert math.isnan((Max(math.nan) + Max(1.0)).value) and math.isnan((Max(1.0) + Max(math.nan)).value)


def write(path: Path, first: int, last: int, resume_from: int | None = None) -> None:
    sink = JsonlSink(path, resume_from)
    for step in range(first, last + 1):
        sink.write(step, {"reward/mean": step / 10, "version": step})
    sink.close()


def test_jsonl_line_is_flushed_with_step_first_and_nan_as_null(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    sink = JsonlSink(path, None)
    sink.write(1, {"b": math.nan, "a": np.float32(0.5), "c": math.inf, "version": 1})
    assert path.read_text() == '{"step": 1, "b": null, "a": 0.5, "c": null, "version": 1}\n'
    sink.close()


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    path, straight = tmp_path / "metrics.jsonl", tmp_path / "straight.jsonl"
    write(path, 1, 7)
    with path.open("a") as file:
        file.write('{"step": 8, "rew')  # killed in the middle of a line
    write(path, 6, 10, resume_from=5)
    write(straight, 1, 10)
    assert path.read_text() == straight.read_text()


def test_appending_without_dropping_would_repeat_steps(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, 1, 7)
    with path.open("a") as file:  # the broken variant
        file.write(json.dumps({"step": 6}) + "\n")
    steps = [row["step"] for row in read_jsonl(path)]
    assert len(steps) != len(set(steps))


def test_going_back_in_flight_rewinds(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl", None)
    for step in (1, 2, 3, 2, 3, 4):
        sink.write(step, {})
    sink.close()
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_a_new_run_starts_empty(tmp_path: Path) -> None:
    write(tmp_path / "metrics.jsonl", 1, 3)
    write(tmp_path / "metrics.jsonl", 1, 1)
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1


@pytest.mark.parametrize(
    ("line", "message"), [("{oops", "line 2 is not JSON"), ("[]", "line 2 has no"), ("{}", "step")]
)
def test_a_corrupt_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match=message):
        read_jsonl(path)


def test_tensorboard_holds_the_values_and_purges_on_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps, purge in (((1, 2, 3), None), ((3, 4), 3)):
        sink = TensorBoardSink(tmp_path, purge)
        for step in steps:
            sink.write(step, {"reward/mean": step + 0.25 * len(steps)})
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("reward/mean")
    assert [(e.step, e.value) for e in events] == [(1, 1.75), (2, 2.75), (3, 3.5), (4, 4.5)]


def test_wandb_missing_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install -e '.\[wandb\]'"):
        WandbSink(tmp_path)


@pytest.mark.parametrize(("mode", "wanted"), [(None, "offline"), ("online", "online")])
def test_wandb_is_offline_unless_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str | None, wanted: str
) -> None:
    seen: dict[str, object] = {}
    run = SimpleNamespace(log=lambda row, step: seen.update(row, step=step), finish=lambda: seen.update(finished=True))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda **kw: (seen.update(kw), run)[1]))
    monkeypatch.delenv("WANDB_MODE", raising=False)
    if mode:
        monkeypatch.setenv("WANDB_MODE", mode)
    sink = WandbSink(tmp_path / "demo", {"seed": 0})
    sink.write(4, {"reward/mean": 0.5})
    sink.close()
    assert seen["mode"] == wanted and seen["name"] == "demo" and seen["config"] == {"seed": 0}
    assert seen["step"] == 4 and seen["reward/mean"] == 0.5 and seen["finished"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


ROW = {
    "reward/mean": 0.41234, "response/length": 84.2, "rollout/accept_length": 2.406, "rollout/tokens_per_s": 1520.4,
    "staleness/max": 1.0, "train/loss": 0.1,
}  # fmt: skip


def test_progress_line_shows_the_five_numbers_within_80_columns() -> None:
    stream = io.StringIO()
    line = ProgressLine(total=60, start=10, stream=stream)
    line.write(11, ROW)
    line.write(12, {"reward/mean": 0.5})
    line.close()
    first, second = stream.getvalue().splitlines()
    assert first.startswith("step 11/60 ") and "<" in first  # elapsed<to go
    assert first.endswith("reward 0.412  len 84  accept 2.41  1520 tok/s  stale 1") and len(first) <= 80
    assert second.endswith("reward 0.500")


def test_progress_line_shows_the_speed_of_the_last_steps_as_no_group_comes_in_with_some() -> None:
    """A step that trains on what was there already has no tokens; its time counts for those of its neighbours."""
    stream = io.StringIO()
    line = ProgressLine(total=20, stream=stream)
    for step, (speed, seconds) in enumerate([(0.0, 1.0), (300.0, 2.0), (0.0, 1.0), (400.0, 4.0)], 1):
        line.write(step, {"rollout/tokens_per_s": speed, "time/step": seconds, "staleness/max": 1.0})
    shown = [text.rpartition("  ")[0].rpartition("  ")[2] for text in stream.getvalue().splitlines()]
    assert not shown[0].endswith("tok/s") and shown[1:] == ["200 tok/s", "150 tok/s", "275 tok/s"]
    for step in range(5, 15):
        line.write(step, {"rollout/tokens_per_s": 70.0, "time/step": 1.0})
    assert stream.getvalue().endswith("70 tok/s\n")  # of the last ten


def test_progress_line_says_how_far_a_long_step_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file each half minute; on a terminal at once, behind the numbers of the last step."""
    stream, now = io.StringIO(), 0.0
    monkeypatch.setattr("bebop.metrics.sinks.time.monotonic", lambda: now)
    line = ProgressLine(total=9, start=3, stream=stream)
    for now in (1.0, 31.0, 40.0, 59.0, 62.0, 93.0):
        if now == 62.0:
            line.write(4, {"reward/mean": 0.5})
        line.under_way(f"{now:.0f}/128 completions")
    said = [text for text in stream.getvalue().splitlines() if "completions" in text]
    assert said == ["step 4/9: 31/128 completions", "step 5/9: 93/128 completions"]
    line.close()
    screen = Terminal()
    line = ProgressLine(total=2, stream=screen)
    line.under_way("1/128 completions")
    line.write(1, {"reward/mean": 0.5})
    line.under_way("2/128 completions")
    assert "1/128 completions" in screen.getvalue() and screen.getvalue().endswith("reward 0.500  2/128 completions")


def test_progress_line_leaves_a_line_of_each_evaluation() -> None:
    found = {"eval/greedy_pass_at_1": 0.75, "eval/pass_at_1": 0.5, "eval/best_step": 4.0}
    for stream in (io.StringIO(), Terminal()):
        line = ProgressLine(total=8, stream=stream)
        line.write(0, {**found, "eval/best_step": 0.0})
        line.write(4, {**ROW, **found})
        line.write(8, {**ROW, **found, "eval/pass_at_1": 0.25})
        line.close()
        said = [text.rpartition("\r")[2] for text in stream.getvalue().splitlines() if "evaluation" in text]
        assert said == [
            "evaluation after step 0: greedy pass@1 0.750, pass@1 0.500; the best so far",
            "evaluation after step 4: greedy pass@1 0.750, pass@1 0.500; the best so far",
            "evaluation after step 8: greedy pass@1 0.750, pass@1 0.250; best so far: step 4",
        ]


def test_progress_line_rewrites_itself_on_a_terminal() -> None:
    stream = Terminal()
    line = ProgressLine(total=2, stream=stream)
    line.write(1, ROW)
    line.write(2, ROW)
    line.close()
    assert "\rstep 2/2 " in stream.getvalue() and stream.getvalue().count("\n") == 1
