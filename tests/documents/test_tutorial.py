"""The tutorial does what it says: its files are written and its commands run in order, on the built-in model."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import HANGING
from tests.documents.commands import commands
from tests.documents.pages import blocks
from tests.tree import ROOT

# What a command gets behind its own words, so that it takes seconds: fewer steps, questions and tokens.
SHORT = {
    "bebop.run": ["trainer.groups_per_step=2", "trainer.group_size=4"],
    "bebop.adapt": ["data.sequences=24", "train.steps=2", "evaluation.prompts=10"],
    "bebop.certify": ["tokens=400"],
}


@pytest.mark.slow
def test_the_tutorial_runs(tmp_path: Path) -> None:
    (tmp_path / "DIR").symlink_to(ROOT / "bebop/model/tiny")
    done = []
    for block in blocks("tutorial", (ROOT / "docs/tutorial.md").read_text()):
        if block.language == "python":
            file = tmp_path / block.text.splitlines()[0].removeprefix("# ")
            file = file if file.suffix == ".py" else tmp_path / "in_python.py"
            file.write_text(block.text)
            run([sys.executable, file.name], tmp_path)
        elif block.language == "bash":
            for words in commands(block.text):
                assert words[:2] == ["python", "-m"], words
                run_module(words[2], words[3:], tmp_path)
                done.append(words[2])
    assert set(done) == {"bebop.run", "bebop.report", "bebop.view", "bebop.adapt", "bebop.certify"}
    steps = (tmp_path / "RUN/metrics.jsonl").read_text().splitlines()
    assert len(steps) == 6  # those of the first command, and those after the resume
    assert (tmp_path / "RUN/report.html").is_file() and (tmp_path / "HEAD/model/config.json").is_file()


def run_module(module: str, arguments: list[str], folder: Path) -> None:
    command = [sys.executable, "-m", module, *arguments]
    if module == "bebop.view":  # a server: it is asked for its page, and ended
        shown = subprocess.Popen(
            [*command, "--no-browser"], cwd=folder, env=variables(), stdout=subprocess.PIPE, text=True
        )
        try:
            assert shown.stdout is not None and "http://127.0.0.1" in shown.stdout.readline()
        finally:
            shown.terminate()
            shown.wait(HANGING)
        return
    short = [] if "runtime.resume=true" in arguments else SHORT.get(module, [])
    run([*command, *short], folder, allowed=(0, 3) if module == "bebop.certify" else (0,))


def run(command: list[str], folder: Path, allowed: tuple[int, ...] = (0,)) -> None:
    """Run a command. ``allowed``: exit codes; 3 of a certificate is "too few tokens", which were made few here."""
    done = subprocess.run(
        command, cwd=folder, env=variables(), capture_output=True, text=True, timeout=HANGING, check=False
    )
    assert done.returncode in allowed, f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
