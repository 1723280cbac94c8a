"""Ways to transfer weights to SGLang: handles of shared memory, a process group, a folder.

Each has two halves. ``prepare`` copies and flattens while SGLang decodes. ``send`` hands the prepared weights to
SGLang, while it is paused.
"""

import asyncio
import os
import shutil
import socket
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from bebop.rollout.served_weights import Selector, WeightUpdate
from bebop.rollout.sglang.backend import Backend

KEPT = 2  # folders of weights that stay on disk
GROUP = "bebop_weights"


Send = Callable[[], Coroutine[Any, Any, None]]


class WeightTransfer(Protocol):
    """A way to transfer weights to SGLang."""

    async def prepare(self, backend: Backend, load: WeightUpdate, flush: bool) -> Send:
        """Do all work that needs no pause, and return a function that sends the weights to the paused engine.

        ``flush`` drops the keys and values that old weights produced.
        """


def parts(load: WeightUpdate, flush: bool) -> list[tuple[dict[str, Tensor], dict[str, Any]]]:
    """Return the tensors for each of SGLang's models with the arguments of their call; the last sets the version."""
    shares: dict[Selector, dict[str, Tensor]] = {"target": load.target, "draft": load.draft}
    shares = {selector: tensors for selector, tensors in shares.items() if tensors}
    last = list(shares)[-1]
    return [
        (
            tensors,
            {
                "load_format": "flattened_bucket",
                "selector": selector,
                "flush_cache": flush and selector == last,
                "weight_version": str(load.version) if selector == last else None,
            },
        )
        for selector, tensors in shares.items()
    ]


class TensorTransfer:
    """Transfer by handles of tensors on this machine: shared memory, or memory of the same GPU."""

    def __init__(self, ranks: int, text: bool) -> None:
        """Set the number of tensor-parallel ``ranks``; ``text``: handles are base64, for HTTP."""
        self.ranks, self.text = ranks, text

    async def prepare(self, backend: Backend, load: WeightUpdate, flush: bool) -> Send:
        """Make handles of one flat tensor per model, or of the memory where its weights lie flat already."""
        payloads = [
            {"serialized_named_tensors": self._serialize(flat), **words}
            for tensors, words in parts(load, flush)
            for flat in [flattened(tensors, in_place=not self.text)]
        ]

        async def send() -> None:
            await backend.control("begin_weight_update", {"selector": load.selector})
            for payload in payloads:
                await backend.control("update_weights_from_tensor", payload)
            await backend.control("end_weight_update", {})

        return send

    def _serialize(self, flat: Mapping[str, Any]) -> list[Any]:
        """Return one handle for each rank, which gives it back; a handle covers thousands of tensors."""
        from sglang.srt.utils import MultiprocessingSerializer

        own = torch.multiprocessing.get_sharing_strategy()
        if self.text:  # servers do not descend from this process and cannot take over its file descriptors
            torch.multiprocessing.set_sharing_strategy("file_system")
        try:
            return [MultiprocessingSerializer.serialize(flat, output_str=self.text) for _ in range(self.ranks)]
        finally:
            torch.multiprocessing.set_sharing_strategy(own)  # of the process: what others share later


def flattened(tensors: Mapping[str, Tensor], in_place: bool) -> dict[str, Any]:
    """Return tensors as a flat bucket of SGLang's.

    ``in_place``: without a copy, if all are views of one shared memory, as the trainer writes them. It must not be used
    for memory that is shared by name: PyTorch would move that memory.
    """
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, FlattenedTensorMetadata

    plain = _plain(tensors)
    storages = {storage.data_ptr(): storage for _, t in plain if t.numel() for storage in [t.untyped_storage()]}
    shared = [storage for storage in storages.values() if storage.is_shared()]
    if not in_place or not shared or len(storages) > 1:
        bucket = FlattenedTensorBucket(named_tensors=plain)
        return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    metadata = []
    for name, t in plain:
        start, size = t.storage_offset() * t.element_size(), t.numel() * t.element_size()
        metadata.append(FlattenedTensorMetadata(name, t.shape, t.dtype, start, start + size, size))
    return {"flattened_tensor": torch.empty(0, dtype=torch.uint8).set_(shared[0]), "metadata": metadata}


class DistributedTransfer:
    """Transfer by a process group of this process and SGLang's ranks. NCCL needs a GPU here that none of them uses."""

    def __init__(self, ranks: int, address: str, device: torch.device) -> None:
        """Keep the number of ``ranks`` and the sending ``device``; the server reaches this machine at ``address``."""
        self.ranks, self.address, self.device = ranks, address, device
        self.group: Any = None

    async def prepare(self, backend: Backend, load: WeightUpdate, flush: bool) -> Send:
        """Copy one flat tensor per model to the device that sends."""
        if self.group is None:
            self.group = await self._meet(backend)
        sends: list[tuple[dict[str, Any], Tensor]] = []
        for tensors, words in parts(load, flush):
            plain = _plain(tensors)
            payload = {
                "names": [name for name, _ in plain],
                "dtypes": [str(t.dtype).removeprefix("torch.") for _, t in plain],
                "shapes": [list(t.shape) for _, t in plain],
                "group_name": GROUP,
                **words,
            }
            sends.append((payload, torch.cat([t.flatten().view(torch.uint8) for _, t in plain]).to(self.device)))

        async def send() -> None:
            await backend.control("begin_weight_update", {"selector": load.selector})
            for payload, flat in sends:
                sending = asyncio.to_thread(dist.broadcast, flat, src=0, group=self.group)
                await asyncio.gather(backend.control("update_weights_from_distributed", payload), sending)
            await backend.control("end_weight_update", {})

        return send

    async def _meet(self, backend: Backend) -> Any:
        from sglang.srt.utils import init_custom_process_group

        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        kind = "nccl" if self.device.type == "cuda" else "gloo"
        payload = {
            "master_address": self.address,
            "master_port": port,
            "rank_offset": 1,
            "world_size": 1 + self.ranks,
            "group_name": GROUP,
            "backend": kind,
        }
        meeting = asyncio.to_thread(
            init_custom_process_group,
            backend=kind,
            init_method=f"tcp://{self.address}:{port}",
            world_size=1 + self.ranks,
            rank=0,
            group_name=GROUP,
        )
        group, _ = await asyncio.gather(meeting, backend.control("init_weights_update_group", payload))
        return group


class DiskTransfer:
    """Transfer by a folder that both sides see: any replicas, any machine; costs a write and a read of all weights."""

    def __init__(self, folder: Path, checkpoint: Path) -> None:
        """Keep the ``folder``; the ``checkpoint`` gives configuration, tokenizer, and weights that are never sent."""
        self.folder, self.checkpoint, self.last = folder, checkpoint, checkpoint

    async def prepare(self, backend: Backend, load: WeightUpdate, flush: bool) -> Send:
        """Write a complete checkpoint into a new folder."""
        place = self.folder / f"version_{load.version}_{os.getpid()}"
        place.mkdir(parents=True, exist_ok=True)
        for file in self.checkpoint.iterdir():
            if file.is_file() and file.suffix != ".safetensors" and not file.name.endswith(".index.json"):
                shutil.copy(file, place / file.name)
        # Complete folders: from disk SGLang always loads target and draft, and other programs may read them too.
        tensors = {name: t.detach().cpu().contiguous() for name, t in {**load.target, **load.draft}.items()}
        tensors |= unsent(self.last, tensors)
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})

        async def send() -> None:
            payload = {"model_path": str(place), "weight_version": str(load.version), "flush_cache": flush}
            await backend.control("update_weights_from_disk", payload)
            self.last = place
            own = sorted(self.folder.glob(f"version_*_{os.getpid()}"), key=lambda path: path.stat().st_mtime)
            for old in own[:-KEPT]:
                shutil.rmtree(old)

        return send


def unsent(folder: Path, sent: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a folder's safetensors files that are not among those sent."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys() if name not in sent}
    return tensors


def _plain(tensors: Mapping[str, Tensor]) -> list[tuple[str, Tensor]]:
    return [(name, tensor.detach().contiguous()) for name, tensor in tensors.items()]
