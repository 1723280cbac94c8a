"""Uniform random numbers as a function of (seed, counter): stateless, the same on every device and in every batch.

This is the plain PyTorch reference; a CUDA device uses Triton.
"""

import torch
from torch import Tensor

from bebop.kernels.verify import compiled

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def _shift(x: Tensor, bits: int) -> Tensor:
    """Shift signed 64-bit numbers right logically."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    """Apply the finaliser of splitmix64 (Steele, Lea, Flood 2014), a bijection of 64-bit numbers."""
    x = (x ^ _shift(x, 30)) * _MIX_1
    x = (x ^ _shift(x, 27)) * _MIX_2
    return x ^ _shift(x, 31)


def uniforms(seeds: Tensor, counters: Tensor, count: int) -> Tensor:
    """Draw ``count`` numbers in [0, 1) for each (seed, counter): [B], [B] -> [B, count], float64 of 53 random bits.

    A request draws the same numbers in another slot, batch or worker, and when it is resumed half-way.
    """
    if compiled(None, seeds):
        from bebop.kernels import uniforms_triton

        return uniforms_triton.draw(seeds, counters, count)
    lanes = torch.arange(1, count + 1, device=seeds.device)
    key = _mix(_mix(seeds) + counters * _GOLDEN)
    bits = _mix(key[:, None] + lanes * _GOLDEN)
    return _shift(bits, 11).to(torch.float64) * 2.0**-53


def digest(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Return a 64-bit hash [B] of the first ``lengths`` [B] tokens of each row [B, n] and of their places."""
    if compiled(None, tokens):
        from bebop.kernels import uniforms_triton

        return uniforms_triton.digest(tokens, lengths)
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return (_mix(_mix(tokens + 1) + places * _GOLDEN) * (places < lengths[:, None])).sum(1)
