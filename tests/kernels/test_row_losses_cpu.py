"""How the draft losses are computed on a CPU: compiled, in chunks, in little memory, by several processes."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from bebop.bench.memory import peak_bytes
from bebop.kernels import compiled_losses, row_losses_cpu
from bebop.kernels.compiled_losses import CompiledLosses
from bebop.kernels.losses import tv_loss
from bebop.kernels.row_losses import RowLosses, reference, row_losses
from tests.kernels.builders import logits
from tests.kernels.unfused import within
from tests.tree import ROOT


def agree(a: RowLosses, b: RowLosses) -> None:
    assert a.grad is not None and b.grad is not None
    for found_number, wanted in zip(a.numbers(), b.numbers(), strict=True):
        within(found_number, wanted)
    ulp = 2.0**-8 if a.grad.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(a.grad.double(), b.grad.double(), rtol=ulp, atol=1e-6, equal_nan=True)


def test_without_a_compiler_the_eager_core_takes_over(caplog: pytest.LogCaptureFixture) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no C++ compiler here")

    fallen = CompiledLosses(row_losses_cpu.core, backend=broken)
    draft, target = logits(9, 50)
    for kind in ("tv", "tv", "kl"):
        chosen = fallen.get(row_losses_cpu.variant(draft, target, kind, None, True))
        assert chosen is row_losses_cpu.core
        result = row_losses_cpu.run_in_chunks(chosen, draft, target, kind, 1.0, None, 3.0, True)
        agree(result, reference(draft.double(), target.double(), kind=kind))
    (warning,) = (x.message for x in caplog.records if x.name == compiled_losses.__name__)
    assert "no C++ compiler here" in warning and "\n" not in warning


def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.empty(4, 1000), torch.empty(512, 32_768, device="meta")
    assert not row_losses_cpu.worth_compiling(small)
    assert not row_losses_cpu.worth_compiling(large)  # not on a CPU
    big = torch.empty(1, 1).expand(512, 32_768)
    assert row_losses_cpu.worth_compiling(big)
    often, middle = row_losses_cpu.COMPILE_AFTER, torch.empty(1, 1).expand(32, 32_768)
    assert not row_losses_cpu.worth_compiling(middle, often - 1) and row_losses_cpu.worth_compiling(middle, often)
    assert not row_losses_cpu.worth_compiling(small, often)
    monkeypatch.setenv("BEBOP_COMPILE", "0")
    assert not row_losses_cpu.worth_compiling(big)


def test_chunks_do_not_change_the_numbers() -> None:
    draft, target = logits(131, 700)
    step = row_losses_cpu.chunk_rows(*draft.shape)
    assert 1 < step < 131 and 131 % step != 0
    agree(row_losses(draft, target, kind="tv"), reference(draft.double(), target.double(), kind="tv"))


def test_memory_is_the_gradient_and_a_little_more() -> None:
    draft, target = logits(256, 4096)
    draft.requires_grad_()
    tensor = draft.numel() * 4

    def autograd() -> None:
        (1 - torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1)).sum().backward()

    mine = peak_bytes(lambda: tv_loss(draft, target).loss.sum().backward())
    draft.grad = None
    others = peak_bytes(autograd)
    assert mine < 1.3 * tensor
    assert 3 * mine < others


@pytest.mark.slow
def test_a_split_vocabulary(tmp_path: Path) -> None:
    """1, 2 and 4 processes over gloo, with shards of different widths; every process checks its own numbers."""
    command = [sys.executable, "-m", "tests.kernels.parallel_worker"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), "4", str(tmp_path / "store")], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(4)
    ]
    ends = time.monotonic() + 120
    while time.monotonic() < ends and any(x.poll() is None for x in processes) and not any(x.poll() for x in processes):
        time.sleep(0.1)
    for process in processes:  # those that wait for one that has failed, or too long
        process.kill()
    errors = [process.communicate()[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4, "\n".join(errors)[-3000:]
