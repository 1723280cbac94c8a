"""The run folder of somebody else is data: resuming it runs no code and reaches no server without ``--trust``."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from bebop import adapt, run
from bebop.config.adapt import AdaptConfig
from bebop.config.compose import adapt_config, job_config, write_down
from bebop.config.fields import settings
from bebop.config.job import JobConfig, ModelConfig
from bebop.errors import UserError
from bebop.report import __main__ as report
from bebop.run_dir.folder import ORIGIN, OVERRIDES, own, sign
from bebop.run_dir.resume_security import REACHING, refuse_foreign
from bebop.runtime.preflight import check_model
from bebop.tasks.rewards import make_reward
from bebop.view.folders import Folder
from tests.cases import slow_but
from tests.commands import ended
from tests.run_dir.test_folder import begun

DIRECTORY = "runtime.dir"


@pytest.fixture(autouse=True)
def other_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user without a key."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("XDG_CACHE_HOME", str(home))
    return home


@pytest.fixture
def someone_else(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], None]:
    """Call it, and the user is another."""
    return lambda: monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("other")))


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A reward file that leaves a trace where it is imported."""
    file = tmp_path / "reward.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef reward(text, item): return 1.0\n")
    return file


def resume(path: Path, *given: str) -> None:
    """As ``bebop.run`` judges it."""
    asked = [f"{DIRECTORY}={path}", "runtime.resume=true", *given]
    overrides = run.resumed_overrides(asked, "config", "runtime.")
    refuse_foreign(str(path), job_config(overrides), asked, "config", "runtime.")


def test_code_of_a_foreign_folder_is_not_imported(
    tmp_path: Path, code: Path, someone_else: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = begun(tmp_path / "run", f"task.reward={code}:reward")
    before = sorted(p.relative_to(path) for p in path.rglob("*"))
    someone_else()
    asked = [f"{DIRECTORY}={path}", "runtime.resume=true"]
    with ended(run.main, asked, capsys) as (exit_code, _out, lines):
        assert exit_code == 2 and lines == [
            f"error: runtime.resume=true: {path} is not a run that you began here, and it would import and run "
            f"task.reward='{code}:reward': look at {path}/overrides.json, then add --trust, or give these settings "
            "yourself"
        ]
    assert not (tmp_path / "ran").exists()
    assert sorted(p.relative_to(path) for p in path.rglob("*")) == before
    with ended(run.main, [*asked, "--trust", "--cfg"], capsys) as (exit_code, out, _lines):
        assert exit_code == 0 and "  trust: true\n" in out
    resume(path, "runtime.trust=true")
    make_reward(job_config([f"task.reward={code}:reward"]).task)
    assert (tmp_path / "ran").exists(), "and this is what would have run"


@pytest.mark.slow
def test_an_environment_of_a_foreign_folder_is_not_imported(tmp_path: Path, someone_else: Callable[[], None]) -> None:
    file = tmp_path / "desk.py"
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Desk:\n    pass\n")
    own_code = begun(tmp_path / "run", "task=environment", f"task.name={file}:Desk", "+task.args.url=here")
    ours = begun(tmp_path / "ours", "task=environment", "task.name=store", "+task.args.length=6")
    someone_else()
    resume(ours)
    with pytest.raises(UserError, match=rf"run the environment task.name='{file}:Desk'; give it task.args="):
        resume(own_code)
    with pytest.raises(UserError, match=r"it would give it task.args={'url': 'here'}: look"):
        resume(own_code, f"task.name={file}:Desk")
    assert not (tmp_path / "ran").exists()
    resume(own_code, "runtime.trust=true")


@pytest.mark.slow
def test_who_began_a_run_is_not_asked(tmp_path: Path, code: Path, someone_else: Callable[[], None]) -> None:
    path = begun(tmp_path / "run", f"task.reward={code}:reward")
    resume(path)
    resume(Path(shutil.move(path, tmp_path / "moved")))
    someone_else()
    resume(begun(tmp_path / "other", f"task.reward={code}:reward"))  # has a key as well
    for trusting in (["runtime.trust=true"], ["++runtime.trust=true"], [f"task.reward={code}:reward"]):
        resume(tmp_path / "moved", *trusting)
    resume(tmp_path / "moved", "task.reward=math_verify", "trainer.steps=9")
    for distrusting in ([], ["runtime.trust=false"], ["trainer.steps=9"]):
        with pytest.raises(UserError, match="is not a run that you began here"):
            resume(tmp_path / "moved", *distrusting)


CHANGED = [
    ["task.reward=evil.f"], ["++runtime.trust=true", "task.reward=evil.f"],
    ["++task.reward=evil.f"], ["task.reward=[auto,evil.f]"],
    ["runtime.temp_dir=elsewhere"], ["runtime.address=1.2.3.4:6379"],
    ["rollout=sglang", "model.path=tiny", "rollout.sglang.urls=[http://evil:1]"],
    ["rollout=sglang", "model.path=tiny", "+rollout.sglang.extra.trust_remote_code=true"],
    ["rollout=sglang", "model.path=tiny", "rollout.sglang.api_key_env=PRIVATE"],
    ["rollout=vllm", "model.path=tiny", "+rollout.vllm.extra.trust_remote_code=true"],
    ["rollout=vllm", "model.path=tiny", "rollout.vllm.folder=elsewhere"],
]  # fmt: skip


# Quick: code, said to be trusted by the folder itself; a server that is sent prompts; arguments of another program.
@pytest.mark.slow
@pytest.mark.parametrize("changed", slow_but([CHANGED[1], CHANGED[5], CHANGED[8]], CHANGED), ids=str)
def test_changed_settings_make_a_mark_void(tmp_path: Path, changed: list[str]) -> None:
    path = begun(tmp_path / "run")
    resume(path)
    (path / OVERRIDES).write_text(json.dumps(changed))
    with pytest.raises(UserError, match="is not a run that you began here"):
        resume(path)


@pytest.mark.slow
def test_what_needs_no_trust(tmp_path: Path, someone_else: Callable[[], None]) -> None:
    path = begun(tmp_path / "run", "task.reward=math_verify", "trainer.lr=1e-4", "decoding=target_only")
    someone_else()
    resume(path)
    resume(path, "trainer.steps=9")
    (path / OVERRIDES).unlink()
    resume(path)


def test_the_reward_of_an_evaluation_needs_trust(tmp_path: Path, code: Path, someone_else: Callable[[], None]) -> None:
    path = begun(tmp_path / "run", "evaluation.every=1", f"evaluation.task.reward={code}:reward")
    someone_else()
    with pytest.raises(UserError, match=r"it would import and run evaluation\.task\.reward="):
        resume(path)
    assert not (tmp_path / "ran").exists()


def test_an_adaptation_asks_too(
    tmp_path: Path, code: Path, someone_else: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [f"task.reward={code}:reward", f"out={tmp_path}/elsewhere"]
    path = tmp_path / "run"
    path.mkdir()
    write_down(adapt_config(asked), asked, path)
    someone_else()
    with ended(adapt.main, [f"dir={path}", "resume=true"], capsys) as (exit_code, _out, lines):
        assert exit_code == 2 and len(lines) == 1 and "import and run task.reward=" in lines[0]
        assert f"; write to out='{tmp_path}/elsewhere': look at" in lines[0]
    assert not (tmp_path / "ran").exists()


def test_a_mark_is_of_the_settings_of_before_or_of_now(tmp_path: Path) -> None:
    """The process may end between the two writes; and no third text is ever taken."""
    path = begun(tmp_path / "run")
    first = (path / OVERRIDES).read_text()
    sign(path, "second")
    assert own(path)
    (path / OVERRIDES).write_text("second")
    assert own(path)
    sign(path, "third")
    assert own(path)
    (path / OVERRIDES).write_text(first)
    assert not own(path)


def test_a_key_that_others_can_read_or_a_broken_mark_is_none(tmp_path: Path, other_home: Path) -> None:
    path = begun(tmp_path / "run")
    key = other_home / "bebop" / "origin.key"
    assert own(path) and key.stat().st_mode & 0o777 == 0o600 and len(list(key.parent.iterdir())) == 1
    for text in ("", "{}", "[]", '{"marks": 3}', '{"marks": [1, null, "ü"]}', "[" * 10_000):
        good = (path / ORIGIN).read_text()
        (path / ORIGIN).write_text(text)
        assert not own(path)
        (path / ORIGIN).write_text(good)
    key.chmod(0o644)
    assert not own(path)
    key.chmod(0o600)
    assert own(path)
    key.write_bytes(b"short")
    assert not own(path)


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_home_that_cannot_be_written_makes_no_marks(tmp_path: Path, other_home: Path) -> None:
    other_home.chmod(0o500)
    assert not own(begun(tmp_path / "run"))


def test_looking_at_a_foreign_folder_runs_nothing(
    tmp_path: Path, code: Path, someone_else: Callable[[], None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = begun(tmp_path / "run", f"task.reward={code}:reward")
    (path / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    evil = f"evil: !!python/object/apply:builtins.open [{tmp_path / 'ran'}, w]\n"
    (path / "config.yaml").write_text((path / "config.yaml").read_text() + evil)
    someone_else()
    with ended(report.main, [str(path)], capsys) as (exit_code, _out, _lines):
        assert exit_code in (0, 2)
    assert Folder(path=path, name="run").state == "ended"
    assert not (tmp_path / "ran").exists()


def test_every_setting_that_reaches_out_exists() -> None:
    known = {setting.name for config in (JobConfig, AdaptConfig) for setting in settings(config)}
    known |= {f"evaluation.{name}" for name in known if name.startswith("task.")}  # what evaluation.task may hold
    assert set(REACHING) <= known


@pytest.mark.parametrize("kind", ["llama", "evil"])
def test_code_in_a_model_folder_is_not_imported(
    tmp_path: Path, code: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where somebody at the terminal would say yes."""
    monkeypatch.setattr("builtins.input", lambda _: "y")
    folder = tmp_path / "model"
    folder.mkdir()
    names = {"AutoConfig": "reward.Config", "AutoModelForCausalLM": "reward.Model"}
    (folder / "config.json").write_text(json.dumps({"model_type": kind, "auto_map": names}))
    shutil.copy(code, folder / "reward.py")
    with pytest.raises(UserError, match="cannot be loaded"):
        check_model(ModelConfig(path=str(folder), device="cpu"))
    assert not (tmp_path / "ran").exists()
