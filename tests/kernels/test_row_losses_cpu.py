"""How the draft losses are computed on a CPU: compiled, in chunks, in little memory, by several processes."""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor

from bebop.bench.memory import peak_bytes
from bebop.kernels import row_losses_cpu
from bebop.kernels.losses import tv_loss
from bebop.kernels.row_losses import KINDS, RowLosses, reference, row_losses
from bebop.kernels.row_losses_cpu import CompiledLosses
from tests.cases import slow_but
from tests.kernels.builders import logits, on
from tests.kernels.unfused import INF, labels_for, within
from tests.tree import ROOT


@pytest.mark.slow
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
    (warning,) = (x.message for x in caplog.records if x.name == row_losses_cpu.__name__)
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


@pytest.mark.slow
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


# ---- What is compiled of the draft losses: once per kind and dtype, for every shape, and nothing that runs eagerly

compiler = pytest.mark.skipif(shutil.which("g++") is None and shutil.which("clang++") is None, reason="needs g++")
# Rows and V as microbatches bring them: 1 and many, few tokens and many, chunks of one row and of several.
SHAPES = ((1, 40_000), (2, 16_384), (3, 5001), (7, 1000), (64, 2049), (65, 2048), (128, 300), (131, 999), (5, 32_769),
          (4, 100), (9, 16), (16, 9), (33, 33), (200, 64), (2, 2), (1, 2), (70, 1500), (12, 4096), (31, 17), (66, 1)
          )  # fmt: skip


def loss(
    losses: CompiledLosses, draft: Tensor, target: Tensor, kind: str, labels: Tensor | None = None, grad: bool = True
) -> RowLosses:
    chosen = losses.get(row_losses_cpu.variant(draft, target, kind, labels, grad))
    return row_losses_cpu.run_in_chunks(chosen, draft, target, kind, 0.7, labels, 3.0, grad)


def agree(a: RowLosses, b: RowLosses, tolerance: float = 1e-6) -> None:
    for found_number, wanted in zip(a.numbers(), b.numbers(), strict=True):
        within(found_number, wanted, tolerance)
    assert (a.grad is None) == (b.grad is None)
    if a.grad is not None and b.grad is not None:
        ulp = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}.get(a.grad.dtype, 0.0)
        torch.testing.assert_close(a.grad.double(), b.grad.double(), rtol=ulp, atol=tolerance, equal_nan=True)


@contextmanager
def eager_calls() -> Iterator[list[str]]:
    """Every time that Python itself runs the core on this thread: a compiled one never does."""
    code, seen = row_losses_cpu._distribution.__code__, list[str]()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code is code:
            seen.append(event)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield seen
    finally:
        sys.setprofile(before)


def every_shape(losses: CompiledLosses) -> None:
    for rows, vocabulary in SHAPES:
        draft, target = logits(rows, vocabulary)
        for kind in KINDS:
            labels = labels_for(kind, rows, vocabulary)
            wanted = reference(draft.double(), target.double(), kind=kind, labels=labels, temperature=0.7)
            agree(loss(losses, draft, target, kind, labels), wanted, 2e-6)


def compiles(call: Callable[[], None]) -> tuple[int, int]:
    """How many graphs were compiled, and how often the core ran eagerly."""
    from torch._dynamo.utils import counters  # two seconds of imports

    before = counters["stats"]["unique_graphs"]
    with eager_calls() as seen, on(1):
        call()
    return counters["stats"]["unique_graphs"] - before, len(seen)


@pytest.mark.slow
def test_no_shape_makes_a_kind_compile_again() -> None:
    """By the tracer of ``torch.compile`` with eager kernels behind it: the tracer is what counts and gives up."""
    losses = CompiledLosses(row_losses_cpu.core, backend="eager")
    assert compiles(lambda: every_shape(losses)) == (len(KINDS), 0)


@pytest.mark.slow
def test_one_code_object_for_all_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    losses = CompiledLosses(row_losses_cpu.core, backend="eager")
    plain = torch.compile(row_losses_cpu.core, dynamic=True, backend="eager")
    monkeypatch.setattr(losses, "get", lambda variant: plain)
    graphs, eager = compiles(lambda: every_shape(losses))
    assert graphs > len(KINDS) or eager > 0


@pytest.mark.slow
@pytest.mark.parametrize("kind", slow_but(["tv"], ["tv", "hybrid"]))
def test_kinds_are_not_mixed_up(kind: str) -> None:
    """Nothing is looked at before a call, so the code object alone tells them apart."""
    losses, (draft, target) = CompiledLosses(row_losses_cpu.core, backend="eager"), logits(67, 301)
    for other in ("kl", kind, "kl"):
        agree(
            loss(losses, draft, target, other), reference(draft.double(), target.double(), kind=other, temperature=0.7)
        )


@pytest.mark.slow
def test_a_variant_for_all_that_it_depends_on() -> None:
    losses, dtypes = CompiledLosses(row_losses_cpu.core, backend="eager"), (torch.float32, torch.bfloat16)
    for dtype in dtypes:
        for other in dtypes:
            for grad in (True, False):
                draft, target = logits(67, 301, dtype)[0], logits(67, 301, other)[1]
                for labels in (torch.arange(67), torch.arange(67, dtype=torch.int32)):
                    found = loss(losses, draft, target, "hard_ce", labels, grad)
                    wanted = reference(
                        draft.double(), target.double(), kind="hard_ce", labels=labels, temperature=0.7, need_grad=grad
                    )
                    agree(found, wanted)
    assert len(losses.made) == 2 * 2 * 2 * 2


@pytest.mark.slow
def test_inference_mode_and_autocast_run_what_was_compiled_outside() -> None:
    losses, (draft, target) = CompiledLosses(row_losses_cpu.core, backend="eager"), logits(67, 301)
    wanted = reference(draft.double(), target.double(), kind="kl", temperature=0.7)
    agree(loss(losses, draft, target, "kl"), wanted)
    with torch.inference_mode():
        agree(loss(losses, draft.clone(), target.clone(), "kl"), wanted)
        agree(loss(losses, draft.clone(), target.clone(), "tv"), reference(draft, target, kind="tv", temperature=0.7))
    with torch.autocast("cpu", torch.bfloat16):
        agree(loss(losses, draft, target, "kl"), wanted)
    agree(loss(losses, draft, target, "tv"), reference(draft, target, kind="tv", temperature=0.7))


# ---- with the compiler


@pytest.mark.slow  # a compiler's seconds
@compiler
@pytest.mark.parametrize(("kind", "dtype"), [("tv", torch.bfloat16), ("hybrid", torch.float32)])
def test_the_compiled_core(kind: str, dtype: torch.dtype) -> None:
    """Rows that start at odd addresses, a last chunk that is smaller, and rows that are parts of wider ones."""
    draft, target = logits(132, 5001, dtype)
    draft[:, :2500] = target[:, :2500] = -INF
    draft[70] = -INF
    losses = CompiledLosses(row_losses_cpu.core)
    assert row_losses_cpu.chunk_rows(131, 5001) == 3
    for pair in ((draft[1:], target[1:]), (draft[:1, 1:], target[:1, 1:]), (draft[:9, 2400:], target[:9, 2400:])):
        wanted = reference(*(x.double() for x in pair), kind=kind, temperature=0.7)
        agree(loss(losses, *pair, kind), wanted)
    assert not losses.failed, "compilation failed"


@pytest.mark.slow
@compiler
def test_every_kind_and_shape_with_the_compiler() -> None:
    losses = CompiledLosses(row_losses_cpu.core)
    assert compiles(lambda: every_shape(losses)) == (len(KINDS), 0)
    assert not losses.failed and len(losses.made) == len(KINDS)


@pytest.mark.slow
@compiler
def test_the_compiled_core_of_several_threads_gives_the_same_bits() -> None:
    """It is another one, which lets go of the interpreter's lock."""
    losses, pair = CompiledLosses(row_losses_cpu.core), logits(131, 5001)
    found = []
    for threads in (1, 2):
        with on(threads):
            found.append(loss(losses, *pair, "hybrid"))
    for one, two in zip(*([*x.numbers(), x.grad] for x in found), strict=True):
        assert torch.equal(one, two)
    assert {variant.shared for variant in losses.made} == {False, True} and not losses.failed


@pytest.mark.slow
def test_a_job_s_microbatches_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the public function, forward and backward: small ones are eager until there were enough of them."""
    losses = CompiledLosses(row_losses_cpu.core, backend="eager")
    monkeypatch.setattr(row_losses_cpu, "compiled", losses)
    monkeypatch.setattr(row_losses_cpu, "COMPILE_MIN", 2**14)
    monkeypatch.setattr(row_losses_cpu, "COMPILE_AFTER", 0)

    def step() -> None:
        for rows in range(40, 45):
            draft, target = logits(rows, 400 + rows)
            tv_loss(draft.requires_grad_(), target).loss.sum().backward()

    assert compiles(step) == (1, 0)
