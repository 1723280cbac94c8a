"""Split of a model over processes (tensor, pipeline, context, expert, data parallel), and their process groups.

Experts are split only by expert, never within one: tensor ranks hold different experts, or copies. Each tensor rank
sends all tokens to the experts, so that an expert computes a token once for each tensor rank.

megatron-core also runs on a CPU: ``prepare_cpu`` replaces its calls to CUDA, once per process.
"""

import math
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
from bebop.megatron_job.context import own_pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelConfig:
    """Number of ranks for each kind of split; the remaining processes are data parallel."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1  # parts of each row of text
    expert: int = 1  # parts of the experts, over tensor, context and data parallel ranks
    evaluate: bool = True  # decode held-out prompts before and after, with a whole model in every process

    def __post_init__(self) -> None:
        for name in ("tensor", "pipeline", "context", "expert"):
            check(getattr(self, name) >= 1, f"parallel.{name}", getattr(self, name), "give 1 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Ranks of this process: tensor 1 of 2, pipeline 0 of 1, data 0 of 4."""

    tensor: int
    tensors: int
    pipeline: int
    pipelines: int
    data: int
    datas: int
    expert: int
    experts: int  # ranks that share the experts of a layer
    tensor_group: dist.ProcessGroup
    data_group: dist.ProcessGroup  # with the context parallel ranks, whose gradients add up as well
    pipeline_group: dist.ProcessGroup
    context_group: dist.ProcessGroup
    expert_group: dist.ProcessGroup
    copies_group: dist.ProcessGroup  # ranks with the same experts

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
        expert=parallel_state.get_expert_model_parallel_rank(),
        experts=parallel_state.get_expert_model_parallel_world_size(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        pipeline_group=parallel_state.get_pipeline_model_parallel_group(),
        context_group=parallel_state.get_context_parallel_group(),
        expert_group=parallel_state.get_expert_model_parallel_group(),
        copies_group=parallel_state.get_expert_data_parallel_group(),
    )


def check_world(config: ParallelConfig, world: int) -> None:
    """Raise ``UserError`` if the processes do not divide into the requested groups."""
    for others in (("tensor", "context"), ("expert",)):  # each within one stage
        names = [name for name in (*others, "pipeline") if getattr(config, name) > 1]
        needed = math.prod(getattr(config, name) for name in names)
        if world % needed:
            given = " times ".join(f"parallel.{name}={getattr(config, name)}" for name in names)
            raise UserError(
                f"{given} does not divide the {world} processes: start a multiple of {needed} "
                f"(torchrun --nproc-per-node {needed})"
            )


@contextmanager
def joined(config: ParallelConfig, device: str) -> Iterator[Place]:
    """Join torchrun's processes to megatron-core's groups, until the block ends."""
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
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=1,
    )
    try:
        yield here()
    finally:
        parallel_state.destroy_model_parallel()


# ---- megatron-core on a CPU


def prepare_cpu() -> None:
    """Let megatron-core run on CPU tensors, and its routers without Transformer Engine.

    Without a GPU, it replaces the device of buffers, moves to the device, synchronization, the stream that copies each
    expert's token counts, pinned memory, and the states of CUDA's random generators. No random numbers are drawn:
    weights come from a checkpoint and there is no dropout.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 defines it only beside Transformer Engine, yet reads it
        moe_utils.te_general_gemm = None
    if torch.cuda.is_available():
        return
    from megatron.core.models.common.embeddings import rotary_pos_embedding
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    torch.Tensor.cuda = _stay_on_cpu  # type: ignore[assignment, method-assign]
    random.initialize_rng_tracker()
    tracker: Any = random._CUDA_RNG_STATE_TRACKER
    tracker.fork = _no_fork
    dispatcher: Any = MoEAlltoAllTokenDispatcher
    dispatcher.cuda_dtoh_stream = nullcontext()  # else it would be made
    dispatcher._maybe_dtoh_and_synchronize = _splits_as_numbers
    rotary_pos_embedding.get_pos_emb_on_this_cp_rank = own_pieces


def _stay_on_cpu(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor


def _no_fork(name: str = "") -> AbstractContextManager[None]:
    return nullcontext()


def _splits_as_numbers(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
    """Replace megatron-core's copy to the CPU: all-to-all takes the token counts as an array."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(splits := getattr(dispatcher, name), torch.Tensor):
            setattr(dispatcher, name, splits.numpy())
    return tokens_per_expert
