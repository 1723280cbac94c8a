"""The tutorial does what it says: its files are written and its jobs run in order, on the built-in model."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import HANGING
from tests.documents.commands import check, commands
from tests.documents.pages import blocks
from tests.tree import ROOT

SMALL = ("trainer.groups_per_step=2", "trainer.group_size=4")  # behind a job's own words, so that it takes seconds
# Those that take minutes are composed only: tests/test_adapt.py and tests/certify/ run them.
COMPOSED = ("bebop.adapt", "bebop.certify")


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
    assert set(done) == {"bebop.run", "bebop.report", "bebop.view", *COMPOSED}
    steps = (tmp_path / "RUN/metrics.jsonl").read_text().splitlines()
    assert len(steps) == 6  # those of the first command, and those after the resume
    assert (tmp_path / "RUN/report.html").is_file()


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
    if module in COMPOSED:
        check(["python", "-m", module, *arguments], folder)
        return
    small = SMALL if module == "bebop.run" and "runtime.resume=true" not in arguments else ()
    run([*command, *small], folder)


def run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env=variables(), capture_output=True, text=True, timeout=HANGING, check=False
    )
    assert done.returncode == 0, f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"


def variables() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
