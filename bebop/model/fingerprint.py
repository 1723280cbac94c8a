"""A short fingerprint of weights: sums of bit patterns, which come out the same on any device."""

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

PIECE = 1 << 22  # elements that are widened to 64 bits at a time
PERIOD = 8191  # weights of the positions repeat after this many elements
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def fingerprint(weights: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> str:
    """Return 16 hexadecimal digits of named tensors, as ``dtype`` (None: as they are).

    Exact integer arithmetic, so CPU and GPU agree. Notices any changed element, zeroed and swapped tensors, and
    elements that changed places; one pass over the weights.
    """
    parts = []
    for name in sorted(weights):
        tensor = weights[name].detach().to(dtype or weights[name].dtype)
        parts.append(f"{name}:{tuple(tensor.shape)}:{_sum(tensor)}")
    return hashlib.sha256("|".join(parts).encode()).hexdigest()[:16]


def _sum(tensor: Tensor) -> int:
    """Sum of the elements' bits, each times a number of its position, modulo 2^64."""
    bits = tensor.contiguous().view(-1).view(BITS[tensor.element_size()])
    total = 0
    for start in range(0, len(bits), PIECE):
        piece = bits[start : start + PIECE].long()
        place = torch.arange(start, start + len(piece), device=piece.device) % PERIOD + 1
        total += int((piece * place).sum())
    return total % (1 << 64)
