"""Rows on several threads: the same numbers to the bit, errors that arrive, nothing of PyTorch's settings changed."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from mmap import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bebop.kernels import linear_losses
from bebop.kernels.linear_losses import linear_draft_loss, linear_e2e_tv_loss
from bebop.kernels.losses import tv_loss
from bebop.kernels.row_losses import KINDS
from bebop.kernels.row_threads import GRAIN, large_empty, product, share
from bebop.kernels.stats import FIELDS, pair_stats
from bebop.kernels.truncation import truncate_
from tests.cases import slow_but
from tests.kernels.builders import logits, on
from tests.kernels.hidden_states import states
from tests.kernels.unfused import INF, close, labels_for
from tests.tree import ROOT

CPU = torch.device("cpu")


def shared(work: Callable[[int], object], blocks: int, then: Callable[[object], object] | None = None) -> None:
    share(work, blocks, elements=GRAIN + 1, device=CPU, then=then)


def bits(numbers: Tensor) -> Tensor:
    """NaN is equal to NaN, and 0 is not -0."""
    return numbers.flatten().view(torch.uint8)


def alike(call: Callable[[], list[Tensor]]) -> None:
    """The same bits on 1, 2 and 3 threads."""
    found = []
    for threads in (1, 2, 3):
        with on(threads):
            found.append([x.detach().clone() for x in call()])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one.dtype == two.dtype and torch.equal(bits(one), bits(two))


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.mark.parametrize("kind", slow_but(["tv", "hard_ce", "hybrid"], KINDS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_are_equal_to_the_bit(kind: str, dtype: torch.dtype) -> None:
    """An odd number of rows, so that the last chunk goes back; tokens and rows without mass."""
    draft, target = logits(67, 1501, dtype)
    draft[:, :100] = target[:, :100] = -INF
    draft[66] = target[13] = -INF
    upstream = torch.linspace(-1, 2, 67, dtype=torch.promote_types(dtype, torch.float32))

    def call() -> list[Tensor]:
        z = draft.clone().requires_grad_()
        out = tv_loss(z, target, kind=kind, labels=labels_for(kind, *draft.shape), temperature=0.7)
        return [out.loss, out.alpha, out.draft_entropy, out.target_entropy, *torch.autograd.grad(out.loss, z, upstream)]

    alike(call)


def from_hidden_states(dtype: torch.dtype, chunk_rows: int) -> list[Tensor]:
    """Losses and gradients, that of the head too, which is a sum over chunks."""
    hidden, weight, wide, head = states(67, 1001, 16, dtype)
    weight.requires_grad_()
    options = {"chunk_rows": chunk_rows, "weight_grad": True, "target_top_p": 0.9}
    loss = linear_draft_loss(hidden, weight, wide, head, **options).loss
    chains = [x[:66].view(22, 3, -1) for x in (hidden, wide)]
    some = torch.arange(66).view(22, 3)
    of_data = linear_e2e_tv_loss(chains[0], weight, chains[1], head, some % 5 != 4, tokens=some, chunk_rows=chunk_rows)
    return [loss, of_data, *torch.autograd.grad(loss.sum() + of_data, (hidden, weight))]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_losses_from_hidden_states_are_equal_to_the_bit(dtype: torch.dtype) -> None:
    """Where a product has as many rows: all threads together hold ``chunk_rows``."""
    alike(lambda: from_hidden_states(dtype, 16 * torch.get_num_threads()))


def test_all_threads_together_hold_the_rows_of_a_chunk() -> None:
    """Up to rounding the result is that of one thread, which makes other products."""
    with on(1):
        wanted = from_hidden_states(torch.float64, 64)
    rows: set[int] = set()
    with on(2), pytest.MonkeyPatch.context() as patched:
        make = linear_losses._logits

        def seen(inputs: linear_losses.Inputs, some: slice, plan: linear_losses.Plan) -> tuple[Tensor, Tensor]:
            rows.add(some.stop - some.start)
            return make(inputs, some, plan)

        patched.setattr(linear_losses, "_logits", seen)
        for one, two in zip(from_hidden_states(torch.float64, 64), wanted, strict=True):
            close(one.detach(), two.detach(), 1e-12)
    assert rows == {32, 20}, "of 67 rows, and of the 40 that count"


def test_truncation_is_equal_to_the_bit() -> None:
    target = logits(301, 3001)[1]
    alike(lambda: [truncate_(target.clone(), 0.7, 0.8, 50)])


def test_statistics_are_equal_to_the_bit() -> None:
    draft, target = logits(301, 3001)

    def call() -> list[Tensor]:
        stats = pair_stats(draft, target)
        return [getattr(stats, name) for name in FIELDS]

    alike(call)


def test_every_block_once_and_a_slow_one_costs_its_own_share() -> None:
    """The first block ends after all others: whoever shared them out beforehand would wait for ever."""
    seen: list[int] = []
    others = threading.Event()

    def work(block: int) -> None:
        if block == 0:
            assert others.wait(20), "nobody does the other blocks"
        seen.append(block)
        if len(seen) == 8:
            others.set()

    with on(2):
        shared(work, 9)
    assert seen == [1, 2, 3, 4, 5, 6, 7, 8, 0]


def test_results_are_seen_in_order() -> None:
    seen: list[object] = []

    def work(block: int) -> int:
        time.sleep(0.01 * (block % 3 == 0))
        return block

    with on(3):
        shared(work, 20, seen.append)
    assert seen == list(range(20))


@pytest.mark.parametrize("ordered", [False, True])
def test_the_first_error_reaches_the_caller_once_nobody_works(ordered: bool) -> None:
    """Block 4 fails before block 3 does."""
    begun: list[int] = []
    ended: list[int] = []
    failing = threading.Event()

    def work(block: int) -> None:
        begun.append(block)
        if block == 3:
            assert failing.wait(20)
            time.sleep(0.05)
        ended.append(block)
        if block >= 3:
            failing.set()
            raise KeyError(block)

    with on(2), pytest.raises(KeyError) as raised:
        shared(work, 1000, (lambda result: None) if ordered else None)
    assert raised.value.args == (3,) and sorted(ended) == sorted(begun) == [0, 1, 2, 3, 4]


def modes() -> tuple[object, ...]:
    autocast = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


@pytest.mark.parametrize(
    "context",
    [contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.float16)],
    ids=["nothing", "no_grad", "inference_mode", "autocast"],
)
def test_modes_are_the_caller_s(context: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
    found = []
    with on(2), context():
        made = torch.zeros(2, 3)
        if not torch.is_inference_mode_enabled():
            made = made.clone()

        def work(block: int) -> None:
            made[block] += 1
            found.append(modes())

        shared(work, 2)
        assert found == [modes()] * 2 and made.tolist() == [[1.0] * 3] * 2


def test_losses_in_inference_mode_and_below_autograd() -> None:
    draft, target = logits(67, 1501)
    with on(1):
        wanted = tv_loss(draft, target).loss
    with on(2), torch.inference_mode():
        assert torch.equal(tv_loss(draft, target).loss, wanted)
        assert torch.equal(tv_loss(draft.clone(), target.clone()).loss, wanted)
    with on(2), torch.no_grad():
        assert torch.equal(tv_loss(draft.requires_grad_(), target).loss, wanted)


def in_a_new_thread(call: Callable[[], object]) -> object:
    found: list[object] = []
    one = threading.Thread(target=lambda: found.append(call()))
    one.start()
    one.join()
    return found[0]


def test_numbers_of_threads_are_as_before_and_one_within() -> None:
    with on(3):
        before = in_a_new_thread(torch.get_num_threads)
        within: list[tuple[int, int]] = []

        def work(block: int) -> None:
            here = threading.get_ident()
            shared(lambda inner: within.append((torch.get_num_threads(), threading.get_ident() - here)), 4)

        shared(work, 6)
        assert within == [(1, 0)] * 24, "blocks within blocks stay on their thread"
        assert torch.get_num_threads() == before == in_a_new_thread(torch.get_num_threads) == 3


@pytest.mark.parametrize("threads", [1, 2])
def test_few_elements_and_one_thread_stay_with_the_caller(threads: int) -> None:
    idents: list[int] = []
    with on(threads):
        share(lambda block: idents.append(threading.get_ident()), 3, elements=GRAIN, device=CPU)
    assert idents == [threading.get_ident()] * 3


def test_several_callers_at_once() -> None:
    """As where trainer and rollout are in one process, each in a thread of its own."""
    draft, target = logits(67, 1501)
    with on(2):
        wanted, found = tv_loss(draft, target).loss, []
        callers = [threading.Thread(target=lambda: found.append(tv_loss(draft, target).loss)) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert len(found) == 4 and all(torch.equal(one, wanted) for one in found)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # of threads and fork, which is what is tested
def test_a_forked_process_has_threads_of_its_own() -> None:
    def doubled() -> list[int]:
        found: list[int] = []
        shared(lambda block: found.append(2 * block), 4)
        return sorted(found)

    with on(2):
        assert doubled() == [0, 2, 4, 6]
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(30)  # the parent's threads do not exist here: to wait for one is to wait for ever
            same = doubled() == [0, 2, 4, 6]
            threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter waits for at its end
            os._exit(0 if same else 1)
        assert os.waitpid(child, 0)[1] == 0


ENDING = """
import torch
from bebop.kernels.losses import tv_loss
torch.set_num_threads(2)
assert tv_loss(torch.randn(67, 1501), torch.randn(67, 1501)).loss.shape == (67,)
"""


@pytest.mark.slow
def test_no_thread_keeps_a_process_from_its_end() -> None:
    environment = {"PATH": os.environ["PATH"], "BEBOP_COMPILE": "0", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", ENDING], cwd=ROOT, env=environment, timeout=200, check=True)


# ---- Large tensors: huge pages are asked for where there are any, and products are what they were

pages = pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="Linux without huge pages")


def flags(tensor: Tensor) -> list[str]:
    """Of the mapping that has the middle of a tensor (proc(5), VmFlags)."""
    middle, inside = tensor.data_ptr() + tensor.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            begins, ends = (int(x, 16) for x in name.split("-"))
            inside = begins <= middle < ends
        elif inside and name == "VmFlags:":
            return rest.split()
    raise AssertionError("no such mapping")


@pages
def test_huge_pages_are_asked_for_where_a_tensor_is_large() -> None:
    """Memory that was never asked for has no such flag; who allocates may get a place that was, so it maps its own."""
    assert "hg" in flags(large_empty(64, 2**18, torch.float32, CPU))
    own = mmap(-1, 2**26)
    assert "hg" not in flags(torch.frombuffer(own, dtype=torch.float32))


@pytest.mark.parametrize("shape", [(3, 5), (65, 2**14), (0, 7)])
def test_shapes_and_that_all_of_it_can_be_written(shape: tuple[int, int]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        made = large_empty(*shape, dtype, CPU)
        assert made.shape == shape and made.dtype == dtype and made.is_contiguous()
        assert made.fill_(1).double().sum() == made.numel()


def test_products_are_the_same_to_the_bit_and_autocast_is_heeded() -> None:
    left, right = torch.randn(130, 16), torch.randn(16, 9001)
    assert torch.equal(product(left, right), left @ right)
    with torch.autocast("cpu", torch.bfloat16):
        assert product(left, right).dtype == torch.bfloat16 and torch.equal(product(left, right), left @ right)
