"""Weights from a trainer to remote replicas, through Ray's object store: ``checkpoint_engine.backend=bebop``.

verl's own transfers need NCCL, RDMA or the like. This one needs nothing, and is as slow as a copy through host
memory.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import ray
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from bebop.verl_job.choices import NAME

STORE = "bebop_object_store"  # the actor's name


class ObjectStore:
    """Actor that holds the trainer's reference to its weights: one item at a time; ``get`` waits for it."""

    def __init__(self) -> None:
        self._full = asyncio.Event()
        self._item: list[Any] = []

    async def put(self, item: list[Any]) -> None:
        """Store an item; it is a list, so that references in it stay references."""
        self._item = item
        self._full.set()

    async def get(self) -> list[Any]:
        """Wait for the item and return it."""
        await self._full.wait()
        return self._item

    async def clear(self) -> None:
        """Drop the item."""
        self._item = []
        self._full.clear()


@CheckpointEngineRegistry.register(NAME)
class ObjectStoreTransfer(CheckpointEngine):
    """``CheckpointEngine`` in which rank 0 of the trainer sends and every replica reads the same object."""

    _store: Any = None  # kept by whoever builds the topology, for as long as it lives

    def __init__(self, bucket_size: int = 0, is_master: bool = False) -> None:
        self.is_master = is_master
        self.box: Any = None

    def prepare(self) -> None:
        """Do nothing: there is nothing to prepare."""

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Give the object store to every rank and replica."""
        if cls._store is None:
            cls._store = ray.remote(ObjectStore).options(name=STORE, get_if_exists=True, num_cpus=0).remote()
        return {"box": [cls._store] * actor_wg_world_size}, {"box": [cls._store] * rollout_world_size}

    def init_process_group(self, box: Any) -> None:
        """Keep the object store."""
        self.box = box

    def finalize(self) -> None:
        """Drop the weights once every replica has them."""
        if self.is_master:
            ray.get(self.box.clear.remote())

    async def send_weights(
        self, weights: Iterator[tuple[str, Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Gather whole tensors on every rank; rank 0 puts them into the object store."""
        named = {}
        for name, tensor in weights:
            if self.is_master:
                named[name] = tensor.detach().to("cpu", copy=True)
        if self.is_master:
            await self.box.put.remote([ray.put(named)])
        return {}

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """Yield the name and tensor of each weight."""
        (reference,) = await self.box.get.remote()
        for name, tensor in (await reference).items():
            yield name, tensor
