"""One process at a time writes into a run folder, and a run goes on only as what it began as. Real processes."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from bebop import adapt
from bebop.config import compose
from bebop.config.adapt import AdaptConfig
from bebop.config.compose import adapt_config, job_config, write_down
from bebop.config.fields import plain, resume_refusals, settings
from bebop.config.job import EvaluationConfig, JobConfig, ModelConfig
from bebop.errors import UserError
from bebop.model.checkpoint import save_policy
from bebop.run import choose_folder
from bebop.run_dir import state_codec as codec
from bebop.run_dir.checkpoints import STEPS, Store, seal
from bebop.run_dir.folder import RunFolder
from bebop.run_dir.identity import identity, job_identity
from tests.builders import bare_policy, letters
from tests.cases import slow_but
from tests.commands import HANGING

ROOT = Path(__file__).parents[2]
# Holds a folder; so do, were they to inherit the lock, a program that it starts and a child that it forks.
HOLDER = """
import os, subprocess, sys, time
from pathlib import Path
from bebop.run_dir.folder import RunFolder
from bebop.run_dir.checkpoints import STEPS, Store
path = Path(sys.argv[1])
folder = RunFolder(path, "runtime.dir", False, Store(path, STEPS))
folder.open()
program = subprocess.Popen(["sleep", "60"], close_fds=False)
child = os.fork()
if child == 0:
    time.sleep(60)
    os._exit(0)
print(program.pid, child, flush=True)
time.sleep(60)
"""


def hold(path: Path) -> tuple["subprocess.Popen[str]", list[int]]:
    """A process that has the folder, and its children."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, [int(pid) for pid in process.stdout.readline().split()]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
def test_the_second_process_gets_one_line_and_a_killed_holder_lets_go_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run"
    holder, children = hold(path)
    try:
        for module, setting in (("bebop.run", "runtime.dir"), ("bebop.adapt", "dir")):
            command = [sys.executable, "-m", module, f"{setting}={path}"]
            done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANGING, check=False)
            assert done.returncode == 2, done.stderr
            (line,) = done.stderr.splitlines()
            assert line.startswith(f"error: {setting}='{path}' is in use by process {holder.pid} on ")
        assert sorted(p.name for p in path.iterdir()) == [".lock", "machine.json"]
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
        assert all(map(alive, children)), "they outlive it"
        again = RunFolder(path, "runtime.dir", False, Store(path, STEPS))
        again.open()
        with pytest.raises(UserError, match=f"in use by process {os.getpid()} on"):
            RunFolder(path, "dir", False, Store(path, STEPS)).open()
        again.close()
        last = RunFolder(path, "dir", False, Store(path, STEPS))
        last.open()
        last.close()
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        holder.kill()
        holder.wait()


def test_a_folder_whose_lock_cannot_be_opened_is_one_line(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(UserError, match="cannot be written to: Is a directory"):
        RunFolder(tmp_path, "dir", False, Store(tmp_path, STEPS)).open()


# ---- what may change


def other(value: Any) -> Any:
    """Return another value."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, list):
        return [*value, "x"]
    return {**value, "x": 1} if isinstance(value, dict) else f"{value}x"


@pytest.mark.parametrize("cls", [JobConfig, AdaptConfig])
def test_a_fixed_setting_and_no_other_is_refused_with_its_reason(cls: type) -> None:
    config = cls()
    for one in settings(cls):
        before = plain(config)
        *path, last = one.name.split(".")
        at = before
        for part in path:
            at = at[part]
        now, at[last] = at[last], other(at[last])
        refusal = f"{one.name} cannot change from {at[last]!r} to {now!r} in a run ({one.fixed})"
        assert resume_refusals(before, config) == ([refusal] if one.fixed else [])
        del at[last]
        assert resume_refusals(before, config) == [], "a setting that the stored configuration lacks is not compared"


CHANGES = [
    (["trainer.group_size=4"], "trainer.group_size cannot change from 8 to 4 in a run (finished groups"),
    (["task=lcm"], "task.name cannot change from 'gcd' to 'lcm' in a run (questions are known by their numbers"),
    (["task.seed=1"], "task.seed cannot change from 0 to 1"),
    (["task.size=64"], "task.size cannot change from None to 64"),
    (["algorithm.clip_high=.3"], "algorithm.clip_high cannot change from 0.28 to 0.3 in a run (it would be another"),
    (["rollout.engine=sglang"], "rollout.engine cannot change from 'torch' to 'sglang' in a run (log-probs"),
    (["model.dtype=bfloat16"], "model.dtype cannot change from 'float32' to 'bfloat16' in a run"),
    (["rollout.sampling.temperature=.7"], "rollout.sampling.temperature cannot change from 1.0 to 0.7"),
    (["runtime.seed=3"], "runtime.seed cannot change from 0 to 3"),
]
FREE = ["trainer.lr=1", "trainer.steps=99", "rollout.workers=3", "decoding.draft_tokens=5", "monitor.plots=false"]


def begun(path: Path, *overrides: str) -> Path:
    """A run folder as a run leaves it, with an (empty) checkpoint."""
    store = Store(path, STEPS)
    staged = store.staging(1)
    staged.mkdir(parents=True)
    seal(staged)
    store.publish(staged, 1)
    write_down(job_config(overrides), overrides, path, "runtime.")
    return path


def resumed(path: Path, *overrides: str) -> None:
    config = job_config(
        compose.resumed_overrides([f"runtime.dir={path}", "runtime.resume=true", *overrides], "config", "runtime.")
    )
    folder, config = choose_folder(config)
    try:
        folder.check(config)
        folder.identify(job_identity(config))
    finally:
        folder.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "line"),
    slow_but(CHANGES[:2], CHANGES, several=True),
    ids=lambda v: v[0] if isinstance(v, list) else "",
)
def test_a_run_does_not_go_on_as_another(overrides: list[str], line: str, tmp_path: Path) -> None:
    path = begun(tmp_path, "task=gcd", "trainer.lr=.5")
    resumed(path, *FREE)
    with pytest.raises(UserError) as caught:
        resumed(path, *overrides)
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)
    assert "leave it as it was, or start a new run with another runtime.dir" in str(caught.value)


def test_without_knowing_how_it_began_a_run_does_not_go_on(tmp_path: Path) -> None:
    path = begun(tmp_path)
    (path / "config.yaml").write_text("model: {\n")
    with pytest.raises(UserError, match=r"config.yaml is no configuration"):
        resumed(path)
    (path / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"config.yaml is missing"):
        resumed(path)


def changed(folder: Path, what: str) -> None:
    """One part of a model's folder becomes another."""
    if what == "tokenizer":
        letters(30).save_pretrained(folder)
    elif what == "architecture":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    else:
        state = load_file(folder / "model.safetensors")
        name = next(name for name in state if ("mtp" in name) == (what == "head") and state[name].ndim == 2)
        state[name] = state[name] + 1
        save_file(state, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("what", "told"),
    slow_but(
        [("tokenizer", "the tokenizer"), ("head", "the weights")],
        [("tokenizer", "the tokenizer"), ("architecture", "the architecture"), ("head", "the weights"),
         ("backbone", "the weights")],
        several=True,
    ),
)  # fmt: skip
def test_a_model_may_move_but_not_change(what: str, told: str, tmp_path: Path) -> None:
    model, moved = tmp_path / "model", tmp_path / "moved"
    save_policy(bare_policy(), model)
    path = begun(tmp_path / "run", f"model.path={model}")
    folder = RunFolder(path, "runtime.dir", True, Store(path, STEPS))
    folder.identify(identity(ModelConfig(path=str(model)), {}))
    folder.open()
    folder.close()
    model.rename(moved)
    resumed(path, f"model.path={moved}")
    changed(moved, what)
    with pytest.raises(UserError, match=f"{told}.* in model.path is not the one that the run in .* began with"):
        resumed(path, f"model.path={moved}")


def test_a_file_of_questions_may_move_but_not_change(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_text("x")
    mark = identity(ModelConfig(), {"task.path": str(first)})
    first.rename(second)
    assert identity(ModelConfig(), {"task.path": str(second)}) == mark
    second.write_text("y")
    now = identity(ModelConfig(), {"task.path": str(second), "data.path": None})
    assert {name for name in mark if mark[name] != now[name]} == {"the file task.path"} and mark.keys() == now.keys()


def identified(path: Path, *overrides: str) -> None:
    """The folder of a run as the run leaves it, after its start or a resume."""
    resume = (path / "config.yaml").is_file()
    folder = RunFolder(path, "runtime.dir", resume, Store(path, STEPS))
    folder.identify(job_identity(job_config(overrides)))
    folder.open()
    folder.close()
    if not resume:
        begun(path, *overrides)


@pytest.mark.slow
def test_held_out_questions_stay_those_of_a_file_or_generated(tmp_path: Path) -> None:
    """Also after a resume without evaluations; evaluations that are new in a resume are of either kind."""
    file = tmp_path / "test.jsonl"
    file.write_text('{"question": "1 + 1", "answer": "2"}')
    evaluated, of_a_file = "evaluation.every=2", f"evaluation.path={file}"
    for name, before, after in (("a", [evaluated], of_a_file), ("b", [evaluated, of_a_file], "evaluation.path=null")):
        identified(tmp_path / name, *before)
        resumed(tmp_path / name, "evaluation.every=3")
        identified(tmp_path / name, "evaluation.every=0")
        with pytest.raises(UserError, match=r"the file evaluation\.path is not the one that the run in .* began with"):
            resumed(tmp_path / name, after)
    for after in ([evaluated], [evaluated, of_a_file]):
        identified(tmp_path / "c")
        resumed(tmp_path / "c", *after)


def test_the_file_of_a_held_out_task_may_not_change(tmp_path: Path) -> None:
    file = tmp_path / "test.jsonl"
    file.touch()
    config = JobConfig(evaluation=EvaluationConfig(every=2, task={"source": "file", "path": str(file)}))
    marks = []
    for text in ("x", "y"):
        file.write_text(text)
        marks.append(job_identity(config))
    assert {name for name in marks[0] if marks[0][name] != marks[1][name]} == {"the file evaluation.task.path"}
    assert "the file evaluation.path" not in marks[0]  # which earlier versions called generated: they still resume


def test_what_an_earlier_start_left_does_not_bind_a_new_run(tmp_path: Path) -> None:
    """Its folder may be used again as long as it holds no step."""
    (tmp_path / "identity.json").write_text('{"the file evaluation.path": "another"}')
    identified(tmp_path, "evaluation.every=2")
    resumed(tmp_path)
    assert json.loads((tmp_path / "identity.json").read_text())["the file evaluation.path"] == "generated"


@pytest.mark.slow
def test_an_adaptation_does_not_go_on_as_another(tmp_path: Path) -> None:
    store = Store(tmp_path, "head_")
    staged = store.staging(1)
    staged.mkdir(parents=True)
    codec.save({}, staged / "head")
    seal(staged)
    store.publish(staged, 1)
    overrides = ["task=gcd", "head.lr=.5"]
    write_down(adapt_config(overrides), overrides, tmp_path)
    for new, line in (
        ("task=lcm", "task.name cannot change from 'gcd' to 'lcm'"),
        ("head.objective=kl", "head.objective cannot change from 'e2e_tv' to 'kl'"),
        ("data.sequences=5", "data.sequences cannot change from 1200 to 5"),
    ):
        with pytest.raises(UserError, match=line):
            adapt.main([f"dir='{tmp_path}'", "++resume=True", new])


def test_a_second_resume_of_the_same_folder_waits_for_nobody(tmp_path: Path) -> None:
    """The lock is taken at the first look where the file is there: nothing changes between look and start."""
    path = begun(tmp_path)
    first = RunFolder(path, "runtime.dir", True, Store(path, STEPS))
    first.open()
    with pytest.raises(UserError, match="is in use by process"):
        resumed(path)
    first.close()
    resumed(path)
