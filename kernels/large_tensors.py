"""Large tensors on huge pages, where the system has them on demand.

Memory of a new tensor is handed out and cleared when it is first touched, 4 kB at a time: 0.36 ms a megabyte, more than
a loss takes to compute what it writes there. In pages of 2 MB it is 0.05 ms (one core, Linux 6.18).
"""

import ctypes
import functools
import mmap
import sys
from collections.abc import Callable

import torch
from torch import Tensor

LEAST = 2**22  # bytes of a tensor that is worth it


def large_empty(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``torch.empty`` [rows, columns]."""
    made = torch.empty(rows, columns, dtype=dtype, device=device)
    if device.type == "cpu" and made.nbytes >= LEAST and (advise := _advise()) is not None:
        begins = made.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        advise(begins, (made.data_ptr() + made.nbytes - begins) // mmap.PAGESIZE * mmap.PAGESIZE, mmap.MADV_HUGEPAGE)
    return made


def product(left: Tensor, right: Tensor) -> Tensor:
    """``left @ right`` of [N, M] and [M, V]. No gradients on a CPU."""
    if left.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return left @ right
    return torch.mm(left, right, out=large_empty(len(left), right.shape[1], left.dtype, left.device))


@functools.cache
def _advise() -> Callable[[int, int, int], int] | None:
    """madvise(2): address, bytes, advice. What it refuses stays as it was."""
    if sys.platform != "linux" or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    found: Callable[[int, int, int], int] = advise
    return found
