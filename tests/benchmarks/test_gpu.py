"""The run on a lent GPU, tried on a CPU: every stage with tiny shapes, on a machine that lacks Ray and Hydra."""

import gc
import json
import os
import re
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bebop.bench import peaks
from bebop.bench.gpu import __main__ as run
from bebop.bench.gpu import headline, models, stages
from bebop.bench.gpu.models import TINY, Decoding, policy_of
from bebop.bench.gpu.sampling_cycle import SamplingCycle
from bebop.bench.gpu.stage import Context, Stage
from bebop.bench.gpu.stages import STAGES
from bebop.bench.gpu.summary import summary
from bebop.errors import UserError
from bebop.metrics.intervals import Interval
from bebop.rollout.decoding.rules import Rejection
from bebop.systems import SYSTEMS

ROOT = Path(__file__).parents[2]
# What a machine with a GPU was seen to have beside torch, Triton and transformers does not include these.
ABSENT = """
import importlib.util, sys
absent = {"hydra", "omegaconf", "ray", "datasets", "math_verify", "reasoning_gym", "plotly", "grimp", "sglang", "vllm"}
absent |= {"psutil", "tenacity", "wrapt"}
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in absent:
            raise ModuleNotFoundError(f"{name} is not on that machine", name=name)
sys.meta_path.insert(0, Absent())
there = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name.partition(".")[0] in absent else there(name, *rest)
"""


def dry_run(folder: Path, *stages: str) -> str:
    """The page of a dry run of these stages."""
    (folder / "sitecustomize.py").write_text(ABSENT)
    command = [sys.executable, "-m", "bebop.bench.gpu", "--dry-run", "--out", str(folder / "out"), "--stage", *stages]
    path = {**os.environ, "PYTHONPATH": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith((folder / "out" / "summary.md").read_text())
    return done.stdout


@pytest.mark.slow  # seven processes
def test_every_stage_runs_without_what_the_machine_lacks(tmp_path: Path) -> None:
    measuring = [stage.name for stage in STAGES if stage.name != "tests" and not stage.asked]
    page = dry_run(tmp_path, *measuring)
    files = sorted((tmp_path / "out").glob("*.json"))
    assert [file.stem.partition("_")[2] for file in files] == measuring
    for file in files:
        rows = json.loads(file.read_text())["rows"]
        assert rows and not [row for row in rows if row.get("skipped")], file
    assert "no number here means anything" in page and "Nothing was left out." in page
    assert all(f"## {name}\n" in page for name in measuring) and "| tiny | 2 | bebop | 3 | overlapped |" in page
    rows = json.loads((tmp_path / "out" / "5_engine.json").read_text())["rows"]
    measured = [row for row in rows if row["what"] == "cycle" and row["graphs"]]
    arms = [(0, False), (0, True), (1, False), (3, False), (3, True)]
    assert [(row["K"], row["overlap"]) for row in measured] == arms
    assert all(row["of_eager"] > 0 and (row["of_graph"] or 0) >= row["overlap"] * 1e-9 for row in measured)
    assert [row["paged"] for row in rows if row["what"] == "cache"] == [True, False]
    assert "- tiny, B = 2: with keys and values in pages a cycle takes" in page
    updates = json.loads((tmp_path / "out" / "6_trainer.json").read_text())["rows"]
    published = [row for row in updates if row["what"] != "update"]
    updates = [row for row in updates if row["what"] == "update"]
    assert [row["checkpointing"] for row in updates if not row["lora"]] == [False, True]
    assert updates[1]["predicted GB"] < updates[0]["predicted GB"]
    assert [row.get("way") for row in published] == ["store", "shared", "broadcast", None]
    assert published[3]["value"] == 1
    assert all(0 < row["pause"] < row["value"] for row in published[:3]) and "- tiny, publishing" in page


def test_a_cycle_from_logits_is_that_from_probabilities_and_moves_a_tenth() -> None:
    torch.manual_seed(0)
    cycle = SamplingCycle(torch.device("cpu"), 8, 3, 500)
    for found, wanted in zip(cycle.from_logits(), cycle.from_probabilities(), strict=True):
        assert torch.allclose(found.double(), wanted.double(), rtol=0, atol=1e-5)
    assert len(cycle.from_logits()[1].unique()) > 1
    rows = 8 * 500  # at 256 rows of 151,936 tokens this is 1.01 GB
    assert 0 < cycle.bytes_of_logits() == 2 * rows * 13 < cycle.bytes_of_probabilities() / 10


@pytest.mark.slow  # two jobs
def test_what_is_asked_for_by_name_runs_without_what_the_machine_lacks(tmp_path: Path) -> None:
    page = dry_run(tmp_path, "job", "precision")
    assert "- built-in, plain: " in page and "- tiny shape, drafts, overlapped: " in page
    assert "Nothing was left out." in page
    found = json.loads((tmp_path / "out" / "7_job.json").read_text())["rows"]
    rows = {(row["model"], row["arm"]): row for row in found}
    assert len(rows) == 8 and rows["built-in", "plain"]["accept length"] == 1.0
    for model in ("built-in", "tiny shape"):
        drafts, overlapped = rows[model, "drafts"], rows[model, "drafts, overlapped"]
        assert drafts["accept length"] == overlapped["accept length"] > 1.5
    assert "| 2 | 64 | bfloat16 |" in page
    measured = json.loads((tmp_path / "out" / "8_precision.json").read_text())["rows"]
    assert [row["dtype"] for row in measured] == ["bfloat16", "float16"] and all(row["value"] > 0 for row in measured)


def planted_run(monkeypatch: pytest.MonkeyPatch, rule: type[headline.PlantedAcceptance], logits: bool) -> float:
    """Standard errors by which the accept length of a real engine, K = 3, differs from the planted one."""
    monkeypatch.setattr(headline, "PlantedAcceptance", rule)
    chances = torch.ones(3, dtype=torch.float64)

    def prepare(engine: Any) -> None:
        headline.plant(engine, chances)
        engine.decoder.logits = logits  # as on a GPU, or as on a CPU

    made = Decoding(policy_of(TINY, torch.device("cpu")), "bebop", 3, 32, graphs=True, prepare=prepare)
    rows = []
    for number, chance in enumerate((0.3, 0.8)):
        chances.fill_(chance)
        made.restart(32, first_seed=1000 * number)
        before = int(made.engine.slots.count.sum())
        made.cycles(24)
        tokens = (int(made.engine.slots.count.sum()) - before) / (32 * 24)
        about = {"model": "tiny", "batch": 32, "K": 3, "chance": chance, "cycles": 24, "accepted": tokens - 1}
        rows.append({"what": "cycle", "value": 1.0, **about})
    assert not any(finished.completion.exact for finished in made.engine.abort()), "a trainer would take it"
    return headline.deviation(rows)


class Unplanted(headline.PlantedAcceptance):
    """Tests as they are: p and q decide."""

    def accept(self, *given: Any) -> Any:
        return Rejection.accept(self, *given)


class AllOrNothing(headline.PlantedAcceptance):
    """One number tests all drafts of a row."""

    def accept(self, rows: Any, draft: Any, out: Any, uniforms: torch.Tensor) -> Any:
        one = uniforms[:, :1].expand(-1, draft.tokens.shape[1])
        return super().accept(rows, draft, out, torch.cat([one, uniforms[:, draft.tokens.shape[1] :]], 1))


@pytest.mark.slow  # four engines, 3,000 cycles of a row each
@pytest.mark.parametrize("logits", [True, False])
def test_a_planted_chance_gives_its_accept_length_and_broken_variants_do_not(
    logits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planted_run(monkeypatch, headline.PlantedAcceptance, logits) < 4
    for broken in (Unplanted, AllOrNothing):
        assert planted_run(monkeypatch, headline.takes_logits(broken), logits) > 8, broken.__name__


def test_nothing_but_code_can_plant_an_acceptance() -> None:
    rules = {system.rule() for system in SYSTEMS.values() if system.rule is not None}
    assert len(rules) > 2 and not any(issubclass(rule, headline.PlantedAcceptance) for rule in rules)
    loaded = (
        "import sys, bebop.run, bebop.systems; print(any(name.startswith('bebop.bench.gpu') for name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", loaded], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_shares_and_chances_of_the_paper_are_those_worked_by_hand() -> None:
    assert headline.needed_share(1.5, 2.4) == pytest.approx(4 / 7) and headline.needed_share(1.8, 2.4) == pytest.approx(
        16 / 21
    )
    assert headline.synchronous(4 / 7, 2.4) == pytest.approx(1.5)
    assert headline.asynchronous(0.75, 2.4) == pytest.approx(2.4) and headline.asynchronous(0.6, 2.4) == pytest.approx(
        1.5
    )
    assert headline.asynchronous(0.4, 2.4) == 1.0, "updates are longer already"
    assert headline.expected(0.5, 3) == 0.875 and headline.variance(0.5, 1) == 0.25
    assert headline.chance_of(87.5 / 3) == pytest.approx(0.5)


@pytest.mark.slow  # two engines of the smallest size, a process
def test_the_headline_stage_says_what_is_planted_and_judges_by_its_rule(tmp_path: Path) -> None:
    page = dry_run(tmp_path, "headline")
    assert "**Acceptance planted, text meaningless.**" in page and "Nothing was left out." in page
    assert "mean of Table 2: 2.4 times is " in page and "computed, not run" in page
    file = tmp_path / "out" / "9_headline.json"
    rows = json.loads(file.read_text())["rows"]
    cycles = [row for row in rows if row["what"] == "cycle"]
    assert {row["K"] for row in cycles} == {0, 1, 3} and {row["how"] for row in cycles} == {"overlapped graphs"}
    assert all((row.get("label") == headline.LABEL) == bool(row["K"]) for row in cycles)
    assert headline.deviation(rows) < 4
    headline.main([str(file)])
    figure = file.with_suffix(".svg").read_text()
    assert "Acceptance planted, text meaningless" in figure and "Table 3, 3.7-Max" in figure
    with pytest.raises(UserError, match="is not a file: give one file of this stage"):
        headline.main([str(tmp_path / "none.json")])


def cycle(**changes: Any) -> dict[str, Any]:
    about = {"what": "cycle", "model": "m", "batch": 1, "beside": 3, "K": 3, "chance": 0.5, "planted": 0.875}
    return {**about, "value": 10.0, **changes}


def test_a_ratio_is_within_a_round_and_a_bar_that_is_missed_is_called_so() -> None:
    plain = [cycle(round=n, K=0, chance=None, value=value) for n, value in enumerate((10.0, 20.0))]
    rows = [*plain, *(cycle(round=n, value=value) for n, value in enumerate((12.5, 25.0))), cycle(round=2)]
    found = headline.ratios(rows, "m", 1, 3, 0.5)
    assert found is not None and found.low == found.value == found.high == pytest.approx(1.5)
    assert headline.ratios(rows[:1], "m", 1, 3, 0.5) is None
    spans = {(2.5, 3.0): "reached", (1.0, 2.3): "missed", (2.0, 3.0): "open"}
    assert [headline.verdict(Interval(2.4, *span)) for span in spans] == list(spans.values())


@pytest.mark.slow  # collects the tests that need a GPU
def test_the_tests_for_a_gpu_can_be_collected_there(tmp_path: Path) -> None:
    assert "All passed" in dry_run(tmp_path, "tests")
    [row] = json.loads((tmp_path / "out" / "1_tests.json").read_text())["rows"]
    assert row["value"] == 0 and row["lines"] == []


def test_make_takes_the_tests_that_can_be_imported_without_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of vLLM and SGLang import what that machine lacks before they ask for the engine."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(stages, "find_spec", lambda _: None)
    alone = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "-s", "test-gpu", "PYTHON=echo", "ARGS="]
    said = subprocess.run(command, env=alone, capture_output=True, text=True, check=True).stdout.split()
    assert sorted(word for word in said if word.endswith(".py")) == stages.gpu_tests() != []


def slept(context: Context) -> None:
    context.keep("begun", 1.0)
    time.sleep(30)


def failed(context: Context) -> None:
    context.keep("before", 1.0)
    raise ValueError("no\nsuch thing")


def done(context: Context) -> None:
    context.keep("left", context.left)
    with context.tried("odd", batch=3):
        raise RuntimeError("this alone")
    context.time("impossible", lambda: 1 // 0, block=7)


def test_a_stage_that_fails_or_is_late_costs_no_other_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"fails": (failed, 10), "done": (done, 30), "late": (done, 300)}
    stages = tuple(Stage(name=n, seconds=s, run=r, decides="") for n, (r, s) in kinds.items())
    monkeypatch.setattr(run, "STAGES", stages)
    monkeypatch.setattr(run, "SECONDS", 100)
    assert run.main(["--dry-run", "--out", str(tmp_path), "--seconds", "20"]) == 1
    page = (tmp_path / "summary.md").read_text()
    assert re.search(r"- fails: failed after \d s: ValueError: no such thing", page)
    assert re.search(r"- done: \d s", page) and "done: odd: RuntimeError: this alone" in page
    assert "done: impossible: ZeroDivisionError" in page, "and the stage went on"
    assert re.search(r"- late: left out: \d+ s were left, it needs 60", page)
    assert json.loads((tmp_path / "0_fails.json").read_text())["rows"] == [{"what": "before", "value": 1.0}]
    assert not (tmp_path / "2_late.json").exists()
    with pytest.raises(SystemExit):
        run.main(["--dry-run", "--stage", "tv"])
    assert "choose from 'fails', 'done', 'late'" in capsys.readouterr().err


def test_a_stage_that_hangs_is_ended_with_what_it_had(tmp_path: Path) -> None:
    context = Context(file=tmp_path / "0_slept.json", seconds=-6.0, dry=True, origin={})  # one second with the grace
    began = time.monotonic()
    assert run.carried_out(slept, context).startswith("failed: ended after 1 s")
    assert time.monotonic() - began < 10
    assert json.loads(context.file.read_text())["rows"] == [{"what": "begun", "value": 1.0}]
    assert "begun" not in summary(tmp_path, {}, {})


def lost(context: Context) -> None:
    context.rows.append({"what": object()})  # so that nothing can be written any more, as without a GPU
    raise ValueError("the cause")


def test_a_stage_that_cannot_write_says_why_it_failed(tmp_path: Path) -> None:
    context = Context(file=tmp_path / "0_lost.json", seconds=60.0, dry=True, origin={})
    assert re.fullmatch(r"failed after \d s: ValueError: the cause", run.carried_out(lost, context))


def test_without_a_gpu_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "GPUS", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="no NVIDIA GPU here: --dry-run"):
        run.main(["--out", str(tmp_path)])


def test_a_card_that_was_measured_takes_the_place_of_its_data_sheet(tmp_path: Path) -> None:
    sheet = peaks.measured("h100", tmp_path)
    assert sheet == peaks.PEAKS["h100"] and "data sheet" in sheet.source
    (tmp_path / "h100").mkdir()
    rows = [
        {"what": "copy GB/s", "value": 3000.0, "steady": True},
        {"what": "bf16 TFLOP/s", "value": 1.0, "steady": False},
    ]
    content = {"place": {"commit": "abc"}, "rows": rows}
    (tmp_path / "h100" / "0_card.json").write_text(json.dumps(content))
    found = peaks.measured("h100", tmp_path)
    assert found.bandwidth == 3e12 and found.flops == sheet.flops, "what was not steady does not count"
    assert found.source == "measured: h100/0_card.json, commit abc"


def test_the_profiler_leaves_the_clocks_of_a_lent_card_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def started(command: list[str], **_: Any) -> SimpleNamespace:
        seen.append(command)
        return SimpleNamespace(stdout="")

    monkeypatch.setattr(stages.shutil, "which", lambda _: "/bin/ncu")
    monkeypatch.setattr(stages.subprocess, "run", started)
    stages._traffic(Context(file=tmp_path / "2_tv.json", seconds=60.0, dry=True, origin={}), 4, 200)
    [command] = seen
    assert command[command.index("--clock-control") + 1] == "none"


def test_a_wait_of_the_engine_counts_once_and_that_of_the_benchmark_does_not() -> None:
    of_an_item = ["aten::item", "aten::_local_scalar_dense", "cudaMemcpyAsync", "cudaStreamSynchronize"]
    assert models.waits(["cudaEventSynchronize", "cudaDeviceSynchronize", *of_an_item]) == 2


def test_a_call_of_many_operations_is_timed_as_a_graph(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    captured: list[Any] = []

    def graph(call: Any) -> SimpleNamespace:
        captured.append(call)
        return SimpleNamespace(replay="replay")

    monkeypatch.setattr(stages, "_graph", graph)
    call = SamplingCycle(torch.device("cpu"), 1, 1, 4).from_logits
    assert stages.replayed(call, torch.device("cpu")) == call and not captured
    launch: Any = stages.replayed(call, torch.device("cuda"))
    assert launch == "replay" and captured == [call]
    timed: dict[str, Any] = {}
    monkeypatch.setattr(stages, "replayed", lambda *_: "replay")
    monkeypatch.setattr(stages, "_attention", lambda _: None)
    monkeypatch.setattr(Context, "time", lambda _, what, call, **__: timed.update({what: call}))
    stages.verify(Context(file=tmp_path / "4_verify.json", seconds=60.0, dry=True, origin={}))
    whole = [what for what, call in timed.items() if call == "replay"]
    assert whole == ["cycle from probabilities", "cycle from logits"] and len(timed) == 8


@pytest.mark.slow
def test_the_layers_of_an_update_are_gone_before_the_next_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are computed again refer to themselves: without a collection they would count in the next peak."""
    made: list[weakref.ref[Any]] = []

    def policy(*given: Any, **more: Any) -> Any:
        assert not any(one() for one in made)
        own = policy_of(*given, **more)
        made.append(weakref.ref(own.backbone.get_decoder().layers[0]))
        return own

    monkeypatch.setattr(models, "policy_of", policy)
    gc.disable()
    try:
        for _ in range(2):
            models.update(TINY, torch.device("cpu"), 64, checkpointing=True)
    finally:
        gc.enable()
    assert len(made) == 2
