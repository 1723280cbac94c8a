"""Mistakes on the command line end in one readable line and exit code 2, before Ray is started."""

import json
import logging
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from bebop import command, compose, run
from tests.cases import slow_but
from tests.commands import HANGING

BAD = [
    (["trainer.foo=1"], r"trainer.foo: no such setting; trainer has ranks, threads"),
    (
        ["trainer.group_sze=1"],
        r"trainer.group_sze: no such setting; did you mean trainer.group_size? trainer has ranks",
    ),
    (["trainer.top_k=1"], r"trainer.top_k: no such setting; did you mean rollout.sampling.top_k? trainer has ranks"),
    (["modl.pth=x"], r"modl.pth: no such setting; did you mean model.path? the groups are model, task"),
    (["task.path=x"], r"task.path: no such setting; it goes with task=file"),
    (["+trainer.setps=1"], r"trainer.setps=1 is not possible: no such setting; did you mean trainer.steps? there are"),
    (["nonsense=1"], r"nonsense: no such setting; the groups are model, task"),
    (["nonsense.x=1"], r"nonsense.x: no such setting; the groups are model, task"),
    (["trainer.lr.x=1"], r"trainer.lr.x: no such setting; trainer.lr is a single value"),
    (["task.args.terms=1"], r"task.args.terms: no such setting; did you mean task.args.min_terms? task.args has"),
    (["+trainer.foo=1"], r"trainer.foo=1 is not possible: no such setting; there are ranks"),
    (["task=nonsense"], r"task=nonsense is not possible: choose one of chain_sum, environment, file"),
    (["trainer=5"], r"trainer=5 is not possible: choose one of default"),
    (["trainer@here=default"], r"trainer@here=default is not possible: a group stays"),
    (["foo"], r"'foo' cannot be read: give GROUP=CHOICE or GROUP.NAME=VALUE"),
    (["trainer.lr={"], r"'trainer.lr={' cannot be read: give GROUP=CHOICE"),
    (["=3"], r"'=3' cannot be read: there is no name"),
    (["trainer.lr="], r"trainer.lr='' is not possible: a number is wanted here"),
    (["trainer.steps=1,2"], r"trainer.steps=1,2 is not possible: give one value"),
    (["task=gcd", "trainer.lr=${nope}"], r"trainer.lr=${nope} is not possible: Interpolation key 'nope' not found"),
    (["model=folder"], r"model.path is missing: give model.path=VALUE"),
    (["model=folder", "model.path=missing"], r"model.path='missing' is not possible: give tiny, smollm2 or a folder"),
    (["task=file"], r"task.path=None is not possible: source=file needs a .jsonl or .parquet file"),
    (["task=file", "task.path=missing.jsonl"], r"task.path='missing.jsonl' is not possible: there is no such file"),
    (["rollout.staleness=-1"], r"rollout.staleness=-1 is not possible: give 0 (synchronous) or more"),
    (["rollout.sampling.top_p=1.5"], r"rollout.sampling.top_p=1.5 is not possible: give a number above 0 and at most"),
    (["trainer.group_size=1"], r"trainer.group_size=1 is not possible: GRPO compares answers: give 2 or more"),
    (["decoding.system=warp"], r"decoding.system='warp' is not possible: choose one of autoregressive, target_only"),
    (["decoding.draft_tokens=0"], r"decoding.draft_tokens=0 is not possible: give 1 to 16 with decoding.system=bebop"),
    (["task.name=warp"], r"task.name='warp': reasoning-gym has no such data set"),
    (["task.reward=no.such.function"], r"task.reward='no.such.function' cannot be imported"),
    (["runtime.resume=true"], r"HOLDS"),
    (["--config"], r"--config is no option: there are --help, --cfg and --trust"),
]  # the second of each pair is how the line goes on after "error: "; ".*" stands for anything


def call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Exit code and stderr lines of ``run_main(run.main)`` in this process; Ray must not have been started by it."""
    argv, handlers, filters = sys.argv, list(logging.root.handlers), list(warnings.filters)
    sys.argv = ["bebop.run", *arguments]
    capsys.readouterr()
    try:
        with pytest.raises(SystemExit) as ended:
            command.run_main(run.main)
    finally:
        sys.argv, logging.root.handlers[:] = argv, handlers
        warnings.filters[:] = filters  # type: ignore[index]
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized()
    code = ended.value.code
    assert isinstance(code, int)
    return code, capsys.readouterr().err.splitlines()


def only_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    code, lines = call(arguments, capsys)
    # The run folder's name comes before what the job itself finds out.
    lines = [line for line in lines if not line.startswith("run folder: ")]
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: "), lines
    return lines[0].removeprefix("error: ")


# All others are also in tests/bad_input; the resume that finds nothing is here alone.
QUICK = [*BAD[::5], *(case for case in BAD if case[1] == "HOLDS")]


@pytest.mark.parametrize(
    ("overrides", "text"),
    slow_but(QUICK, BAD, several=True),
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_bad_input_is_one_line_and_exit_code_two(
    overrides: list[str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = only_line([*overrides, f"runtime.dir={tmp_path}/run"], capsys)
    if text == "HOLDS":
        assert line == f"runtime.resume=true: {tmp_path}/run holds no finished checkpoint"
        return
    start, _, rest = text.partition(".*")
    assert line.startswith(start) and rest in line
    assert (
        not any(word in line for word in ("hydra.cc", "object_type", "full_key", "struct", "Traceback")) or "${" in text
    )


def test_resuming_needs_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert only_line(["runtime.resume=true"], capsys).startswith("runtime.resume=True is not possible: give the run's")


def test_a_folder_that_holds_a_run_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    line = only_line([f"runtime.dir={tmp_path}", "trainer.steps=2"], capsys)
    assert line.startswith(f"runtime.dir='{tmp_path}' holds a run: set runtime.resume=true")
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_folder_that_cannot_be_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    line = only_line([f"runtime.dir={tmp_path}/file/run"], capsys)
    assert line == f"runtime.dir='{tmp_path}/file/run' cannot be made: Not a directory"


@pytest.mark.slow
def test_a_failed_resume_leaves_what_the_run_was_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistake while resuming must not become what the next resume starts from."""
    asked = json.dumps(["task=gcd", "trainer.lr=3e-4"])
    (tmp_path / "overrides.json").write_text(asked)
    before = compose.as_yaml(compose.job_config(["task=gcd", "trainer.lr=3e-4"]))
    (tmp_path / "config.yaml").write_text(before)
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    resume = [f"runtime.dir={tmp_path}", "runtime.resume=true"]
    assert only_line([*resume, "decoding.system=warp"], capsys).startswith("decoding.system='warp'")
    assert "step_000001/manifest.json is missing" in only_line(resume, capsys)
    assert (tmp_path / "overrides.json").read_text() == asked
    assert (tmp_path / "config.yaml").read_text() == before


def test_help_and_cfg_say_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--help"]) == 0
    text = capsys.readouterr().out
    for group, choices in compose.groups().items():
        assert f"  {group}" in text and all(choice in text for choice in choices if len(choices) > 1)
    assert run.main(["--cfg", "task=gcd", "trainer.lr=0.5"]) == 0
    text = capsys.readouterr().out
    assert "  name: gcd\n" in text and "  lr: 0.5\n" in text


def test_an_error_of_several_lines_is_shown_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    def fails(arguments: list[str]) -> int:
        raise run.UserError("first\n  second")

    with pytest.raises(SystemExit) as ended:
        command.run_main(fails)
    assert ended.value.code == 2 and capsys.readouterr().err == "error: first second\n"


def test_as_a_command(tmp_path: Path) -> None:
    """The whole way once: a process of its own, with whatever its imports print."""
    command = [sys.executable, "-m", "bebop.run", "decoding.draft_tokens=0", f"runtime.dir={tmp_path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("run folder: ")]
    assert done.returncode == 2 and done.stdout == "" and len(lines) == 1
    assert lines[0].startswith("error: decoding.draft_tokens=0 is not possible: give 1 to 16")


# What a process does without, by what it imports when it starts. The command line waits for nothing; the driver of a
# job leaves model code and verifiers to others; a worker imports the verifiers of the task that it is given, no others.
LIBRARIES = ("reasoning_gym", "math_verify", "sympy", "matplotlib", "scipy", "pyarrow", "tensorboard", "triton")
MODEL_CODE = ("transformers.modeling_utils", "torch.distributed.tensor", "torch.distributed.fsdp", "torch._dynamo")
WITHOUT = [
    ("bebop.run", ("torch", "transformers", "ray", "numpy", "plotly", *LIBRARIES)),
    ("bebop.identity, bebop.preflight, bebop.runtime, bebop.report.page", (*LIBRARIES, *MODEL_CODE)),
    ("bebop.rollout.worker, bebop.tasks.procedural", ("ray", "plotly", *LIBRARIES, *MODEL_CODE)),
]


@pytest.mark.parametrize(("modules", "without"), slow_but(WITHOUT[:1], WITHOUT, several=True))
def test_a_process_imports_no_more_than_it_needs(modules: str, without: tuple[str, ...]) -> None:
    """A driver took 17.5 s of processor time with all of them, and 11 without; slow where torch alone takes three."""
    code = f"import sys, {modules}\nprint(*(name for name in {without} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=HANGING, check=True)
    assert done.stdout == "\n"


@pytest.mark.parametrize(("planted", "ends"), [("", 130), ("bebop.command.exec = lambda text: None\n", -signal.SIGINT)])
def test_an_interrupt_within_code_given_as_text_ends_with_130(planted: str, ends: int, tmp_path: Path) -> None:
    """As an import makes dataclasses; the planted variant leaves CPython's mark and dies by the signal."""
    (tmp_path / "job.py").write_text(
        f"import bebop.command\n{planted}"
        "def main(_):\n    exec('raise KeyboardInterrupt')\n"
        "bebop.command.run_main(main)\n"
    )
    done = subprocess.run([sys.executable, "-m", "job"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (ends, "interrupted\n")
