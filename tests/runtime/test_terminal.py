"""What the terminal says at the start and at the end of a run."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from bebop import run
from bebop.config.compose import job_config, model_defaults
from bebop.config.job import JobConfig
from bebop.report.verdict import Said
from bebop.run_dir.checkpoints import link_model
from bebop.runtime.actor_group import actor_names
from bebop.runtime.session import Dashboard
from bebop.runtime.terminal import about_run, ended_run
from bebop.trajectory_db.reader import NAME
from tests.commands import error_of
from tests.report.test_drift import watched_run


def started(overrides: list[str], dashboard: Dashboard | None = None) -> dict[str, str]:
    """The lines of a start, by their names."""
    config = job_config(overrides)
    lines = about_run(config, model_defaults(config), dashboard)
    assert len(lines) <= 7 and all(re.match(r"  \w", line) for line in lines)
    return {line[2:12].strip(): line[13:] for line in lines}


def test_the_start_says_what_runs_and_where_it_can_be_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = started([f"runtime.dir={tmp_path}/my run", "trainer.lr=3e-5", "model.device=cpu"])
    assert said["model"] == "tiny, 2.1M parameters, 12 layers and an MTP head, float32 on cpu"
    assert said["training"] == "60 steps of 16 prompts x 8 completions of chain_sum, learning rate 3e-05"
    assert re.fullmatch(r"about \d\.\d of \d+\.\d GB \(cpu\): trainer .*", said["memory"])
    assert said["Ray"] == "Trainer, RolloutWorker(0); no dashboard (runtime.dashboard=true)"
    assert said["viewer"] == "python -m bebop.view 'my run'"


def test_the_start_names_every_process_and_the_way_into_the_dashboard() -> None:
    more = ["runtime.dir=r", "rollout.workers=3", "trainer.ranks=2", "monitor.trace=off"]
    said = started(more, Dashboard("http://127.0.0.1:8265", True))
    names = "Trainer(0) to Trainer(1), RolloutWorker(0) to RolloutWorker(2)"
    assert said["Ray"] == f"{names}; dashboard http://127.0.0.1:8265 (its token: ray get-auth-token)"
    assert "viewer" not in said, "no completions are kept"
    named = about_run(job_config(more), {"trainer.lr": 1e-5, "algorithm.kl_coefficient": 0.001}, None)
    assert "  settings   trainer.lr=1e-05, algorithm.kl_coefficient=0.001 (follow from the model)" in named
    assert "settings" not in said
    assert started(more, Dashboard("http://127.0.0.1:8265", False))["Ray"].endswith("dashboard http://127.0.0.1:8265")
    joined = started([*more, "runtime.address=ray://head:10001"])
    assert "memory" not in joined and joined["model"].endswith("on auto"), "of other machines nothing is known here"


@pytest.mark.parametrize(
    ("part", "ranks", "kind", "labels"),
    [
        ("trainer", 1, "Trainer", ["Trainer"]),
        ("trainer", 2, "Trainer", ["Trainer(0)", "Trainer(1)"]),
        ("rollout worker 12", 1, "RolloutWorker", ["RolloutWorker(12)"]),
    ],
)
def test_actors_have_names(part: str, ranks: int, kind: str, labels: list[str]) -> None:
    assert actor_names(part, ranks) == (kind, labels)


def end(folder: Path, finished: bool, capsys: pytest.CaptureFixture[str], **monitor: Any) -> list[str]:
    config = JobConfig()
    config = dataclasses.replace(config, monitor=dataclasses.replace(config.monitor, **monitor))
    capsys.readouterr()
    run.end(config, folder, finished)
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == len(set(lines)) <= 8
    return lines


def test_the_end_says_what_the_report_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = watched_run(tmp_path / "my run")
    (folder / "checkpoints/step_000030/policy").mkdir(parents=True)
    link_model(folder, folder / "checkpoints/step_000030")
    (folder / NAME).touch()
    monkeypatch.chdir(tmp_path)
    lines = end(folder, True, capsys)
    said = dict(line.split(": ", 1) for line in lines)
    assert list(said) == ["verdict", "advice", "next", "model", "report", "viewer"]
    opening = (folder / "report.html").read_text().split("<main>")[0]
    assert said["verdict"] in opening and said["advice"] in opening
    assert "because the draft head no longer fits the policy." in said["verdict"]
    assert said["next"] == "python -m bebop.run 'runtime.dir=my run' runtime.resume=true cotrain.mode=auto"
    assert (said["model"], said["report"]) == ("my run/model", "my run/report.html")
    assert said["viewer"] == "python -m bebop.view 'my run'"
    (folder / "report.html").unlink()
    assert end(folder, True, capsys, plots=False) == [line for line in lines if not line.startswith("report")]
    assert not (folder / "report.html").exists()
    stopped = end(folder, False, capsys, plots=False)
    assert stopped[-1] == f"interrupted; go on with: python -m bebop.run 'runtime.dir={folder}' runtime.resume=true"
    assert not any(line.startswith(("advice", "next")) for line in stopped), "they are for a run that has ended"


def test_a_run_that_was_stopped_before_its_first_step_has_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also after the evaluation of the initial model, which has a row of its own."""
    for rows in ("", '{"step": 0, "eval/pass_at_1": 0.25}\n'):
        (tmp_path / "metrics.jsonl").write_text(rows)
        assert [line.split(": ")[0] for line in end(tmp_path, False, capsys)] == ["interrupted; go on with"]
        assert not (tmp_path / "report.html").exists()


def test_a_job_with_an_adapter_says_its_size_and_how_its_model_is_written(tmp_path: Path) -> None:
    said = started(["runtime.dir=r", "trainer.lora.rank=8", "model.device=cpu"])
    assert said["training"].endswith("learning rate 0.0002, LoRA of rank 8 (0.2M parameters)")
    policy = tmp_path / "checkpoints/step_000001/policy"
    policy.mkdir(parents=True)
    (policy / "adapter_config.json").touch()
    link_model(tmp_path, policy.parent)
    lines = ended_run(tmp_path, None, None)
    assert f"the model with its adapter: python -m bebop.export --run {tmp_path} --out DIR" in lines
    (policy / "config.json").touch()
    assert not any("export" in line for line in ended_run(tmp_path, None, None))


def test_a_run_without_advice_names_no_command(tmp_path: Path) -> None:
    lines = ended_run(tmp_path, Said(verdict="All is well.", advice="Nothing needs to be done."), None)
    assert lines == ["verdict: All is well.", "advice: Nothing needs to be done."]


def test_a_mistake_is_still_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_of(run.main, ["runtime.sample_every=-1"], capsys).startswith("runtime.sample_every=-1 is not possible")
