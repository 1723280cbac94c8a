"""The processes of one adaptation: several that torchrun started, or a single one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """Rank of this process and number of processes: rank 1 of 4."""

    rank: int
    world: int

    def union(self, part: dict[int, T]) -> dict[int, T]:
        """Return the parts of all ranks in one mapping, on every rank."""
        if self.world == 1:
            return part
        parts: list[dict[int, T]] = [{}] * self.world
        dist.all_gather_object(parts, part)
        return {key: value for one in parts for key, value in one.items()}

    def any(self, mine: bool) -> bool:
        """Return on every rank whether ``mine`` is true on at least one rank."""
        return any(self.union({self.rank: mine}).values())

    def wait(self) -> None:
        """Wait until every rank has called this method."""
        if self.world > 1:
            dist.barrier()


ALONE = Ranks(0, 1)


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """Yield the ranks that torchrun started (by its environment variables), with a process group for the block."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield ALONE
        return
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Ranks(dist.get_rank(), world)
    finally:
        dist.destroy_process_group()
