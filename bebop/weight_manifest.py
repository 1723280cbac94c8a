"""Weights with a list of what they are: whoever takes them in notices if they were cut short or changed on their way.

Each tensor's name, shape, dtype and a checksum of its bytes are written down where the weights come from, and held
against what arrived before an engine sees it. The checksum reads memory once at its full speed (26 GB/s with one
thread, where CRC-32 makes 4): 0.2 ms for 4 MB, 0.6 s for 16 GB, on each side, so there is no setting to leave it out.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.protocols import DamagedWeights

BLOCK = 4096  # words of 8 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What is known of one tensor."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWeights:
    """Weights on their way; ``manifest`` has one entry for each."""

    weights: Mapping[str, Tensor]
    manifest: Mapping[str, Entry]

    def __reduce__(self) -> tuple[Any, ...]:
        """As plain bytes, which Ray lays into shared memory once, and whose readers map it: nothing is copied.

        A tensor is pickled within the stream: each reading makes another copy, in the heap of the thread that reads,
        which keeps that much memory. With eight threads a worker of 0.5 GB of weights came to hold 5 GB.
        """
        packed = {name: (_bytes(tensor), tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()}
        return _received, (packed, self.manifest)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    data: NDArray[np.uint8] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def _received(
    packed: Mapping[str, tuple[NDArray[np.uint8], torch.dtype, tuple[int, ...]]], manifest: Mapping[str, Entry]
) -> CheckedWeights:
    """What ``__reduce__`` took apart; the tensors may lie in memory that cannot be written to."""
    with warnings.catch_warnings():  # PyTorch warns that they must not be written to, and nobody does
        warnings.simplefilter("ignore", UserWarning)
        weights = {
            name: torch.from_numpy(data).view(dtype).reshape(shape) for name, (data, dtype, shape) in packed.items()
        }
    return CheckedWeights(weights=weights, manifest=manifest)


def with_manifest(weights: Mapping[str, Tensor]) -> CheckedWeights:
    """Weights (on the CPU) as they are now."""
    return CheckedWeights(weights=weights, manifest={name: _entry(tensor) for name, tensor in weights.items()})


def verified(sent: CheckedWeights) -> Mapping[str, Tensor]:
    """The weights; ``DamagedWeights`` names the first tensor that is not as it was."""
    if sent.weights.keys() != sent.manifest.keys():
        name = min(sent.weights.keys() ^ sent.manifest.keys())
        raise DamagedWeights(f"{name} {'is missing' if name in sent.manifest else 'was never sent'}")
    for name, tensor in sent.weights.items():
        wanted = sent.manifest[name]
        found = _entry(tensor) if tuple(tensor.shape) == wanted.shape else None
        if found != wanted:
            what = "contents differ" if found and found.dtype == wanted.dtype else _form(tensor, wanted)
            raise DamagedWeights(f"{name}: {what}")
    return sent.weights


def checksum(tensor: Tensor) -> int:
    """Of a tensor's bytes, on the CPU.

    Words of 64 bits are added up modulo 2^64 in blocks, and the sums of blocks with weights 1, 3, 5, ...: a change
    within one word always shows, as odd weights have inverses, and so do blocks that changed places, short of an
    accident (2^-64 for random contents). It is no protection against forgery.
    """
    data = _bytes(tensor)
    words = data.size // 8 // BLOCK * BLOCK
    blocks = data[: words * 8].view(np.uint64).reshape(-1, BLOCK).sum(axis=1, dtype=np.uint64)
    rest = np.zeros(-(-(data.size - words * 8) // 8) * 8, dtype=np.uint8)
    rest[: data.size - words * 8] = data[words * 8 :]
    sums = np.append(blocks, rest.view(np.uint64).sum(dtype=np.uint64))
    return int((sums * (2 * np.arange(sums.size, dtype=np.uint64) + np.uint64(1))).sum(dtype=np.uint64))


def _entry(tensor: Tensor) -> Entry:
    return Entry(shape=tuple(tensor.shape), dtype=str(tensor.dtype), checksum=checksum(tensor))


def _form(tensor: Tensor, wanted: Entry) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} instead of {wanted.dtype} {list(wanted.shape)}"
