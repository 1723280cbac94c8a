"""Products of one to eight rows with a large fp32 matrix on a CPU, in the time that reading the matrix takes.

MKL and oneDNN multiply two rows at 1.2 to 2.2 times the time of one, although both read the same weights. A pass that
verifies a draft has two rows at batch 1, so this is what drafts cost there. ``few_rows.cpp`` reads the weights once, in
place: nothing is packed or copied, so new weights count as soon as they are written.

- A row's results do not depend, to the bit, on how many rows are beside it or on the number of threads.
- The kernel is built for this processor on first use, which takes a second. It needs AVX-512 and a C++ compiler
  (GCC 12, Clang). Without them ``available`` returns False, and a missing compiler is logged once.

There is no gradient. Tools that watch PyTorch's operators (a dispatch mode, its profiler) do not see this product.
"""

import ctypes
import functools
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from bebop.errors import one_line

MAX_ROWS = 8  # from 9 rows on multiplying takes longer than reading, and oneDNN multiplies faster
# Numbers in a matrix, 1 MB: smaller ones stay in a core's cache, where the kernel gains little and a call costs more.
SMALLEST = 2**18
SOURCE = Path(__file__).with_suffix(".cpp")
# Sums and products are fused, as vectors and in the rest alike; nothing else may be reordered (no -ffast-math).
FLAGS = ("-O3", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC", "-w")
BUILD_SECONDS = 120  # of the compiler, at most

logger = logging.getLogger(__name__)


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the product by its definition, in fp64: [M, K], [N, K], [N] -> [M, N]."""
    out = (x.double()[:, None] * weight.double()).sum(-1)
    return out if bias is None else out + bias


def suits(weight: Tensor) -> bool:
    """Return whether the kernel exists and is the faster one for ``weight`` [N, K] and up to ``MAX_ROWS`` rows."""
    large = weight.numel() >= SMALLEST and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return large and weight.is_contiguous() and available()


def few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``linear`` without gradients: [M, K], [N, K], [N] -> [M, N], for M from 1 to ``MAX_ROWS``.

    The caller has checked ``suits``. ``x`` is fp32 and on the CPU.
    """
    rows, outputs = x.shape[0], weight.shape[0]
    assert x.dtype == torch.float32 and 0 < rows <= MAX_ROWS and x.shape[1] == weight.shape[1]
    out = x.new_empty((rows, outputs))
    x = x.contiguous()
    start = None if bias is None else bias.data_ptr()
    pointers = x.data_ptr(), rows, weight.data_ptr(), start, outputs, x.shape[1], out.data_ptr()
    _kernel()(*pointers, torch.get_num_threads())  # type: ignore[misc]
    return out


def available() -> bool:
    """Return whether this process has the kernel; the first call builds it if possible."""
    return os.environ.get("BEBOP_COMPILE") != "0" and _kernel() is not None


@functools.cache
def _kernel() -> Callable[..., None] | None:
    """Return the built function; None without AVX-512 (half the registers: slower than MKL) or a compiler."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512":
        return None
    try:
        return build(compiler())
    except (OSError, subprocess.SubprocessError) as error:
        reason = one_line(getattr(error, "stderr", None) or error)
        logger.warning("products of few rows take MKL and oneDNN, which are slower: %s", reason)
        return None


def compiler() -> str:
    """Return the C++ compiler from the variable ``CXX`` or the usual names; raise FileNotFoundError without one."""
    names = [name for name in (os.environ.get("CXX"), "c++", "g++", "clang++") if name]
    found = next((path for name in names if (path := shutil.which(name))), None)
    if found is None:
        raise FileNotFoundError(f"no C++ compiler: none of {', '.join(names)} is there")
    return found


def build(command: str) -> Callable[..., None]:
    """Return the function of ``few_rows.cpp``, built by the compiler ``command``.

    The library lies in a folder of this process alone and is deleted once it is loaded. So nobody else can replace it,
    and no file is left over.
    """
    with tempfile.TemporaryDirectory(prefix="bebop-") as folder:
        library = str(Path(folder) / "few_rows.so")
        call = [command, *FLAGS, str(SOURCE), "-o", library]
        subprocess.run(call, check=True, capture_output=True, text=True, timeout=BUILD_SECONDS)
        function = ctypes.CDLL(library).few_rows
    size, pointer = ctypes.c_long, ctypes.c_void_p
    function.argtypes = [pointer, size, pointer, pointer, size, size, pointer, size]
    function.restype = None
    return function
