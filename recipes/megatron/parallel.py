"""How a model is split over processes: tensor, pipeline and data parallel, and the process group of all of them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bebop.errors import UserError
from bebop.megatron_job.cpu import prepare
from bebop.parsing import check


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Over how many processes what is split; the rest of them are data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1  # known so that it can be refused
    evaluate: bool = True  # decode held-out prompts before and after, with a whole model in every process

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context"):
            check(getattr(self, name) >= 1, f"parallel.{name}", getattr(self, name), "give 1 or more")
        why = "a later step's draft reads the whole sequence: split over tensor, pipeline or data parallel ranks"
        check(self.context == 1, "parallel.context", self.context, why)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands: tensor 1 of 2, pipeline 0 of 1, data 0 of 4."""

    tensor: int
    tensors: int
    pipeline: int
    pipelines: int
    data: int
    datas: int
    tensor_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    pipeline_group: dist.ProcessGroup

    @property
    def first(self) -> bool:
        """Whether this is the first stage, which holds the embedding."""
        return self.pipeline == 0

    @property
    def last(self) -> bool:
        """Whether this is the last stage, which holds the language-model head and the MTP head."""
        return self.pipeline == self.pipelines - 1


def here() -> Place:
    """This process's place in the groups that megatron-core holds."""
    return Place(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        tensors=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        pipelines=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_rank(),
        datas=parallel_state.get_data_parallel_world_size(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
    )


def check_world(config: ParallelConfig, world: int) -> None:
    """``UserError`` where the processes do not divide into the groups that are asked for."""
    needed = config.tensor * config.pipeline
    if world % needed:
        raise UserError(
            f"parallel.tensor={config.tensor} times parallel.pipeline={config.pipeline} does not divide the {world} "
            f"processes: start a multiple of {needed} (torchrun --nproc-per-node {needed})"
        )


@contextmanager
def joined(config: ParallelConfig, device: str) -> Iterator[Place]:
    """The processes that torchrun started, in megatron-core's groups, for their time together."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_world(config, world)
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    prepare()
    alone = "WORLD_SIZE" not in os.environ  # started without torchrun
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=dist.HashStore() if alone else None,  # type: ignore[attr-defined]
        rank=0 if alone else -1,
        world_size=1 if alone else -1,
        timeout=timedelta(minutes=30),
    )
    try:
        with split(config) as place:
            yield place
    finally:
        dist.destroy_process_group()


@contextmanager
def split(config: ParallelConfig) -> Iterator[Place]:
    """The groups within a process group that is there."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor, pipeline_model_parallel_size=config.pipeline
    )
    try:
        yield here()
    finally:
        parallel_state.destroy_model_parallel()
