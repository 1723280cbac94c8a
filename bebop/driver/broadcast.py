"""Weights by a collective broadcast: the trainer's rank 0 sends them to one receiver on each machine.

Both ends are memory that the processes of a machine map (``bebop.driver.weights``). So a broadcast crosses the network
once for each machine, runs beside training and decoding, and ends before an engine stops for the weights. The group is
no default group of torch.distributed: a rank of the trainer may be in that one already.

Invariants:

- No end waits for ever. The death of a member closes its connections, at which the others fail one after another. The
  others give up on a member that stops, or whose machine is gone, after ``Meeting.timeout`` seconds of one bucket.
- A failure ends the group, since its members may have passed different numbers of buckets. The next broadcast forms a
  new group.
- A receiver returns the place of the weights once all buckets have arrived. The process that reads the weights compares
  the checksums.
"""

import os
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from bebop.driver.protocols import DamagedWeights
from bebop.driver.weights import CheckedWeights, SharedReader, SharedWeights, WeightBuffers

LOOPBACK = "127.0.0.1"
TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
Backend = Literal["nccl", "gloo"]
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Address and settings of one group, by which its members connect.

    >>> Meeting(host="10.0.0.1", port=40123, members=3, backend="gloo", timeout=30.0, bucket=2**28)  # doctest: +SKIP
    """

    host: str  # address of rank 0's machine
    port: int  # of the store through which members find one another
    members: int
    backend: Backend
    timeout: float  # seconds, for forming the group and for each bucket
    bucket: int  # bytes


class Member:
    """One end of a group. A call with another meeting makes it join a new group; calls run one at a time."""

    def __init__(self, device: torch.device) -> None:
        """Begin without a group.

        ``device``: device of this process; NCCL sends from its memory, gloo from that of the host.
        """
        self.device = device
        self._meeting: Meeting | None = None
        self._store: Any = None  # of rank 0 alone
        self._group: Any = None
        self._bucket: Tensor | None = None  # on the GPU, for NCCL
        self._stream: Any = None  # its own, so that copies do not wait for other work of the process
        self._busy = threading.Lock()

    def open(self, host: str, timeout: float) -> int | str:
        """Open the store of the next meeting on this machine and return its port, or the reason of a failure.

        It listens only on the address ``host``.
        """
        with self._busy:
            self._close()
            try:
                listener = socket.create_server((host, 0), backlog=128)
                port = int(listener.getsockname()[1])
                self._store = TCPStore(
                    host, port, None, True, timedelta(seconds=timeout), False, master_listen_fd=listener.detach()
                )
            except (RuntimeError, OSError) as error:
                return f"nothing can listen on {host}: {error}"
            return port

    def broadcast(self, meeting: Meeting, rank: int, memory: Tensor) -> str:
        """Send the bytes [n] of ``memory``, as rank 0, or receive them there.

        Returns the reason of a failure, or an empty text.
        """
        with self._busy:
            try:
                if meeting != self._meeting:
                    self._meet(meeting, rank)
                for part in memory.split(meeting.bucket):
                    self._pass(meeting, rank, part)
            except (RuntimeError, OSError) as error:  # gloo, NCCL and the store raise RuntimeErrors of their own
                self._close()
                return (str(error).strip() or repr(error)).splitlines()[0]
        return ""

    def close(self) -> None:
        """Leave the group; members that wait for this one fail."""
        with self._busy:
            self._close()

    def _close(self) -> None:
        if self._group is not None and self._meeting is not None and self._meeting.backend == "nccl":
            self._group.abort()  # else its threads go on until the other members answer
            self._stream.synchronize()  # its bucket may be given to others from now on
        self._group = self._meeting = self._store = self._bucket = None

    def _meet(self, meeting: Meeting, rank: int) -> None:
        """Wait for the other members of a meeting."""
        timeout = timedelta(seconds=meeting.timeout)
        if rank:
            self._close()
            store = TCPStore(meeting.host, meeting.port, None, False, timeout, False)
        else:
            assert self._store is not None, "rank 0 opens the store"
            store = self._store
        if meeting.backend == "gloo":
            options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=_own_address(meeting))]
            options._timeout = timeout
            self._group = dist.ProcessGroupGloo(store, rank, meeting.members, options)
        else:
            self._group = self._nccl(store, rank, meeting)
        self._meeting = meeting

    def _nccl(self, store: Any, rank: int, meeting: Meeting) -> Any:
        """Return a group of NCCL whose failures do not end this process.

        PyTorch would end it by default, since it cannot tell that ``_pass`` waits for the failure.
        """
        kind: Any = dist.ProcessGroupNCCL
        options = kind.Options()
        options._timeout = timedelta(seconds=10 * meeting.timeout)  # ours expires first
        torch.cuda.set_device(self.device.index or 0)
        self._stream = torch.cuda.Stream(self.device)
        # Memory of this stream: that of another one may still be read by kernels in its queue.
        with torch.cuda.stream(self._stream):
            self._bucket = torch.empty(meeting.bucket, dtype=torch.uint8, device=self.device)
        before = os.environ.get(NCCL_ERRORS)
        os.environ[NCCL_ERRORS] = "2"  # a failure closes the group alone
        try:
            return kind(store, rank, meeting.members, options)
        finally:
            if before is None:
                del os.environ[NCCL_ERRORS]
            else:
                os.environ[NCCL_ERRORS] = before

    def _pass(self, meeting: Meeting, rank: int, part: Tensor) -> None:
        """Send or receive one bucket."""
        timeout = timedelta(seconds=meeting.timeout)
        if self._bucket is None:
            self._group.broadcast([part], _from_rank_0(timeout)).wait(timeout)
            return
        with torch.cuda.stream(self._stream):
            there = self._bucket[: len(part)]
            if not rank:
                there.copy_(part)
            self._group.broadcast([there], _from_rank_0(timeout)).wait(timeout)
            if rank:
                part.copy_(there)


def _from_rank_0(timeout: timedelta) -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank, options.timeout = 0, timeout
    return options


def _own_address(meeting: Meeting) -> str:
    """Return the address of this machine on its route to rank 0."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((meeting.host, meeting.port))  # nothing is sent
        return str(probe.getsockname()[0])


class WeightSender:
    """The trainer's end, which runs beside its updates: it sends publications from memory of its machine."""

    def __init__(self, device: torch.device) -> None:
        self.member, self.reader = Member(device), SharedReader(pinned=device.type == "cuda")

    def send(self, meeting: Meeting, sent: SharedWeights) -> str:
        """Send a publication as rank 0; return the reason of a failure, or an empty text."""
        try:
            buffer, release = self.reader.lock(sent)
        except DamagedWeights as damage:  # newer weights replaced it; the receivers must not wait for it
            self.member.close()
            return str(damage)
        try:
            return self.member.broadcast(meeting, 0, buffer.bytes)
        finally:
            release()

    def stored(self, sent: SharedWeights) -> CheckedWeights:
        """Return a publication for a process that no broadcast has reached.

        Raises:
            DamagedWeights: A newer publication replaced it.
        """
        weights, release = self.reader.open(sent)
        release()  # checksums reveal a write that happens while it is pickled
        return CheckedWeights(weights=weights, manifest=sent.manifest)


class WeightReceiver:
    """A machine's end, in one of its rollout workers. Publications alternate between two buffers, as in the trainer."""

    def __init__(self, device: torch.device) -> None:
        self.member, self.buffers, self.pinned = Member(device), WeightBuffers(), device.type == "cuda"

    def receive(self, meeting: Meeting, rank: int, sent: SharedWeights) -> SharedWeights | str:
        """Receive the publication that ``sent`` describes.

        Returns its place in memory of this machine, or the reason of a failure.
        """
        buffer = self.buffers.locked(sent.size, self.pinned)
        try:
            failure = self.member.broadcast(meeting, rank, buffer.bytes)
        finally:
            buffer.unlock()
        return failure or buffer.describe(sent.starts, sent.manifest)
