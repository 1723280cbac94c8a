"""How a real run ends when it is interrupted, fails or fills the disk: what it says, what it leaves behind."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bebop.runtime.processes import descendants, lives
from bebop.trainer import checkpoint
from tests.commands import HANGING
from tests.test_job import SMALL, pids, wait_for_step

pytestmark = pytest.mark.slow


@pytest.fixture
def temp() -> Iterator[Path]:
    """A temporary folder with a name short enough for Ray's sockets, which pytest's own is not."""
    with tempfile.TemporaryDirectory(prefix="b") as folder:
        yield Path(folder)


def start(folder: Path, temp: Path, *overrides: str, limit: int | None = None) -> subprocess.Popen[str]:
    """A run with a temporary folder of its own; ``limit``: KiB that it may write into one file."""
    command = [sys.executable, "-m", "bebop.run", f"runtime.dir={folder}", *SMALL, *overrides]
    if limit is not None:
        command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "run", *command]
    environment = os.environ | {"TMPDIR": str(temp)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # which torch sets where it is imported, so in this process too
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True, env=environment)


def outcome(process: subprocess.Popen[str]) -> tuple[int, list[str]]:
    """Exit code and the lines of stderr that are no progress."""
    _, errors = process.communicate(timeout=HANGING)
    return process.returncode, [line for line in errors.splitlines() if not line.startswith("step ")]


def open_to_others(folder: Path) -> list[str]:
    """What anybody may write to, sockets and links aside, whose own modes mean nothing below a closed folder."""
    found = [Path(place, name) for place, folders, files in os.walk(folder) for name in (*folders, *files)]
    return [str(p) for p in found if not p.is_symlink() and not p.is_socket() and p.stat().st_mode & 0o002]


def gone(processes: list[int]) -> bool:
    """Whether all of them end within ten seconds."""
    deadline = time.time() + 10
    while any(map(lives, processes)) and time.time() < deadline:
        time.sleep(0.1)
    return not any(map(lives, processes))


def test_a_second_interrupt_ends_at_once_without_a_word_too_many(tmp_path: Path, temp: Path) -> None:
    run = start(tmp_path / "run", temp, "trainer.steps=50")
    wait_for_step(tmp_path / "run", 1, run)
    others = descendants(run.pid)
    assert set(pids(tmp_path / "run", "trainer")) <= set(others) and len(others) > 4
    os.killpg(run.pid, signal.SIGINT)
    time.sleep(0.05)
    os.killpg(run.pid, signal.SIGINT)
    code, lines = outcome(run)
    assert code == 130
    assert [line for line in lines if not line.startswith(("run folder: ", "  ", "bebop.runtime.job: stopping"))] == [
        "interrupted"
    ]
    assert gone(others)
    assert list(temp.iterdir()) == []


@pytest.mark.exhaustive("starts a job; the other exit paths of this file are slow tests")
@pytest.mark.parametrize("seconds", [1.0, 4.0])
def test_an_interrupt_before_the_first_step_leaves_nothing(seconds: float, tmp_path: Path, temp: Path) -> None:
    """While modules are imported, checks are made and Ray comes up."""
    run = start(tmp_path / "run", temp)
    time.sleep(seconds)
    others = descendants(run.pid)
    os.killpg(run.pid, signal.SIGINT)
    time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)
    code, lines = outcome(run)
    assert code == 130 and not any("Traceback" in line for line in lines), lines
    assert gone(others)
    assert list(temp.iterdir()) == []


def test_nothing_stays_in_the_temporary_folder_and_nothing_is_open_to_others(tmp_path: Path, temp: Path) -> None:
    run = start(tmp_path / "run", temp, "trainer.steps=2", "monitor.ray_metrics=true", "monitor.tensorboard=true")
    wait_for_step(tmp_path / "run", 1, run)
    assert [oct(p.stat().st_mode & 0o777) for p in temp.iterdir()] == ["0o700"]
    assert open_to_others(temp) == []
    code, lines = outcome(run)
    assert code == 0, lines
    assert list(temp.iterdir()) == []


@pytest.mark.exhaustive("starts a job; the other exit paths of this file are slow tests")
def test_a_part_that_does_not_start_leaves_nothing(tmp_path: Path, temp: Path) -> None:
    """Its reward can be imported once, when it is checked, and not once more for the worker."""
    (tmp_path / "reward.py").write_text(
        "from pathlib import Path\n"
        "Path(__file__).with_suffix('.imported').touch(exist_ok=False)\n"
        "def reward(text, item):\n    return 0.0\n"
    )
    run = start(tmp_path / "run", temp, f"task.reward={tmp_path}/reward.py:reward")
    code, lines = outcome(run)
    assert code == 2 and len(lines) == 1 and lines[0].startswith("error: task.reward="), lines
    assert not (tmp_path / "run").exists()
    assert list(temp.iterdir()) == []


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[Path]:
    """A real file system of that size."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "none", folder], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_a_disk_that_fills_up_keeps_earlier_checkpoints(tmp_path: Path, temp: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        settings = ("trainer.steps=9", "trainer.save_every=1", "trainer.keep=9")
        run = start(disk / "run", temp, *settings)
        code, lines = outcome(run)
        assert code == 2
        errors = [line for line in lines if not line.startswith(("run folder: ", "  "))]
        assert len(errors) == 1 and errors[0].startswith(f"error: '{disk}/run/checkpoints/"), errors
        assert "cannot be written: No space left on device; free some space" in errors[0]
        newest = checkpoint.store(disk / "run").newest_sound()
        assert newest is not None
    assert list(temp.iterdir()) == []


@pytest.mark.exhaustive("starts a job; the other exit paths of this file are slow tests")
@pytest.mark.parametrize("kib", [2000, 1 << 20])
def test_a_limit_on_the_size_of_files_is_told_before_ray_fails_over_it(kib: int, tmp_path: Path, temp: Path) -> None:
    """Ray waits half a minute for a store that cannot be made, and says that it may be overloaded."""
    run = start(tmp_path / "run", temp, "trainer.steps=2", limit=kib)
    code, lines = outcome(run)
    assert code == 2 and len(lines) == 1, lines
    assert lines[0].startswith(f"error: files of at most {kib} KiB (ulimit -f) are too small for Ray"), lines
    assert not (tmp_path / "run").exists()
    assert list(temp.iterdir()) == []
