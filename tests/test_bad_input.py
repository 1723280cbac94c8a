"""Whatever is wrong on a command line ends in one line and exit code 2, and leaves nothing on the disk.

Every command has its table: arguments, and what the line must name. ``{here}`` is the working folder, which holds what
``world`` puts there.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bebop import adapt, run
from bebop.bench import __main__ as bench
from bebop.certify import __main__ as certify
from bebop.dashboards import __main__ as dashboards
from bebop.model.checkpoint import resolve
from bebop.report import __main__ as report
from bebop.view import __main__ as view
from recipes.reproduce import __main__ as reproduce
from recipes.tiny import __main__ as tiny
from tests.commands import error_of, on_disk
from tests.mistakes import ALL

COMMANDS = {
    "run": run.main, "adapt": adapt.main, "bench": bench.main, "report": report.main,
    "dashboards": dashboards.main, "reproduce": reproduce.main, "tiny": tiny.main, "certify": certify.main,
    "view": view.main,
}  # fmt: skip

QUICK = 10  # one in so many belongs to the quick tests
TABLE = [
    pytest.param(command, given, names, id=f"{command} {given[:60]}", marks=[pytest.mark.slow] if i % QUICK else [])
    for i, (command, given, names) in enumerate(ALL)
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with files and models that are wrong, each in its way."""
    here = tmp_path_factory.mktemp("bad") / "here"
    here.mkdir()
    for name, text in {
        "rows.txt": "text\n",
        "rows.jsonl": '{"question": "1+1", "answer": "2"}\n',
        "empty.jsonl": "",
        "torn.jsonl": '{"question": "1+',
        "torn.parquet": "PAR1",
        "reward.py": "def f(text, item):\n    return 0.0\n",
        "raises.py": "raise RuntimeError('no')\n",
    }.items():
        (here / name).write_text(text)
    (here / "used").mkdir()
    (here / "used" / "metrics.jsonl").write_text('{"step": 1}\n')
    (here / "garbled").mkdir()
    (here / "garbled" / "metrics.jsonl").write_text("nonsense\n{}\n")
    for name, file, text in (
        ("untraced", "config.yaml", "monitor:\n  trace: 'off'\n"),
        ("damaged", "trajectories.sqlite", "nonsense\n" * 500),
    ):
        (here / name).mkdir()
        (here / name / file).write_text(text)
    (here / "empty").mkdir()
    for name in ("torn", "headless", "strange", "unread", "wordless", "large"):
        shutil.copytree(resolve("tiny"), here / name)
    weights = here / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    without_head(here / "headless" / "model.safetensors")
    change(here / "strange" / "config.json", model_type="warp")
    (here / "unread" / "config.json").write_text("{")
    for file in (here / "wordless").glob("tokenizer*"):
        file.unlink()
    change(here / "large" / "config.json", vocab_size=4)
    return here


def without_head(file: Path) -> None:
    """Leave out the weights of the MTP head."""
    from safetensors.torch import load_file, save_file

    save_file({k: v for k, v in load_file(file).items() if "mtp" not in k}, file, metadata={"format": "pt"})


def change(file: Path, **values: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A port that is taken."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield taken.getsockname()[1]


@pytest.mark.parametrize(("command", "given", "names"), TABLE)
def test_a_mistake_is_one_line_and_nothing_is_written(
    command: str, given: str, names: str, world: Path, port: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    temp = tmp_path / "temp"
    temp.mkdir()
    monkeypatch.chdir(world)
    monkeypatch.setenv("TMPDIR", str(temp))
    monkeypatch.setattr(tempfile, "tempdir", None)
    filled = {"here": str(world), "port": str(port), "tiny": str(resolve("tiny"))}
    for name, value in filled.items():
        given, names = given.replace("{" + name + "}", value), names.replace("{" + name + "}", value)
    before = on_disk(world) | on_disk(temp)
    line = error_of(COMMANDS[command], given.split(), capsys)
    assert names in line and "Traceback" not in line, line
    assert on_disk(world) | on_disk(temp) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "given"),
    [
        ("bebop.run", "rollout.max_length=1000000"),
        ("bebop.adapt", "head.objective=xyz"),
        ("bebop.certify", "engine.name=sglang"),
        ("bebop.bench", "rollout --batches 0"),
        ("bebop.report", "missing"),
        ("bebop.dashboards", "--staleness -1"),
        ("bebop.view", "missing"),
        ("recipes.reproduce", "--fast"),
        ("recipes.reproduce.boundary", "--fast"),
        ("recipes.tiny", "--steps 0"),
    ],
)
def test_as_a_process_of_its_own(module: str, given: str, tmp_path: Path) -> None:
    """With whatever its imports print and leave behind."""
    (tmp_path / "temp").mkdir()
    root = str(Path(__file__).resolve().parents[1])
    environment = os.environ | {"TMPDIR": str(tmp_path / "temp"), "PYTHONPATH": root}
    command = [sys.executable, "-m", module, *given.split()]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: "), done.stderr
    assert list(on_disk(tmp_path)) == [str(tmp_path / "temp")]
