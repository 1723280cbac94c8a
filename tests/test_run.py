"""Mistakes on the command line end in one readable line and exit code 2, before Ray is started.

Most of them are in ``tests/bad_input``.
"""

import json
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from bebop import run
from bebop.config import compose
from bebop.rollout.engines import ENGINES
from tests.cases import slow_but
from tests.commands import HANGING, error_of
from tests.tiny_families import write_family


def only_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    line = error_of(run.main, arguments, capsys)
    ray = sys.modules.get("ray")
    assert ray is None or not ray.is_initialized()
    return line


def test_a_resume_that_finds_nothing_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = only_line(["runtime.resume=true", f"runtime.dir={tmp_path}/run"], capsys)
    assert line == f"runtime.resume=true: {tmp_path}/run holds no finished checkpoint"


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

    assert error_of(fails, [], capsys) == "first second"


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
    (
        "bebop.run_dir.identity, bebop.runtime.preflight, bebop.runtime.job, bebop.report.page",
        (*LIBRARIES, *MODEL_CODE),
    ),
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


@pytest.mark.slow  # a family's import
@pytest.mark.parametrize(
    ("engine", "message"),
    [
        ("torch", "layer_types linear_attention is not possible: full_attention is; bebop.adapt trains its MTP head, "),
        ("sglang", "rollout=sglang needs SGLang"),
        ("vllm", "rollout=vllm needs vLLM"),
    ],
)
def test_a_hybrid_is_refused_by_the_embedded_engine_and_by_no_server(
    engine: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes next is the engine's own check: that it is installed."""
    for module in (builder_of("sglang"), builder_of("vllm")):
        monkeypatch.setattr(module, "find_spec", lambda name: None)
    folder = write_family(tmp_path / "in", "qwen3_next")
    given = [f"rollout={engine}", f"model.path={folder}", "model.device=cpu", f"runtime.dir={tmp_path / 'run'}"]
    given += ["rollout.max_length=256", "rollout.sampling.max_new_tokens=64"]
    assert message in only_line(given, capsys)


def builder_of(engine: str) -> ModuleType:
    return import_module(ENGINES[engine])
