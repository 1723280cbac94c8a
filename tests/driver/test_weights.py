"""Weights that change on their way are noticed, named, refused, and sent again."""

import asyncio
import dataclasses
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bebop.driver.protocols import DamagedWeights
from bebop.driver.weights import (
    BLOCK,
    CheckedWeights,
    SharedReader,
    SharedWeights,
    WeightBuffers,
    checksum,
    verify_weights,
    with_manifest,
)
from bebop.errors import UserError
from tests.fakes import FakeWorker, go, in_order, job, make
from tests.rollout.test_worker import exact, worker

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int8]


def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    big = torch.randn(3 * BLOCK, generator=generator)
    return {"a": big, "b": torch.randn(5, 7, generator=generator).bfloat16(), "empty": torch.zeros(0), "one": big[0]}


def test_what_arrives_whole_is_taken() -> None:
    sent = with_manifest(weights())
    assert verify_weights(sent) is sent.weights
    assert verify_weights(with_manifest({})) == {}


@pytest.mark.parametrize("dtype", DTYPES)
def test_readers_map_the_bytes_instead_of_copying_them(dtype: torch.dtype) -> None:
    """Ray lays what is pickled out of band into shared memory, which every reader of a node maps."""
    sent = with_manifest({**weights(), "more": torch.arange(60).reshape(3, 4, 5).to(dtype).transpose(0, 2)})
    buffers: list[pickle.PickleBuffer] = []
    stream = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    size = sum(tensor.numel() * tensor.element_size() for tensor in sent.weights.values())
    assert sum(buffer.raw().nbytes for buffer in buffers) == size and len(stream) < 4000
    shared = [bytearray(buffer.raw()) for buffer in buffers]
    got = verify_weights(pickle.loads(stream, buffers=[memoryview(one).toreadonly() for one in shared]))
    assert all(
        torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in sent.weights.items()
    )
    assert got.keys() == sent.weights.keys()
    before = got["a"].clone()
    shared[0][2] ^= 1
    assert not torch.equal(got["a"], before), "a copy would not have changed"


def test_weights_arrive_whole_without_shared_memory() -> None:
    sent = with_manifest(weights())
    got = verify_weights(pickle.loads(pickle.dumps(sent, protocol=4)))
    assert all(torch.equal(got[name], tensor) for name, tensor in sent.weights.items())


def damaged(change: str) -> CheckedWeights:
    sent = with_manifest(weights())
    there = {name: tensor.clone() for name, tensor in sent.weights.items()}
    a, b = there["a"], there["b"]
    if change == "cut short":
        there["a"] = a[:-1]
    elif change == "lost":
        del there["b"]
    elif change == "foreign":
        there["c"] = b
    elif change == "another dtype":
        there["b"] = b.half()
    elif change == "turned":
        there["b"] = b.T
    elif change == "a bit":
        b.view(torch.int16)[4, 6] ^= 1
    elif change == "nulls":
        a[BLOCK : BLOCK + 16] = 0
    elif change == "blocks swapped":
        there["a"] = torch.cat([a[2 * BLOCK :], a[: 2 * BLOCK]])
    return dataclasses.replace(sent, weights=there)


CHANGES = {
    "cut short": r"a: torch.float32 \[12287\] instead of torch.float32 \[12288\]",
    "lost": "b is missing",
    "foreign": "c was never sent",
    "another dtype": "b: torch.float16",
    "turned": r"b: torch.bfloat16 \[7, 5\]",
    "a bit": "b: contents differ",
    "nulls": "a: contents differ",
    "blocks swapped": "a: contents differ",
}


@pytest.mark.parametrize("change", CHANGES)
def test_damage_is_noticed_and_named(change: str) -> None:
    with pytest.raises(DamagedWeights, match=CHANGES[change]):
        verify_weights(damaged(change))


@settings(deadline=None, derandomize=True, max_examples=30)
@given(st.integers(0, 3 * BLOCK), st.sampled_from(DTYPES), st.data())
def test_every_bit_counts(size: int, dtype: torch.dtype, data: st.DataObject) -> None:
    tensor = torch.arange(size).to(dtype)
    before, same = checksum(tensor), checksum(tensor.clone())
    assert before == same
    if size:
        raw = tensor.view(torch.uint8)
        place, bit = data.draw(st.integers(0, raw.numel() - 1)), data.draw(st.integers(0, 7))
        raw[place] ^= 1 << bit
        assert checksum(tensor) != before


def test_a_worker_refuses_damaged_weights_and_keeps_its_own() -> None:
    one, other = worker(), exact(seed=5)
    sent = with_manifest({name: tensor.detach().clone() for name, tensor in other.weights().items()})
    name = next(iter(sent.weights))
    bad = dataclasses.replace(sent, weights={**sent.weights, name: sent.weights[name] * 2})
    with pytest.raises(DamagedWeights, match=f"{name}: contents differ"):
        one.set_weights(bad, 3)
    one.turn()
    assert one.engine.version == 0
    one.set_weights(sent, 3)
    one.turn()
    assert one.engine.version == 3


@dataclass(kw_only=True)
class Refusing(FakeWorker):
    """The first ``bad`` weights of each version arrive damaged."""

    bad: int = 1
    tries: int = 0

    async def set_weights(self, weights: Any, version: int) -> None:
        self.tries += 1
        if self.tries % (self.bad + 1):
            await asyncio.sleep(0)
            raise DamagedWeights("w: contents differ")
        await super().set_weights(weights, version)


@pytest.mark.parametrize("staleness", [0, 1])
def test_damaged_weights_are_sent_again_before_any_prompt_of_their_version(staleness: int) -> None:
    one, other = Refusing(bad=2), FakeWorker()
    loop, trainer, _ = make(job(steps=4, staleness=staleness), one, other)
    assert go(loop) and trainer.batches == in_order(4)
    assert loop.pool.restarts == 0 and max(trainer.lags) <= staleness
    assert all(version >= 0 for version, _ in one.submitted)


def test_a_worker_that_weights_never_reach_is_replaced_and_not_for_ever() -> None:
    loop, _, _ = make(job(steps=4, max_restarts=2), Refusing(bad=10**6))
    with pytest.raises(UserError, match="weights of version 0 arrived 3 times damaged: w: contents differ"):
        go(loop)


def test_of_two_sets_of_weights_the_later_one_stays() -> None:
    """Both arrive before the worker gets round to them."""
    policy = exact()
    one = worker(policy=policy)
    sent = {v: {n: w.detach() + v for n, w in policy.weights().items()} for v in (1, 2)}
    for version, weights in sent.items():
        one.set_weights(weights, version)
    one.turn()
    assert one.engine.version == 2
    assert all(torch.equal(w.detach(), sent[2][n]) for n, w in policy.weights().items())


# ---- memory that processes share


def written(buffers: WeightBuffers, named: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> SharedWeights:
    """What a worker is given."""
    layout = {name: (tuple(tensor.shape), dtype or tensor.dtype) for name, tensor in named.items()}
    sent: SharedWeights = pickle.loads(pickle.dumps(buffers.write(iter(named.items()), layout)))
    return sent


def test_shared_weights_arrive_to_the_bit_and_uncopied() -> None:
    buffers, reader = WeightBuffers(), SharedReader()
    named = {**weights(), "turned": torch.arange(60).reshape(3, 4, 5).transpose(0, 2), "bits": torch.ones(3).bool()}
    sent = written(buffers, named)
    assert len(pickle.dumps(sent)) < 4000
    got, _ = reader.open(sent)
    assert got.keys() == named.keys()
    assert all(torch.equal(got[name], tensor) and got[name].dtype == tensor.dtype for name, tensor in named.items())
    buffers._buffers[0].bytes[sent.starts["a"]] ^= 1
    assert not torch.equal(got["a"], named["a"]), "a copy would not have changed"
    half, _ = reader.open(written(buffers, {"a": named["a"]}, torch.bfloat16))
    assert torch.equal(half["a"], named["a"].bfloat16())
    assert reader.open(written(buffers, {}))[0] == {}


def test_publications_take_turns_in_two_buffers() -> None:
    """The newest one stays readable while the next is written, for a worker that is replaced meanwhile."""
    buffers, reader = WeightBuffers(), SharedReader()
    sent = [written(buffers, {"a": torch.full((7,), float(version))}) for version in range(3)]
    assert sent[0].inode == sent[2].inode != sent[1].inode
    assert [float(reader.open(one)[0]["a"][0]) for one in sent[1:]] == [1.0, 2.0]
    with pytest.raises(DamagedWeights, match="a: contents differ"):
        reader.open(sent[0])


def test_a_buffer_that_is_read_is_never_written_to() -> None:
    buffers, reader = WeightBuffers(), SharedReader()
    first = written(buffers, {"a": torch.zeros(7)})
    (got, release), (_, again) = reader.open(first), reader.open(first)
    release()
    for version in (1.0, 2.0, 3.0):
        written(buffers, {"a": torch.full((7,), version)})
        assert not got["a"].any()
    again()
    one, two = buffers._buffers
    assert one.lock(writing=True)
    oldest = dataclasses.replace(first, descriptor=one.descriptor, inode=one.inode)
    with pytest.raises(DamagedWeights, match="newer ones are being written in their place"):
        reader.open(oldest)
    one.unlock()
    assert written(buffers, {"a": torch.zeros(7)}).inode == one.inode != two.inode


@pytest.mark.parametrize("name", ["a", "b", "one"])
def test_damage_in_shared_memory_is_noticed_and_named(name: str) -> None:
    buffers, reader = WeightBuffers(), SharedReader()
    sent = written(buffers, weights())
    buffers._buffers[0].bytes[sent.starts[name] + 3] ^= 16
    with pytest.raises(DamagedWeights, match=f"{name}: contents differ"):
        reader.open(sent)
    buffers._buffers[0].bytes[sent.starts[name] + 3] ^= 16
    got, release = reader.open(sent)
    assert torch.equal(got[name], weights()[name])
    release()
    assert buffers._buffers[0].lock(writing=True), "the refused reading gave its lock back"


def test_memory_that_is_not_there_is_refused() -> None:
    buffers, reader = WeightBuffers(), SharedReader()
    sent = written(buffers, weights())
    for change, why in (
        ({"machine": "another"}, "another machine"),
        ({"descriptor": 10**6}, "cannot be opened: No such file"),
        ({"process": 2**22}, "cannot be opened: No such file"),
        ({"inode": sent.inode + 1}, "newer ones lie in their place"),
    ):
        with pytest.raises(DamagedWeights, match=why):
            reader.open(dataclasses.replace(sent, **change))  # type: ignore[arg-type]


def test_a_worker_reads_shared_memory_until_it_has_loaded() -> None:
    one, other, buffers = worker(), exact(seed=5), WeightBuffers()
    named = {name: tensor.detach() for name, tensor in other.weights().items()}
    one.set_weights(written(buffers, named), 3)
    assert not buffers._buffers[0].lock(writing=True)
    one.turn()
    assert buffers._buffers[0].lock(writing=True)
    found = one.engine.policy.weights()  # type: ignore[attr-defined]
    assert one.engine.version == 3 and all(torch.equal(found[name], tensor) for name, tensor in named.items())


@pytest.mark.slow
def test_the_lock_of_a_reader_that_is_killed_ends_with_it() -> None:
    """It maps the memory of this process as a worker does."""
    buffers, named = WeightBuffers(), {"a": torch.arange(9.0)}
    sent = written(buffers, named)
    code = (
        "import pickle, sys, time\n"
        "from bebop.driver.weights import SharedReader\n"
        "got, _ = SharedReader().open(pickle.load(sys.stdin.buffer))\n"
        "print(got['a'].tolist(), flush=True)\n"
        "time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    pickle.dump(sent, process.stdin)
    process.stdin.close()
    try:
        assert process.stdout.readline().decode().strip() == str(named["a"].tolist())
        assert not buffers._buffers[0].lock(writing=True)
    finally:
        process.kill()
        process.wait()
    assert buffers._buffers[0].lock(writing=True)


@pytest.mark.slow
def test_copies_on_the_way_to_the_embedded_engine() -> None:
    """Into shared memory and out of it; with the object store, and with a broadcast between machines, one more."""
    from bebop.bench.gpu.models import TINY  # with modeling code, 4.2 s of processor time
    from bebop.bench.publish import Publishing

    both = Publishing(TINY)
    for way, copies in (("store", 3), ("shared", 2), ("broadcast", 3)):
        assert both.copies(both.embedded, way) == copies and both.arrived()
