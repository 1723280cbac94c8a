"""Blocks of rows on several CPU threads, which synchronise once, at the end.

PyTorch splits every operator over its threads and synchronises them after each. A loss is some thirty operators a
chunk. Threads mostly wait; where another process takes a part of one core, all of them spin for that one. Here a thread
takes the next block when it is done with one, and its operators run on it alone. A slow thread costs its own share.
Large tensors that these threads fill lie on huge pages.
"""

import contextlib
import ctypes
import functools
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

# Elements up to which PyTorch does not split an operator (at::internal::GRAIN_SIZE): nothing to be kept from it.
GRAIN = 2**15
MAX_THREADS = 1024  # they begin when they are needed
HUGE_PAGES_FROM = 2**22  # bytes of a tensor

_this = threading.local()


def threads_for(elements: int, device: torch.device) -> int:
    """Return how many threads share blocks of ``elements`` elements in all.

    The result is 1 in four cases: the caller has only one thread, as within ``work``; there are few elements; the
    device is a GPU; or a dispatch mode, which is thread-local, watches operators.
    """
    few = elements <= GRAIN or device.type != "cpu"
    return 1 if few or is_in_torch_dispatch_mode() else torch.get_num_threads()


def share(
    work: Callable[[int], Any],
    blocks: int,
    *,
    elements: int,
    device: torch.device,
    then: Callable[[Any], object] | None = None,
) -> None:
    """Call ``work`` of 0 ... ``blocks`` - 1, each once, on ``torch.get_num_threads()`` threads.

    Threads take blocks in ascending order, and blocks may end in any order: writes of ``work`` must not overlap.
    ``then`` gets the results of ``work`` in ascending order of blocks, so that sums do not depend on the number of
    threads. Gradient mode, inference mode and autocast are the caller's. If several blocks fail, the error of the
    lowest block is raised, once all threads have finished.

    The caller's own thread runs all blocks where ``threads_for`` returns 1.
    """
    threads = threads_for(elements, device)
    if threads == 1:
        for block in range(blocks):
            if then is None:
                work(block)
            else:
                then(work(block))
        return
    sharing = _Sharing(work, blocks, then)
    running = [_pool().submit(sharing.run) for _ in range(min(threads, blocks))]
    try:
        wait(running)
    finally:  # also where the caller is interrupted: they write into its tensors
        sharing.stop()
        wait(running)
    if sharing.errors:
        raise sharing.errors.pop(min(sharing.errors))
    for one in running:
        one.result()  # what was not a block's error


class _Sharing:
    """Shared state of the threads of one call of ``share``."""

    def __init__(self, work: Callable[[int], Any], blocks: int, then: Callable[[Any], object] | None) -> None:
        self.work, self.blocks, self.then = work, blocks, then
        self.errors: dict[int, BaseException] = {}  # by block
        self._modes = _modes()
        self._turns = threading.Condition()
        self._taken, self._ended, self._stopped = 0, 0, False  # blocks, those that ``then`` has seen

    def run(self) -> None:
        """Run blocks until none is left, or one has failed."""
        with self._modes():
            while (block := self._take()) is not None:
                try:
                    result = self.work(block)
                    if self.then is not None:
                        self._in_turn(block, result)
                    del result  # or it would live on beside the next one
                except BaseException as error:
                    self.errors[block] = error
                    self.stop()

    def stop(self) -> None:
        """Start no more blocks."""
        with self._turns:
            self._stopped = True
            self._turns.notify_all()

    def _take(self) -> int | None:
        with self._turns:
            if self._stopped or self._taken == self.blocks:
                return None
            self._taken += 1
            return self._taken - 1

    def _in_turn(self, block: int, result: Any) -> None:
        """Call ``then`` with a result, after the results of all blocks before it.

        Blocks before it were started earlier, so another thread is at work on them.
        """
        assert self.then is not None
        with self._turns:
            self._turns.wait_for(lambda: self._ended == block or self._stopped)
            if not self._stopped:
                self.then(result)
                self._ended += 1
                self._turns.notify_all()


def sharing() -> bool:
    """Return whether this thread runs blocks of rows beside others.

    Code that holds the interpreter's lock stops all of them.
    """
    return getattr(_this, "shares", False)


@functools.cache
def _pool() -> ThreadPoolExecutor:
    """Return the thread pool of this process; a forked child has none of its parent's threads and makes its own."""
    return ThreadPoolExecutor(MAX_THREADS, "rows", functools.partial(_begin, threading.Lock()))


os.register_at_fork(after_in_child=_pool.cache_clear)


def _begin(one_by_one: threading.Lock) -> None:
    """Make operators of this thread run on it alone.

    ``set_num_threads`` also sets the number for threads that begin later. So a short-lived thread sets the old number
    again. This thread has just begun, so it knows that number.
    """
    _this.shares = True
    with one_by_one:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        restoring = threading.Thread(target=torch.set_num_threads, args=(before,))
        restoring.start()
        restoring.join()


def _modes() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Return a context manager that gives another thread the thread-local PyTorch modes of this one."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocast, dtype = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    @contextlib.contextmanager
    def modes() -> Iterator[None]:
        with torch.inference_mode(inference), torch.set_grad_enabled(grad), torch.autocast("cpu", dtype, autocast):
            yield

    return modes


# ---- large tensors on huge pages, where the system has them on demand
#
# Memory of a new tensor is handed out and cleared when it is first touched, 4 kB at a time: 0.36 ms a megabyte, more
# than a loss takes to compute what it writes there. In pages of 2 MB it is 0.05 ms (one core, Linux 6.18).


def large_empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return ``torch.empty`` [rows, columns], on huge pages if it is large and on a CPU."""
    made = torch.empty(rows, columns, dtype=dtype, device=device)
    if device.type == "cpu" and made.nbytes >= HUGE_PAGES_FROM and (advise := _advise()) is not None:
        begins = made.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        advise(begins, (made.data_ptr() + made.nbytes - begins) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return made


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return ``left @ right`` of [N, M] and [M, V].

    On a CPU without autocast the result is in a ``large_empty``, without gradients.
    """
    if left.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return left @ right
    return torch.mm(left, right, out=large_empty(len(left), right.shape[1], left.dtype, left.device))


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """Return madvise(2) as a function of address, bytes and advice, or None where the system has none.

    If madvise refuses, memory stays as it was.
    """
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = advise
    return found
