# mypy: disable-error-code="untyped-decorator"
"""Uniform random numbers and digests in Triton, one launch each: the same numbers as ``uniforms.py``, to the bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from bebop.kernels import uniforms

GOLDEN, MIX_1, MIX_2 = (tl.constexpr(one) for one in (uniforms._GOLDEN, uniforms._MIX_1, uniforms._MIX_2))
BLOCK = 256


@triton.jit
def _shift(x: tl.tensor, BITS: tl.constexpr) -> tl.tensor:
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def _mix(x: tl.tensor) -> tl.tensor:
    x = (x ^ _shift(x, 30)) * MIX_1
    x = (x ^ _shift(x, 27)) * MIX_2
    return x ^ _shift(x, 31)


@triton.jit
def _uniforms(
    seeds: tl.tensor, counters: tl.tensor, out: tl.tensor, count: tl.tensor, total: tl.tensor, BLOCK: tl.constexpr
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < total
    row, lane = place // count, place % count + 1
    seed = tl.load(seeds + row, mask=inside, other=0)
    counter = tl.load(counters + row, mask=inside, other=0)
    key = _mix(_mix(seed) + counter * GOLDEN)
    bits = _shift(_mix(key + lane * GOLDEN), 11)
    tl.store(out + place, bits.to(tl.float64) * 2.0**-53, mask=inside)


@triton.jit
def _digest(tokens: tl.tensor, lengths: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0).to(tl.int64)
    length = tl.minimum(tl.load(lengths + row), width)
    found = tl.zeros((BLOCK,), tl.int64)
    for start in range(0, length, BLOCK):
        place = (start + tl.arange(0, BLOCK)).to(tl.int64)
        token = tl.load(tokens + row * width + place, mask=place < length, other=0)
        found += tl.where(place < length, _mix(_mix(token + 1) + place * GOLDEN), 0)
    tl.store(out + row, tl.sum(found, 0))


# ---- the public functions


def draw(seeds: Tensor, counters: Tensor, count: int) -> Tensor:
    """Launch ``uniforms`` on a CUDA device, or in Triton's interpreter."""
    out = torch.empty(len(seeds), count, dtype=torch.float64, device=seeds.device)
    if total := out.numel():
        grid = (triton.cdiv(total, BLOCK),)
        _uniforms[grid](seeds.contiguous(), counters.contiguous(), out, count, total, BLOCK=BLOCK)
    return out


def digest(tokens: Tensor, lengths: Tensor) -> Tensor:
    """Launch ``uniforms.digest`` on a CUDA device, or in Triton's interpreter."""
    out = torch.empty(len(tokens), dtype=torch.int64, device=tokens.device)
    if len(tokens):
        _digest[(len(tokens),)](tokens.contiguous(), lengths.contiguous(), out, tokens.shape[1], BLOCK=BLOCK)
    return out
