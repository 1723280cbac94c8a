"""Metrics merge as if computed on the union; sinks keep each step exactly once."""

import io
import json
import math
import os
import sqlite3
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bebop.config.fields import from_dict
from bebop.config.job import MonitorConfig
from bebop.errors import UserError
from bebop.metrics.catalogue import tracker_layout
from bebop.metrics.metrics import Max, Mean, Metric, Metrics, Percentile, SampleSize, Sum, merge, values
from bebop.metrics.sinks import (
    JsonlSink,
    ProgressLine,
    Sample,
    StepLog,
    TensorBoardSink,
    TrackioSink,
    WandbSink,
    printable,
    read_jsonl,
)
from bebop.runtime import preflight
from tests.cases import peak_memory

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


@pytest.mark.slow
def test_resuming_a_long_log_holds_one_line_at_a_time(tmp_path: Path) -> None:
    path, last = tmp_path / "drift.jsonl", 20
    lines = [json.dumps({"step": step, "reached": [step / 7] * 2400}) + "\n" for step in range(1, 121)]
    path.write_text("".join(lines))
    size = path.stat().st_size
    assert size > 5e6
    logs: list[StepLog] = []
    assert peak_memory(lambda: logs.append(StepLog(path, last))) < size / 4
    logs[0].close()
    assert path.read_text() == "".join(lines[:last])


def test_a_byte_that_is_no_text_is_named_by_its_place_in_the_file_and_nothing_is_dropped(tmp_path: Path) -> None:
    path, log = tmp_path / "drift.jsonl", b'{"step": 1}\n{"step": 2}\n{"step\xff": 3}\n'
    path.write_bytes(log)
    with pytest.raises(UserError, match="byte 30"):
        StepLog(path, 2)
    assert path.read_bytes() == log and [one.name for one in tmp_path.iterdir()] == ["drift.jsonl"]


def test_a_log_without_its_last_line_end_goes_on_in_a_new_line(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}')  # killed before the end of the line
    write(path, 3, 3, resume_from=2)
    assert [row["step"] for row in read_jsonl(path)] == [1, 2, 3]


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


SAMPLES = [
    Sample(prompt="<user>4 + 5 = ?", completion="**9**\n\x1b[31mred", number=16, reward=1.0),
    Sample(prompt="<user>4 - 5 = ?", completion="x" * 9000, number=17, reward=-0.5),
]
CONFIG = {"trainer": {"lr": 0.1, "betas": (0.9, 0.98)}, "task": {"args": {}, "path": None}}


def test_tensorboard_holds_samples_settings_and_charts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    sink = TensorBoardSink(tmp_path, None, CONFIG, tracker_layout())
    sink.write(1, {"reward/mean": 0.25, "drift/state": 2.0})
    sink.write_samples(1, SAMPLES)
    sink.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert sorted(events.Tags()["scalars"]) == ["_main/1_reward", "reward/mean", "z_drift/state"]
    text = events.Tensors("samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "**Prompt 16, reward 1.000**" in text and "\n    **9**\n    \\x1b[31mred\n" in text, (
        "as code, not as Markdown"
    )
    assert "x … x" in text and len(text) < 3000
    settings = events.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| trainer.lr | `0.1` |" in settings and "| task.args | `{}` |" in settings
    assert [path.name.startswith("events.") for path in tmp_path.iterdir()] == [True], "no second run"
    stored = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    assert HParamsPluginData.FromString(stored).session_start_info.hparams["trainer.lr"].number_value == 0.1
    layout = Layout.FromString(events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0])
    assert [category.title for category in layout.category][:2] == ["main", "learning"]
    assert layout.category[0].chart[0].multiline.tag == ["_main/1_reward"]


@pytest.mark.parametrize(("name", "sink"), [("wandb", WandbSink), ("trackio", TrackioSink)])
def test_a_tracker_that_is_missing_is_one_clear_line(
    name: str, sink: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"pip install -e '.\[{name}\]'"):
        sink(tmp_path)
    monkeypatch.setattr(preflight, "find_spec", lambda module: None if module == name else True)
    with pytest.raises(UserError, match=rf"^monitor.{name}=True is not possible: pip install -e '.\[{name}\]'"):
        preflight.check_trackers(from_dict(MonitorConfig, {name: True}))


def tracked(sink: WandbSink | TrackioSink) -> None:
    """What a job gives a tracker."""
    sink.write(1, {"reward/mean": 0.25, "drift/state": 2.0})
    sink.write_samples(1, SAMPLES)
    sink.write(2, {"reward/mean": 0.5})
    sink.close()


def wandb_records(content: bytes) -> Iterator[Any]:
    """The records of an offline run, in LevelDB's log format: blocks of 32 KiB, in which a record has a head of 7."""
    from wandb.proto.wandb_internal_pb2 import Record

    at, found = 7, b""  # the file has a head of its own
    while at + 7 <= len(content):
        if (left := -at % 32768) < 7 and left:
            at += left
        length, kind = struct.unpack("<HB", content[at + 4 : at + 7])
        found, at = found + content[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(found)
            found = b""


@pytest.mark.slow  # W&B starts a server of its own
def test_wandb_holds_values_settings_and_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    tracked(WandbSink(tmp_path / "demo", CONFIG))
    (file,) = tmp_path.glob("demo/wandb/offline-run-*/*.wandb")
    ends = time.monotonic() + 60
    while True:  # W&B's server writes the file, on a busy machine a moment after the run is closed
        rows, config = list[dict[str, Any]](), dict[str, Any]()
        for record in wandb_records(file.read_bytes()):
            config |= {one.key: json.loads(one.value_json) for one in record.run.config.update}
            row = {one.key or "/".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
            rows += [row] if row else []
        if len(rows) > 1 or time.monotonic() > ends:
            break
        time.sleep(0.2)
    assert config["trainer"]["lr"] == 0.1
    assert [(row["_step"], row["reward/mean"], row["_main/1_reward"]) for row in rows] == [
        (1, 0.25, 0.25),
        (2, 0.5, 0.5),
    ]
    assert rows[0]["z_drift/state"] == 2.0
    (table,) = tmp_path.glob("demo/wandb/offline-run-*/files/media/table/samples_*.json")
    shown = json.loads(table.read_text())
    assert shown["columns"][-1] == "reward" and shown["data"][0][2:] == ["<user>4 + 5 = ?", r"**9**\n\x1b[31mred", 1.0]


@pytest.mark.slow  # its import takes a second
def test_trackio_holds_values_settings_and_samples(tmp_path: Path) -> None:
    """In a process of its own: Trackio reads its folder from the environment as it is imported."""
    code = (
        "from tests.metrics.test_metrics import CONFIG, TrackioSink, tracked\n"
        f"from pathlib import Path\ntracked(TrackioSink(Path({str(tmp_path / 'demo')!r}), CONFIG))\n"
    )
    environment = {**os.environ, "TRACKIO_DIR": str(tmp_path / "trackio"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "", "stdout is the command's own"
    with closing(sqlite3.connect(tmp_path / "trackio" / "bebop.db")) as file:
        rows = [(step, json.loads(row)) for step, row in file.execute("SELECT step, metrics FROM metrics ORDER BY id")]
        (config,) = file.execute("SELECT config FROM configs").fetchone()
    assert json.loads(config)["trainer"]["lr"] == 0.1
    values = [(step, row["reward/mean"]) for step, row in rows if "reward/mean" in row]
    assert values == [(1, 0.25), (2, 0.5)] and rows[0][1]["z_drift/state"] == 2.0
    assert any("<user>4 + 5 = ?" in json.dumps(row) for _, row in rows)


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


def test_what_a_terminal_would_obey_is_spelled_out_and_long_texts_are_cut() -> None:
    assert printable("a\x1b[31m\r\nb\u202ec\ud800 é 中") == r"a\x1b[31m\r\nb\u202ec\ud800 é 中"
    for text in ("ab" * 500, "\x00" * 1000):
        assert len(printable(text, 101)) == 101 and printable(text, 101)[49:52] == " … "
    assert printable("x" * 101, 101) == "x" * 101


@pytest.mark.parametrize("terminal", [True, False])
def test_a_sample_stands_above_the_progress_line_in_a_few_lines(terminal: bool) -> None:
    stream = Terminal() if terminal else io.StringIO()
    line = ProgressLine(total=2, stream=stream)
    line.write(1, ROW)
    line.write_samples(1, SAMPLES[1:])
    line.write(2, ROW)
    line.close()
    lines = stream.getvalue().replace("\r", "\n").splitlines()
    first = next(i for i, text in enumerate(lines) if "sample" in text)
    shown = [text for text in lines[first:] if not text.startswith("step") and text.strip()]
    assert shown[0] == "  sample of step 1: prompt 17, reward -0.500"
    assert shown[1] == "    prompt      <user>4 - 5 = ?" and shown[2].startswith("    completion  xxx")
    assert 3 <= len(shown) <= 7 and max(map(len, shown)) <= (79 if terminal else 100)
    assert "\x1b" not in stream.getvalue().replace("\x1b[A", "") and lines[-1].startswith("step 2/2")


def test_progress_line_drops_numbers_before_it_cuts_off_what_moves() -> None:
    screen = Terminal()
    line = ProgressLine(total=60, stream=screen)
    line.write(1, ROW)
    line.under_way("127/128 completions")
    last = screen.getvalue().rpartition("\r")[2].rstrip()
    assert last.endswith("reward 0.412  len 84  accept 2.41  127/128 completions") and len(last) <= 79
