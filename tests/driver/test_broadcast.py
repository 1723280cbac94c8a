"""Weights that are broadcast arrive to the bit, in spare memory, or the broadcast ends with its reason."""

import dataclasses
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from bebop.driver.broadcast import LOOPBACK, Meeting, WeightReceiver, WeightSender
from bebop.driver.protocols import DamagedWeights
from bebop.driver.weights import SharedReader, SharedWeights, WeightBuffers
from tests.driver.test_weights import weights, written

CPU = torch.device("cpu")


def meet(sender: WeightSender, receivers: int, bucket: int = 1 << 20, timeout: float = 20.0) -> Meeting:
    port = sender.member.open(LOOPBACK, timeout)
    assert isinstance(port, int), port
    return Meeting(host=LOOPBACK, port=port, members=1 + receivers, backend="gloo", timeout=timeout, bucket=bucket)


def passed(
    sender: WeightSender, receivers: list[WeightReceiver], meeting: Meeting, sent: SharedWeights
) -> list[SharedWeights | str]:
    """Broadcast with a thread for each member, and return what each receiver says."""
    with ThreadPoolExecutor(len(receivers) + 1) as threads:
        sending = threads.submit(sender.send, meeting, sent)
        asked = [threads.submit(one.receive, meeting, rank, sent) for rank, one in enumerate(receivers, 1)]
        assert sending.result() == ""
        return [one.result() for one in asked]


@pytest.mark.parametrize("bucket", [20_000, *(pytest.param(n, marks=pytest.mark.slow) for n in (1 << 20, 1000, 64))])
def test_weights_arrive_to_the_bit_in_buckets_of_any_size(bucket: int) -> None:
    """The last bucket is short, or the only one."""
    buffers, sender, receivers = WeightBuffers(), WeightSender(CPU), [WeightReceiver(CPU) for _ in range(2)]
    meeting = meet(sender, 2, bucket)
    for version in range(2 if bucket == 20_000 else 1):
        named = {name: tensor + version for name, tensor in weights().items()}
        for found in passed(sender, receivers, meeting, written(buffers, named)):
            assert isinstance(found, SharedWeights)
            got, release = SharedReader().open(pickle.loads(pickle.dumps(found)))
            assert got.keys() == named.keys() and all(torch.equal(got[name], t) for name, t in named.items())
            release()


def test_a_publication_is_read_while_the_next_arrives() -> None:
    """An engine may still load from the buffer that was filled last; the third publication takes a new one then."""
    buffers, sender, receiver, reader = WeightBuffers(), WeightSender(CPU), WeightReceiver(CPU), SharedReader()
    meeting, held = meet(sender, 1), []
    for version in range(3):
        sent = written(buffers, {"a": torch.full((700,), float(version))})
        (found,) = passed(sender, [receiver], meeting, sent)
        assert isinstance(found, SharedWeights)
        held.append((found.inode, reader.open(found)[0]["a"]))
    assert [set(tensor.tolist()) for _, tensor in held] == [{0.0}, {1.0}, {2.0}]
    assert len({inode for inode, _ in held}) == 3


def test_a_broadcast_that_was_damaged_is_noticed_by_who_reads_it() -> None:
    buffers, sender, receiver = WeightBuffers(), WeightSender(CPU), WeightReceiver(CPU)
    sent = written(buffers, weights())
    (found,) = passed(sender, [receiver], meet(sender, 1), sent)
    assert isinstance(found, SharedWeights)
    receiver.buffers._buffers[-1].bytes[found.starts["b"]] ^= 1
    with pytest.raises(DamagedWeights, match="b: contents differ"):
        SharedReader().open(found)


def test_what_was_overtaken_is_not_sent_and_nobody_waits_for_it() -> None:
    buffers, sender, receiver = WeightBuffers(), WeightSender(CPU), WeightReceiver(CPU)
    sent = written(buffers, weights())
    meeting = meet(sender, 1)
    assert isinstance(*passed(sender, [receiver], meeting, sent), SharedWeights)
    overtaken, began = dataclasses.replace(sent, inode=sent.inode + 1), time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(receiver.receive, meeting, 1, sent)
        assert sender.send(meeting, overtaken) == "newer ones lie in their place"
        assert isinstance(waiting.result(), str) and time.monotonic() - began < meeting.timeout / 2, "it hears of it"
    assert isinstance(*passed(sender, [receiver], meet(sender, 1), sent), SharedWeights), "they meet anew"


# A receiver that sends itself a signal after its second bucket.
ENDING = """
import os, pickle, sys, torch
from bebop.driver.broadcast import Member, WeightReceiver

receive, passed = Member._pass, []

def counted(self, *more):
    passed.append(receive(self, *more))
    if len(passed) == 2:
        os.kill(os.getpid(), end)

Member._pass = counted
print("ready", flush=True)
meeting, sent, end = pickle.load(sys.stdin.buffer)
WeightReceiver(torch.device("cpu")).receive(meeting, 2, sent)
"""


@pytest.mark.slow
def test_an_address_that_is_not_this_machine_s_is_a_reason_and_no_error() -> None:
    found = WeightSender(CPU).member.open("203.0.113.1", 5.0)
    assert isinstance(found, str) and found.startswith("nothing can listen on 203.0.113.1: ")


@pytest.mark.slow
@pytest.mark.parametrize(("end", "timeout"), [(signal.SIGKILL, 60.0), (signal.SIGSTOP, 3.0)])
def test_a_member_that_ends_or_stops_in_the_middle_holds_up_nobody(end: signal.Signals, timeout: float) -> None:
    """Its death is noticed at once, its silence after the time for one bucket; the others go on without it."""
    buffers, sender, receiver = WeightBuffers(), WeightSender(CPU), WeightReceiver(CPU)
    sent = written(buffers, {"a": torch.arange(1 << 23, dtype=torch.float32)})  # more than sockets buffer
    process = subprocess.Popen([sys.executable, "-c", ENDING], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    try:
        assert process.stdout.readline() == b"ready\n"
        meeting = meet(sender, 2, bucket=1 << 22, timeout=timeout)
        pickle.dump((meeting, sent, int(end)), process.stdin)
        process.stdin.close()
        began = time.monotonic()
        with ThreadPoolExecutor(2) as threads:
            sending = threads.submit(sender.send, meeting, sent)
            receiving = threads.submit(receiver.receive, meeting, 1, sent)
            assert sending.result() and isinstance(receiving.result(), str)
        assert time.monotonic() - began < 30
    finally:
        process.kill()
        process.wait()
    assert isinstance(*passed(sender, [receiver], meet(sender, 1), sent), SharedWeights), "they meet without it"


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL refuses two members on one GPU")
def test_weights_arrive_over_nccl_into_pinned_memory() -> None:
    gpus = [torch.device("cuda", number) for number in range(2)]
    buffers, sender, receiver = WeightBuffers(), WeightSender(gpus[0]), WeightReceiver(gpus[1])
    meeting = dataclasses.replace(meet(sender, 1, bucket=20_000, timeout=60.0), backend="nccl")
    for version in range(2):
        named = {name: tensor.to(gpus[0]) + version for name, tensor in weights().items()}
        (found,) = passed(sender, [receiver], meeting, written(buffers, named))
        assert isinstance(found, SharedWeights)
        got, _ = SharedReader(pinned=True).open(found)
        assert all(torch.equal(got[name], tensor.cpu()) for name, tensor in named.items())
        assert all(tensor.is_pinned() for tensor in got.values() if tensor.numel())
