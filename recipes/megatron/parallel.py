"""How a model is split over processes: tensor, pipeline and data parallel, and the process group of all of them.

megatron-core runs on a CPU as well: ``prepare_cpu`` answers what it asks of CUDA, once per process.
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bebop.config.fields import check
from bebop.errors import UserError


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """The number of ranks for each kind of split; the processes that remain are data parallel."""

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
    """The ranks of this process: tensor 1 of 2, pipeline 0 of 1, data 0 of 4."""

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
        """Return whether this is the first stage, which holds the embedding."""
        return self.pipeline == 0

    @property
    def last(self) -> bool:
        """Return whether this is the last stage, which holds the language-model head and the MTP head."""
        return self.pipeline == self.pipelines - 1


def here() -> Place:
    """Return the ranks of this process in megatron-core's groups."""
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
    """Raise ``UserError`` if the processes do not divide into the groups that are asked for."""
    needed = config.tensor * config.pipeline
    if world % needed:
        raise UserError(
            f"parallel.tensor={config.tensor} times parallel.pipeline={config.pipeline} does not divide the {world} "
            f"processes: start a multiple of {needed} (torchrun --nproc-per-node {needed})"
        )


@contextmanager
def joined(config: ParallelConfig, device: str) -> Iterator[Place]:
    """Join the processes that torchrun started to megatron-core's groups, until the block ends."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    check_world(config, world)
    cuda = device != "cpu" and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    prepare_cpu()
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
    """Make megatron-core's groups within an existing process group, until the block ends."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor, pipeline_model_parallel_size=config.pipeline
    )
    try:
        yield here()
    finally:
        parallel_state.destroy_model_parallel()


# ---- megatron-core on a CPU


def prepare_cpu() -> None:
    """Let megatron-core run on CPU tensors; does nothing where there is a GPU.

    Replaced are the device that buffers are made on, a move to it, waiting for it, and the states of CUDA's random
    generators (weights are read from a checkpoint and nothing drops out, so no numbers are drawn).
    """
    if torch.cuda.is_available():
        return
    from megatron.core.tensor_parallel import random

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = _stay_on_cpu  # type: ignore[assignment, method-assign]
    random.initialize_rng_tracker()
    tracker: Any = random._CUDA_RNG_STATE_TRACKER
    tracker.fork = _no_fork


def _stay_on_cpu(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _no_fork(name: str = "") -> AbstractContextManager[None]:
    return nullcontext()
