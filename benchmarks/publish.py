"""Publication of weights from trainer to engine: copies of the model, total seconds, and seconds of paused decoding.

Copies are counted where they happen. A dispatch mode of PyTorch counts them, moves to shared memory included. The bytes
pickled for the object store and those that a broadcast passes on are added. The broadcast goes by gloo over loopback
between threads of this process, as it would between machines. The object store is counted within one machine, where
readers map it. SGLang's half is its own deserialisation and ``copy_``, as its loaders call it, in this process. The
seconds exclude the other work of its processes (messages, checksums).
"""

import asyncio
import gc
import mmap
import pickle
import statistics
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bebop.bench.gpu.models import SHAPES, Shape, policy_of
from bebop.bench.record import noted
from bebop.config.engines import SglangConfig
from bebop.config.job import DecodingConfig, JobConfig, ModelConfig
from bebop.driver.broadcast import LOOPBACK, Meeting, WeightReceiver, WeightSender
from bebop.driver.weights import CheckedWeights, SharedWeights, WeightBuffers, with_manifest
from bebop.model.layouts import split_experts
from bebop.rollout.served_weights import update
from bebop.rollout.torch_engine import TorchEngine
from bebop.rollout.worker import RolloutWorker
from bebop.trainer.policy import PolicyTrainer

ops: Any = torch.ops.aten
WRITES = {ops.copy_: 0, ops._to_copy: None, ops.clone: None, ops.cat: None}  # None: the result is written
CPU = torch.device("cpu")
WAYS = ("store", "shared", "broadcast")
TIMEOUT = 60.0  # seconds, for a bucket over loopback


class Copies(TorchDispatchMode):
    """Counts the bytes that copies write, as the dtype of weights or as plain bytes.

    Checksums and fingerprints read weights as integers and copy nothing that is counted.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtypes, self.bytes = {dtype, torch.uint8}, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in WRITES:
            place = WRITES[func.overloadpacket]
            self.add(out if place is None else args[place])
        return out

    def add(self, tensor: Tensor) -> None:
        """Count a tensor that was written."""
        if tensor.dtype in self.dtypes:
            self.bytes += tensor.numel() * tensor.element_size()


class ObjectStore:
    """Model of Ray's object store: it copies pickled weights into shared memory once, and readers map it."""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, mmap.PAGESIZE)
        self.bytes = 0  # copied last

    def passed(self, sent: CheckedWeights) -> CheckedWeights:
        """Return the weights as a reader gets them."""
        buffers: list[pickle.PickleBuffer] = []
        stream = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
        raw = [buffer.raw() for buffer in buffers]
        self.bytes = sum(one.nbytes for one in raw)
        if len(self.memory) < self.bytes:
            self.memory = mmap.mmap(-1, self.bytes)
        views, start, whole = list[memoryview](), 0, memoryview(self.memory)
        for one in raw:
            whole[start : start + one.nbytes] = one
            views.append(whole[start : start + one.nbytes].toreadonly())
            start += one.nbytes
        read: CheckedWeights = pickle.loads(stream, buffers=views)
        return read


@dataclass(slots=True, kw_only=True)
class Scheduler:
    """SGLang's end: a backend that loads the weights it receives into a model, and records its pauses."""

    model: Mapping[str, Tensor]  # under the names of checkpoints
    pauses: list[float] = field(default_factory=list)
    since: float = 0.0
    redrawn: int = 0  # it draws no completions

    async def start(self) -> None:
        """Do nothing: it needs no start."""

    async def generate(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Fail: this backend does not decode."""
        raise AssertionError("it only loads")

    def dead(self) -> str | None:
        """Return None: it is alive."""
        return None

    async def close(self) -> None:
        """Do nothing: nothing was started."""

    async def control(self, name: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Do the work of SGLang in this call."""
        if name == "pause_generation":
            self.since = time.perf_counter()
        elif name == "continue_generation":
            self.pauses.append(time.perf_counter() - self.since)
        elif name == "update_weights_from_tensor":
            tools = import_module("sglang.srt.utils").MultiprocessingSerializer
            flat = tools.deserialize(payload["serialized_named_tensors"][0])
            bucket = import_module("sglang.srt.weight_sync.tensor_bucket").FlattenedTensorBucket(**flat)
            for weight, tensor in bucket.reconstruct_tensors():
                self.model[weight].copy_(tensor)
        return {"success": True}


class Loopback:
    """Broadcast by gloo to one receiver, as if on another machine."""

    def __init__(self, bucket: int) -> None:
        self.sender, self.receiver, self.bytes = WeightSender(CPU), WeightReceiver(CPU), 0  # passed on last
        port = self.sender.member.open(LOOPBACK, TIMEOUT)
        assert isinstance(port, int), port
        self.meeting = Meeting(
            host=LOOPBACK, port=port, members=2, backend="gloo", timeout=TIMEOUT, bucket=bucket << 20
        )
        self.threads = ThreadPoolExecutor(1)

    def passed(self, sent: SharedWeights) -> SharedWeights:
        """Return the receiver's copy of the weights."""
        sending = self.threads.submit(self.sender.send, self.meeting, sent)
        found = self.receiver.receive(self.meeting, 1, sent)
        failure = sending.result()
        assert isinstance(found, SharedWeights) and not failure, f"{failure} {found}"
        self.bytes = sum(
            torch.Size(one.shape).numel() * getattr(torch, one.dtype.removeprefix("torch.")).itemsize
            for one in sent.manifest.values()
        )
        return found


class Publishing:
    """Trainer and engine with random weights of one shape, and the ways between them."""

    def __init__(self, shape: Shape, device: torch.device = CPU) -> None:
        self.device = device
        config = JobConfig(model=ModelConfig(dtype="bfloat16", device=device.type), decoding=DecodingConfig())
        self.trainer, policy = PolicyTrainer(policy_of(shape, device), config), policy_of(shape, device)
        engine = TorchEngine(policy, config.decoding, slots=1, max_length=8)
        self.worker = RolloutWorker(engine, lambda text, prompt: 0.0, config, (0,))
        self.policy, self.buffers, self.store, self.version = policy, WeightBuffers(), ObjectStore(), 0
        self.loopback = Loopback(config.trainer.broadcast.bucket)
        self.forget()
        layout = self.trainer.layout().values()
        self.bytes = sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout)

    def sent(self, way: str) -> CheckedWeights | SharedWeights:
        """Return the trainer's weights as a worker receives them."""
        if way == "store":
            return self.store.passed(with_manifest(self.trainer.weights()))
        found: SharedWeights = pickle.loads(
            pickle.dumps(self.buffers.write(self.trainer.full_weights(), self.trainer.layout()))
        )
        return found if way == "shared" else self.loopback.passed(found)

    def embedded(self, way: str) -> tuple[float, float]:
        """Publish to the embedded engine; return the total seconds and the seconds of the pause."""
        began, self.version = time.perf_counter(), self.version + 1
        self.worker.set_weights(self.sent(way), self.version)
        self.worker.turn()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began, self.worker.thread.progress().swap

    def sglang(self, way: str) -> tuple[float, float]:
        """Publish to SGLang; return the total seconds and the seconds of the pause.

        Before shared memory existed, weights were flattened during the pause; the object store's arm still does this.
        """
        from bebop.rollout.sglang.engine import SglangServer  # its HTTP client is not everywhere
        from bebop.rollout.sglang.transfer import TensorTransfer

        class InPause(TensorTransfer):
            """The earlier way: the pause begins with the copies."""

            async def prepare(self, *args: Any, **more: Any) -> Any:
                async def send() -> None:
                    await (await TensorTransfer.prepare(self, *args, **more))()

                return send

        names = {name.removeprefix("backbone."): p.data for name, p in self.policy.weights().items()}
        scheduler = Scheduler(model=split_experts(names))
        server = SglangServer(
            scheduler,
            (InPause if way == "store" else TensorTransfer)(1, False),
            {},
            SglangConfig(pause="in_place"),
            drafts=0,
            drafter="none",
            to_update=lambda weights, version: update(weights, version, "mimo", 1),
            dtype=torch.bfloat16,
            rescored=False,
        )
        began, sent = time.perf_counter(), self.sent(way)
        weights, release = self.worker.received(sent)
        asyncio.run(server.load(weights, 1))
        release()
        return time.perf_counter() - began, scheduler.pauses[0]

    def copies(self, engine: Callable[[str], object], way: str) -> float:
        """Return the bytes that a way copies per byte of weights. A first run allocates the buffers that are reused."""
        self.forget()
        engine(way)
        counter = Copies(torch.bfloat16)
        with counter:
            engine(way)
        passed = {"store": self.store.bytes, "shared": 0, "broadcast": self.loopback.bytes}
        return (counter.bytes + passed[way]) / self.bytes

    def forget(self) -> None:
        """Clear the engine's weights, which would otherwise equal the trainer's before they arrive."""
        for parameter in self.policy.weights().values():
            parameter.data.zero_()

    def arrived(self) -> bool:
        """Return whether the engine has the trainer's weights bit for bit."""
        own = self.policy.weights()
        return all(torch.equal(own[name].cpu(), tensor) for name, tensor in self.trainer.weights().items())


def run(rounds: int, shape: Shape = SHAPES["SmolLM2-135M"]) -> list[dict[str, Any]]:
    """Return a row for each engine: copies, and median seconds by object store, shared memory and broadcast.

    The three take turns. The row also has the ratios of the latter two to the first.
    """
    both, rows = Publishing(shape), list[dict[str, Any]]()
    engines: dict[str, Callable[[str], tuple[float, float]]] = {"embedded": both.embedded}
    if find_spec("sglang"):
        engines["SGLang"] = both.sglang
    for engine, publish in engines.items():
        row: dict[str, Any] = {"engine": engine, "GB": both.bytes / 1e9}
        for way in WAYS:
            row[f"copies, {way}"] = both.copies(publish, way)
        seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
        gc.collect()
        for turn in range(rounds):
            for way in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:  # no arm always goes first
                seconds[way].append(publish(way))
                noted({"engine": engine, "arm": way, "s": seconds[way][-1][0], "pause s": seconds[way][-1][1]})
        for place, what in enumerate(("s", "pause s")):
            middle = {way: statistics.median(one[place] for one in found) for way, found in seconds.items()}
            row |= {f"{what}, {way}": middle[way] for way in WAYS}
            row[f"{what}, ratio"] = middle["shared"] / middle["store"]
            row[f"{what}, ratio of broadcast"] = middle["broadcast"] / middle["store"]
        rows.append(row)
    return rows
