"""What the disk refuses is one line that names the place and what to do, whoever was writing."""

import errno
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from bebop.command import check_writable, run_main, writing
from bebop.errors import UserError
from bebop.metrics.sinks import JsonlSink, StepLog, TensorBoardSink
from bebop.report.page import write_report
from bebop.run_dir import state_codec as codec


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """No file of this process may grow beyond ``size`` bytes: as a full disk does, write(2) writes a part and fails."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def metrics(folder: Path) -> None:
    sink = JsonlSink(folder / "metrics.jsonl")
    for step in range(1, 1000):
        sink.write(step, {"reward/mean": 0.5})


def other_steps(folder: Path) -> None:
    log = StepLog(folder / "drift.jsonl")
    for step in range(1, 1000):
        log.write({"step": step, "why": "x" * 50})


def tensorboard(folder: Path) -> None:
    sink = TensorBoardSink(folder / "tensorboard")
    for step in range(1, 1000):
        sink.write(step, {"reward/mean": 0.5})


def page(folder: Path) -> None:
    (folder / "metrics.jsonl").write_text('{"step": 1, "reward/mean": 0.5}\n')
    write_report([folder])


def weights(folder: Path) -> None:
    with writing(folder / "model"):
        save_file({"weight": torch.zeros(10_000)}, folder / "model")


def optimizer(folder: Path) -> None:
    with writing(folder / "trainer.pt"):  # torch's own format: verl's checkpoints
        torch.save({"weight": torch.zeros(10_000)}, folder / "trainer.pt")


def state(folder: Path) -> None:
    with writing(folder / "trainer"):
        codec.save({"weight": torch.zeros(10_000)}, folder / "trainer")


@pytest.mark.parametrize("write", [metrics, other_steps, tensorboard, page, weights, optimizer, state])
def test_every_writer_says_where_and_what_to_do(
    write: Callable[[Path], None], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with at_most(4000), pytest.raises(UserError, match=f"^'{tmp_path}/.*' cannot be written: ") as caught:
        write(tmp_path)
    assert "; raise the limit" in str(caught.value) or write is optimizer  # torch does not say why it failed
    assert "Traceback" not in capfd.readouterr().err


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "may write"), (errno.EACCES, "may write")],
)
def test_the_last_resort_is_one_line_too(number: int, advice: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main(arguments: list[str]) -> int:
        raise OSError(number, "so it is", "some/file")

    with pytest.raises(SystemExit, match="2"):
        run_main(main, [])
    shown = capsys.readouterr().err
    assert shown.startswith("error: 'some/file' cannot be written: so it is; ") and advice in shown
    assert shown.count("\n") == 1


def test_other_errors_of_the_system_are_no_users_mistake() -> None:
    def main(arguments: list[str]) -> int:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "refused")

    with pytest.raises(ConnectionRefusedError):
        run_main(main, [])
    with pytest.raises(RuntimeError, match="ours"), writing("x"):
        raise RuntimeError("ours")


def test_a_folder_is_judged_without_being_made(tmp_path: Path) -> None:
    check_writable("dir", tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    for bad in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / ("x" * 300)):
        with pytest.raises(UserError, match=r"^dir='.*' cannot be made: "):
            check_writable("dir", bad)
