import dataclasses
import os
import time
from pathlib import Path

import pytest
import torch

from bebop.bench import kernel_arms, kernel_threads, kernels
from bebop.bench.__main__ import main
from bebop.errors import UserError
from bebop.kernels.draft_losses import LOSSES
from tests.kernels.builders import logits
from tests.kernels.unfused import by_definition, labels_of

TINY = dataclasses.replace(
    kernel_threads.default([1, 2], 1), losses=((8, 500),), linear=((4, 500),), chains=((2, 3, 500),), hidden=16, turns=1
)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_row_for_every_arm_number_of_threads_and_of_neighbours() -> None:
    before = torch.get_num_threads()
    rows = kernel_threads.run(TINY)
    assert torch.get_num_threads() == before
    own = [(row["what"], row["threads"], row["busy neighbours"]) for row in rows if row["arm"] == "bebop"]
    what = [*LOSSES, "linear tv", "verify probs", "verify block", "pair stats", "top-p 0.9"]
    assert sorted(own) == sorted((name, threads, busy) for name in what for threads in (1, 2) for busy in (0, 1))
    measured = [row for row in rows if not row.get("skipped")]
    assert all(row["ms"] > 0 for row in measured)
    assert all(row["x one thread"] == 1 for row in measured if row["threads"] == 1)
    eager = [row["x eager"] for row in measured if row["arm"] == "eager"]
    assert len(eager) == 9 * 4 and max(eager) == 1
    logits_of_one = 8 * 500 * 4 / 2**20
    saved = {(row["what"], row["arm"]): row["saved MB"] / logits_of_one for row in measured if row["what"] in LOSSES}
    assert all(saved[kind, "bebop"] == 1 for kind in LOSSES), "the gradient alone"
    assert saved["tv", "eager"] >= 2, "both distributions"


def test_saved_bytes_are_each_memory_once_without_the_inputs() -> None:
    x = torch.ones(100, requires_grad=True)

    def step() -> None:
        y = x.exp()
        (y * y * y.view(10, 10).flatten() * x).sum().backward()

    assert kernel_threads.saved_bytes(step, (x,)) == 3 * 400, "y, y * y, y * y * y"
    assert kernel_threads.saved_bytes(step, ()) == 4 * 400
    assert kernel_threads.saved_bytes(lambda: x.detach().exp(), (x,)) == 0


def test_time_that_is_up_leaves_shapes_out() -> None:
    rows = kernel_threads.run(dataclasses.replace(TINY, seconds=0.0))
    assert len(rows) == 13 and {row["skipped"] for row in rows} == {"time is up"}


@pytest.mark.parametrize("kind", LOSSES)
def test_the_plain_losses_are_those_of_the_definition(kind: str) -> None:
    draft, target = logits(5, 40)
    found = kernel_arms.EAGER[kind](draft, target, labels_of(5, 40))
    torch.testing.assert_close(found, by_definition(draft, target, kind).loss, rtol=1e-5, atol=1e-5)


def test_neighbours_keep_cores_busy_and_end() -> None:
    with kernel_threads.neighbours(2) as pids:
        ends = time.monotonic() + 60
        while time.monotonic() < ends and min(map(seconds, pids)) < 0.05:
            time.sleep(0.02)
        assert min(map(seconds, pids)) >= 0.05
    assert not any(map(alive, pids))


def seconds(pid: int) -> float:
    """Processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("threads", [["1"], ["1", "2"]])
def test_the_command_ends_after_its_seconds(
    threads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[float] = []
    for module in (kernels, kernel_threads):
        monkeypatch.setattr(module, "run", lambda bench: asked.append(bench.seconds) or [])
    for given in ([], ["--seconds", "7"]):
        main(["--out", str(tmp_path / "out"), "kernels", "--device", "cpu", "--threads", *threads, *given])
    assert asked[1] == 7 < asked[0], "by itself it takes longer"


def test_a_gpu_has_no_such_threads(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="for the kernels of a CPU, not for --device cuda"):
        main(["--out", str(tmp_path / "out"), "kernels", "--device", "cuda", "--threads", "1", "2"])
