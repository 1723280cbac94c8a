"""Whatever text, bytes or JSON a parser is given, it reads or refuses; what was written is read back."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bebop.config.adapt import AdaptConfig
from bebop.config.certify import CertifyConfig
from bebop.config.compose import job_config
from bebop.config.fields import from_dict
from bebop.config.fields import settings as settings_of
from bebop.config.job import JobConfig
from bebop.config.simulate import SimulateConfig
from bebop.errors import UserError
from bebop.metrics.sinks import StepLog, read_jsonl
from bebop.monitor.logs import NAMES, read_log
from bebop.report.runs import load_runs
from bebop.run_dir.safe_parse import parse_json, parse_yaml
from bebop.tasks.files import FileItems
from bebop.view.folders import Folder

pytestmark = pytest.mark.slow  # hundreds of inputs each; quick tests of parsers stand beside them
ROOTS = (JobConfig, AdaptConfig, CertifyConfig, SimulateConfig)
KEYS = (
    *(f"{name}1" if name.endswith("/") else name for names in NAMES.values() for name in names),
    "meta_info", "spec_verify_ct", "completion_tokens", "spec_accept_histogram", "spec_accept_length", "bebop_verify",
    "vllm:spec_decode_num_drafts", "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens",
    "vllm:spec_decode_num_accepted_tokens_per_pos", "unit", "reached", "cycles", "bank", "sweep", "certified", "health",
    "restart", "accepted", "overlap", "draft_entropy", "target_entropy",
)  # fmt: skip
ODD = st.sampled_from([0, 1, -1, 2.5, 10**400, 1 << 40, float("nan"), float("inf"), "", "1", "x\ud800", [], {}, [1, 2]])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | ODD
JSON = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
    max_leaves=8,
)
STEPS = st.just({"step": 1}) | st.just({"step": 1}) | st.just({}) | LEAVES.map(lambda step: {"step": step})
OBJECTS = st.builds(
    lambda step, row: row | step, STEPS, st.dictionaries(st.sampled_from(KEYS), ODD | JSON, min_size=1, max_size=5)
)
LINES = st.lists(OBJECTS, min_size=1, max_size=3).map(lambda rows: "\n".join(map(json.dumps, rows)).encode())
BYTES = st.binary(max_size=60) | st.text(max_size=40).map(lambda text: text.encode(errors="surrogatepass")) | LINES
BYTES |= LINES | st.builds(lambda text, end: text + b"\n" + end, LINES, st.binary(max_size=8))
# A question or an answer: often one that is right, so that the other decides; texts with halves of surrogates.
PARTS = st.just("1+1") | st.sampled_from(["a\ud800", "\udfff", "\udfff\ud800b"]) | JSON
QUESTIONS = st.fixed_dictionaries({"question": PARTS, "answer": PARTS}).map(lambda row: json.dumps(row).encode())

deterministic = settings(deadline=None, derandomize=True, max_examples=50, database=None)
few = settings(deterministic, max_examples=5, suppress_health_check=[HealthCheck.too_slow])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For the files of all examples, each over the one before."""
    return tmp_path_factory.mktemp("read")


def refused(read: Callable[[], Any]) -> Any:
    """What was read, or the one line that says why not."""
    try:
        return read()
    except UserError as error:
        assert str(error).strip()
        return error


@pytest.mark.parametrize("read", [parse_json, parse_yaml])
def test_what_is_nested_too_deeply_is_a_value_error(read: Callable[[bytes], Any]) -> None:
    with pytest.raises(ValueError, match="nested too deeply"):
        read(b"[" * 1500 if read is parse_yaml else b"[" * 100_000)


@deterministic
@given(BYTES)
def test_json_and_yaml_are_read_or_are_value_errors(text: bytes) -> None:
    for read in (parse_json, parse_yaml):
        with suppress(ValueError):
            read(text)


@deterministic
@given(BYTES)
def test_logs_are_read_or_refused(folder: Path, text: bytes) -> None:
    path = folder / "log.jsonl"
    path.write_bytes(text)
    refused(lambda: read_log(path))


@settings(deterministic, max_examples=120)  # 50 do not find a step that is none
@given(BYTES)
def test_runs_are_read_or_refused(folder: Path, text: bytes) -> None:
    (folder / "metrics.jsonl").write_bytes(text)
    (folder / "controller.jsonl").write_bytes(text)
    (folder / "config.yaml").write_bytes(b"" if text[:1] == b"{" else text)
    seen = Folder(path=folder, name="run")
    for read in (lambda: load_runs([folder]), seen.curves, seen.alarms, lambda: seen.setting("monitor", "trace")):
        refused(read)


@deterministic
@given(BYTES | QUESTIONS | QUESTIONS)
def test_questions_are_read_or_refused(folder: Path, text: bytes) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(text)
    items = refused(lambda: FileItems(str(path), "question", "answer", 0))
    if isinstance(items, FileItems):
        row = items.item(0)
        f"{row['question']}{row['answer']}".encode()  # as tokenizers and databases take it


@deterministic
@given(st.lists(st.tuples(st.text(max_size=20).filter(str.strip), st.text(min_size=1, max_size=9)), min_size=1))
def test_questions_are_those_that_were_written(folder: Path, pairs: list[tuple[str, str]]) -> None:
    path = folder / "good.jsonl"
    path.write_text("".join(json.dumps({"question": q, "answer": a}) + "\n" for q, a in pairs))
    items = FileItems(str(path), "question", "answer", 0)
    read = [items.item(index) for index in range(len(pairs))]
    assert sorted((row["question"], row["answer"]) for row in read) == sorted(pairs)


@deterministic
@given(st.lists(st.dictionaries(st.text(max_size=6), st.floats(allow_nan=False, allow_infinity=False)), max_size=4))
def test_steps_are_those_that_were_written(folder: Path, rows: list[dict[str, float]]) -> None:
    path = folder / "steps.jsonl"
    path.unlink(missing_ok=True)
    wanted = [row | {"step": number} for number, row in enumerate(rows, 1)]
    log = StepLog(path)
    for row in wanted:
        log.write(row)
    log.close()
    assert read_jsonl(path) == wanted


@st.composite
def changed(draw: st.DrawFn) -> tuple[type[Any], dict[str, Any]]:
    """A whole configuration with some settings that are anything."""
    cls = draw(st.sampled_from(ROOTS))
    values = dataclasses.asdict(cls())
    names = [one.name for one in settings_of(cls)]
    for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
        at = values
        *path, last = name.split(".")
        for part in path:
            at = at[part] if isinstance(at.get(part), dict) else {}
        at[last] = draw(JSON)
    return cls, values


@deterministic
@given(changed())
def test_configurations_are_read_or_refused(given_: tuple[type[Any], dict[str, Any]]) -> None:
    cls, values = given_
    config = refused(lambda: from_dict(cls, values))
    if isinstance(config, cls):
        assert from_dict(cls, dataclasses.asdict(config)) == config


@few
@given(st.lists(st.text(max_size=12) | st.from_regex(r"\A[a-z.+~]{1,12}=[^\n]{0,8}\Z"), min_size=1, max_size=2))
def test_overrides_are_read_or_refused(overrides: list[str]) -> None:
    refused(lambda: job_config(overrides))


@few
@given(st.floats(1e-9, 1.0), st.integers(1, 1000))
def test_overrides_are_what_was_given(lr: float, steps: int) -> None:
    trainer = job_config([f"trainer.lr={lr!r}", f"trainer.steps={steps}"]).trainer
    assert (trainer.lr, trainer.steps) == (lr, steps)
