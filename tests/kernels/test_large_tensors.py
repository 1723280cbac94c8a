"""Large tensors: huge pages are asked for where there are any, and products are what they were."""

from mmap import mmap
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bebop.kernels.large_tensors import large_empty, product

CPU = torch.device("cpu")
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
