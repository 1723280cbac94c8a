"""A short fingerprint of weights: sums of bit patterns, which are the same on any device."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

PERIOD = 8191  # weights of the positions repeat after this many elements
PERIODS = 512  # periods that are widened to 64 bits at a time
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """Return 16 hexadecimal digits for named tensors, converted to ``dtype`` (None: unchanged).

    Exact integer arithmetic, so CPU and GPU agree. It detects any changed element, zeroed and swapped tensors, and
    exchanged elements, in one pass over the weights.
    """
    parts = []
    for name in sorted(weights):
        tensor = weights[name].detach().to(dtype or weights[name].dtype)
        parts.append(f"{name}:{tuple(tensor.shape)}:{_sum(tensor)}")
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _sum(tensor: Tensor) -> int:
    """Return the sum of the elements' bits, each times a number of its position, modulo 2^64.

    Elements with the same number are added first, because decoding waits for this: one pass, and one product a number.
    """
    bits = tensor.contiguous().view(-1).view(BITS[tensor.element_size()])
    sums = torch.zeros(PERIOD, dtype=torch.int64, device=bits.device)
    for piece in bits.split(PERIODS * PERIOD):
        rows = len(piece) // PERIOD
        sums += piece[: rows * PERIOD].view(rows, PERIOD).sum(0, dtype=torch.int64)
        sums[: len(piece) - rows * PERIOD] += piece[rows * PERIOD :]
    return int((sums * torch.arange(1, PERIOD + 1, device=sums.device)).sum()) % (1 << 64)
