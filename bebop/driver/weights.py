"""Weights with a manifest, by which a worker detects that they were truncated or changed in transit.

They travel in one of two ways. ``CheckedWeights`` hold the tensors, which Ray's object store takes to any machine.
``SharedWeights`` hold only the place of the weights in memory of this machine. The trainer has written them there, or a
receiver, after ``bebop.driver.broadcast`` brought them from another machine.

The sender records the name, shape, dtype and a checksum of the bytes of each tensor. The receiver compares them with
the received tensors before an engine sees them. The checksum reads memory once at full speed (26 GB/s with one thread,
where CRC-32 reaches 4): 0.2 ms for 4 MB and 0.6 s for 16 GB on each side, so no setting disables it.
"""

import fcntl
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bebop.driver.protocols import DamagedWeights

log = logging.getLogger(__name__)

BLOCK = 4096  # words of 8 bytes
ALIGNMENT = 64  # bytes, of the start of each tensor in a buffer
BUFFERS = 2  # buffers that the trainer alternates between, and that a reader keeps mapped
BOOT = Path("/proc/sys/kernel/random/boot_id")  # identifies the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The manifest's entry for one tensor."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedWeights:
    """Weights for a transfer, with one entry of ``manifest`` for each."""

    weights: Mapping[str, Tensor]
    manifest: Mapping[str, Entry]

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as plain bytes, which Ray puts into shared memory once and readers map: nothing is copied.

        A tensor would be pickled within the stream. Each reading makes another copy in the heap of the thread that
        reads, which keeps that much memory: with eight threads a worker of 0.5 GB of weights held 5 GB.
        """
        packed = {name: (_bytes(tensor), tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights.items()}
        return _received, (packed, self.manifest)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    data: NDArray[np.uint8] = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return data


def _received(
    packed: Mapping[str, tuple[NDArray[np.uint8], torch.dtype, tuple[int, ...]]], manifest: Mapping[str, Entry]
) -> CheckedWeights:
    """Undo ``__reduce__``; the tensors may lie in read-only memory."""
    with warnings.catch_warnings():  # PyTorch warns about read-only memory, but the tensors are only read
        warnings.simplefilter("ignore", UserWarning)
        weights = {
            name: torch.from_numpy(data).view(dtype).reshape(shape) for name, (data, dtype, shape) in packed.items()
        }
    return CheckedWeights(weights=weights, manifest=manifest)


def with_manifest(weights: Mapping[str, Tensor]) -> CheckedWeights:
    """Make the manifest of weights on the CPU."""
    return CheckedWeights(weights=weights, manifest={name: _entry(tensor) for name, tensor in weights.items()})


def verify_weights(sent: CheckedWeights) -> Mapping[str, Tensor]:
    """Return the weights; raise ``DamagedWeights`` with the name of the first tensor that differs."""
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
    """Return a checksum of the bytes of a tensor on the CPU.

    Words of 64 bits are added modulo 2^64 in blocks, and the sums of blocks are added with weights 1, 3, 5, ... A
    change within one word always shows, since odd weights have inverses. Exchanged blocks show with a probability of
    1 - 2^-64 for random contents. It is no protection against forgery.
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


# ---- memory that the processes of one machine share


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedWeights:
    """Place of weights in memory of this machine, with their manifest."""

    machine: str  # content of ``BOOT``
    process: int  # id of the process that wrote or received them, and has the buffer open
    descriptor: int  # of the buffer in that process
    inode: int  # of the buffer: the descriptor may belong to another one by now
    size: int  # bytes of the buffer
    starts: Mapping[str, int]  # bytes before each tensor
    manifest: Mapping[str, Entry]


class SharedBuffer:
    """Memory that other processes of this user may map. It has no name, and ends with the last process that maps it.

    A reader holds a lock of the kernel (``flock``). The lock ends with the reader's process, however that ends.
    """

    def __init__(self, descriptor: int, size: int, pinned: bool) -> None:
        """Map the file of ``descriptor``, which is closed with the buffer.

        ``pinned``: pin the memory, so that a GPU copies by itself, without the processor.
        """
        self.descriptor, self.size = descriptor, size
        # PyTorch passes a shared storage on to another process (SGLang's) without a copy.
        storage: Any = torch.UntypedStorage
        self.bytes = torch.empty(0, dtype=torch.uint8).set_(storage._new_shared_fd_cpu(descriptor, size))
        self.inode = os.fstat(descriptor).st_ino
        weakref.finalize(self, os.close, descriptor).atexit = False
        if pinned and _pinned(self.bytes):
            unpin = torch.cuda.cudart().cudaHostUnregister
            weakref.finalize(self, unpin, self.bytes.data_ptr()).atexit = False

    @classmethod
    def new(cls, size: int, pinned: bool) -> "SharedBuffer":
        """Return a new buffer of zeros."""
        descriptor = os.memfd_create("bebop-weights", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, size)
        return cls(descriptor, size, pinned)

    def lock(self, *, writing: bool) -> bool:
        """Lock the buffer and return True; False if a reader or a writer holds a conflicting lock."""
        try:
            fcntl.flock(self.descriptor, (fcntl.LOCK_EX if writing else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def unlock(self) -> None:
        """Release the lock."""
        fcntl.flock(self.descriptor, fcntl.LOCK_UN)

    def tensor(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a view of the tensor that begins ``start`` bytes after the beginning."""
        end = start + torch.Size(shape).numel() * dtype.itemsize
        return self.bytes[start:end].view(dtype).view(shape)

    def describe(self, starts: Mapping[str, int], manifest: Mapping[str, Entry]) -> SharedWeights:
        """Return the description for readers of weights that this process has written here."""
        return SharedWeights(
            machine=BOOT.read_text().strip(),
            process=os.getpid(),
            descriptor=self.descriptor,
            inode=self.inode,
            size=self.size,
            starts=starts,
            manifest=manifest,
        )


def _pinned(memory: Tensor) -> bool:
    """Pin memory for copies by the GPU; return False where that is refused, and copies are slower."""
    failure = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if failure == 0:
        return True
    log.warning("memory for weights cannot be pinned (CUDA error %d): copies from and to the GPU are slower", failure)
    try:
        torch.zeros(1, device="cuda")  # CUDA reports the failure once more, at the next launch: here
    except RuntimeError:
        pass
    return False


class WeightBuffers:
    """The writer's side: it alternates between two buffers.

    If readers still use a buffer, they keep it and a new one takes its place, so the trainer never waits.
    """

    def __init__(self) -> None:
        self._buffers: list[SharedBuffer] = []  # most recently written last

    def write(
        self, named: Iterable[tuple[str, Tensor]], layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]
    ) -> SharedWeights:
        """Write full weights from any device in the shapes and types of ``layout``, by name, with one copy.

        ``named`` has the same names in any order and is read once, so a tensor may be made on demand.
        """
        starts, size = places(layout)
        buffer, manifest, cuda = None, {}, False
        for name, tensor in named:
            cuda = cuda or tensor.is_cuda
            buffer = buffer or self.locked(size, cuda)
            shape, dtype = layout[name]
            # On a GPU cast first: a copy from there that casts goes through other, pageable memory.
            given = tensor.to(dtype) if tensor.is_cuda else tensor
            buffer.tensor(starts[name], shape, dtype).copy_(given, non_blocking=True)
        buffer = buffer or self.locked(size, pinned=False)
        if cuda:
            torch.cuda.synchronize()
        for name, (shape, dtype) in layout.items():
            manifest[name] = _entry(buffer.tensor(starts[name], shape, dtype))
        buffer.unlock()
        return buffer.describe(starts, manifest)

    def locked(self, size: int, pinned: bool) -> SharedBuffer:
        """Return the buffer to write to, locked.

        It is the older buffer if that has the size and no readers, and otherwise a new one.
        """
        oldest = self._buffers.pop(0) if len(self._buffers) == BUFFERS else None
        if oldest is None or oldest.size != size or not oldest.lock(writing=True):
            oldest = SharedBuffer.new(size, pinned)
            oldest.lock(writing=True)
        self._buffers.append(oldest)
        return oldest


class SharedReader:
    """A worker's side: it maps and keeps buffers, because the trainer reuses them, and checks their contents."""

    def __init__(self, pinned: bool = False) -> None:
        """Begin without mapped buffers; ``pinned``: as in ``SharedBuffer``."""
        self.pinned = pinned
        self._buffers: dict[tuple[int, int], SharedBuffer] = {}  # by process and inode; most recently used last
        self._readers: dict[SharedBuffer, int] = {}  # number of readers of each locked buffer
        self._changed = threading.Lock()

    def open(self, sent: SharedWeights) -> tuple[Mapping[str, Tensor], Callable[[], None]]:
        """Return the weights and a release function; no process writes to them before its call.

        Raises:
            DamagedWeights: The contents differ from the manifest, or newer weights replaced them.
        """
        buffer, release = self.lock(sent)
        try:
            weights = {
                name: buffer.tensor(sent.starts[name], entry.shape, getattr(torch, entry.dtype.removeprefix("torch.")))
                for name, entry in sent.manifest.items()
            }
            verify_weights(CheckedWeights(weights=weights, manifest=sent.manifest))
        except BaseException:
            release()
            raise
        return weights, release

    def lock(self, sent: SharedWeights) -> tuple[SharedBuffer, Callable[[], None]]:
        """Return the buffer of unchecked weights, locked, and a function that releases it."""
        with self._changed:
            buffer = self._mapped(sent)
            if not self._readers.get(buffer) and not buffer.lock(writing=False):
                raise DamagedWeights("newer ones are being written in their place")
            self._readers[buffer] = self._readers.get(buffer, 0) + 1
        return buffer, lambda: self._release(buffer)

    def _release(self, buffer: SharedBuffer) -> None:
        with self._changed:
            self._readers[buffer] -= 1
            if not self._readers[buffer]:
                del self._readers[buffer]
                buffer.unlock()

    def _mapped(self, sent: SharedWeights) -> SharedBuffer:
        if sent.machine != BOOT.read_text().strip():
            raise DamagedWeights("they lie in memory of another machine")
        key = (sent.process, sent.inode)
        buffer = self._buffers.pop(key, None) or self._open(sent)
        self._buffers[key] = buffer
        while len(self._buffers) > BUFFERS:
            del self._buffers[next(iter(self._buffers))]
        return buffer

    def _open(self, sent: SharedWeights) -> SharedBuffer:
        try:
            descriptor = os.open(f"/proc/{sent.process}/fd/{sent.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise DamagedWeights(f"memory of process {sent.process} cannot be opened: {error.strerror}") from error
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_size) != (sent.inode, sent.size):
            os.close(descriptor)
            raise DamagedWeights("newer ones lie in their place")
        return SharedBuffer(descriptor, sent.size, self.pinned)


def places(layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor in one flat buffer, in bytes, and the size of the buffer in bytes."""
    starts, size = {}, 0
    for name, (shape, dtype) in layout.items():
        starts[name] = size
        size += -(-torch.Size(shape).numel() * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return starts, max(size, ALIGNMENT)
