"""Weights that are broadcast arrive to the bit, in spare memory, or the broadcast ends with its reason."""

import dataclasses
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from bebop.driver.broadcast import LOOPBACK, Meeting, WeightReceiver, WeightSender
from bebop.driver.protocols import DamagedWeights
from bebop.driver.weights import SharedReader, SharedWeights, WeightBuffers
from tests.driver.test_weights import weights, written

CPU = torch.device("cpu")


def meet(sender: WeightSender, receivers: int, bucket: int = 1 << 20, timeout: float = 20.0) -> Meeting:
    port = sender.member.open(LOOPBACK, timeout)
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


@pytest.mark.parametrize("bucket", [1 << 20, 1000, 64])
def test_weights_arrive_to_the_bit_in_buckets_of_any_size(bucket: int) -> None:
    """Of 49,664 bytes, the last bucket is short, or the only one."""
    buffers, sender, receivers = WeightBuffers(), WeightSender(CPU), [WeightReceiver(CPU) for _ in range(2)]
    meeting = meet(sender, 2, bucket)
    for version in range(2 if bucket == 1000 else 1):
        named = {name: tensor + version for name, tensor in weights().items()}
        for found in passed(sender, receivers, meeting, written(buffers, named)):
            assert isinstance(found, SharedWeights)
            got, release = SharedReader().open(pickle.loads(pickle.dumps(found)))
            assert got.keys() == named.keys() and all(torch.equal(got[name], t) for name, t in named.items())
            release()
