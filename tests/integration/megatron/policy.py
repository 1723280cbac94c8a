"""A policy that is trained with Megatron's own means: gradient buffers, pipeline schedules; and a mask for the head."""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from torch import Tensor
from torch.overrides import TorchFunctionMode

from bebop.config.job import HeadConfig, ModelConfig
from bebop.megatron_job.architecture import build
from bebop.megatron_job.cotrain import HeadCotrainer, head_left_out
from bebop.megatron_job.parallel import ParallelConfig, Place
from bebop.megatron_job.source import Checkpoint
from bebop.megatron_job.weights import load
from bebop.trainer.chains import TokenRow, chain_rows
from bebop.trainer.objectives import Sampling
from tests.integration.megatron.builders import CPU, rows

HEAD = HeadConfig(objective="e2e_tv", depth=3, lr=2e-3, lr_warmup_steps=3)


def wrapped(
    saved: Path, place: Place, parallel: ParallelConfig | None = None, *, left_out: bool = True, scattered: bool = False
) -> DistributedDataParallel:
    """This process's part of a policy in Megatron's gradient buffers; ``scattered``: with sequence parallelism."""
    source = Checkpoint(ModelConfig(path=str(saved)))
    parallel = parallel or ParallelConfig()
    # megatron-core's norm without a GPU refuses scattered sequences, though a norm is per token.
    with mock.patch.object(WrappedTorchNorm, "__new__", staticmethod(_whole_norm)):
        model = build(source.config, parallel, place, torch.float32, CPU, GPTModel, sequence_parallel=scattered)
    load(model, source, place, source.config.num_key_value_heads)
    with head_left_out([model] if left_out else []):
        return DistributedDataParallel(model.config, DistributedDataParallelConfig(), model.train())


def cotrainer(model: DistributedDataParallel, **settings: Any) -> HeadCotrainer:
    return HeadCotrainer([model], HEAD, Sampling(temperature=0.9), zero_first=True, **settings)


def text(some: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """Tokens [B, L], L even, and Megatron's loss mask: its entry at t stands for token t + 1."""
    token_ids = chain_rows(some, 1).token_ids
    token_ids = torch.nn.functional.pad(token_ids, (0, token_ids.shape[1] % 2))
    mask = torch.zeros_like(token_ids)
    for i, row in enumerate(some):
        mask[i, len(row.prompt) - 1 : len(row.token_ids) - 1] = int(bool(row.answer))
    return token_ids, mask


def scheduled(
    model: DistributedDataParallel, parts: Sequence[Sequence[TokenRow]], mask: bool = True
) -> dict[str, Tensor]:
    """Forward and backward passes of micro-batches of one width, as Megatron schedules them; what its buffers hold."""
    model.zero_grad_buffer()
    batches = [text(part) for part in parts]
    width = max(ids.shape[1] for ids, _ in batches)
    batches = [tuple(torch.nn.functional.pad(x, (0, width - x.shape[1])) for x in pair) for pair in batches]  # type: ignore[misc]
    settings: dict[str, Any] = {"seq_length": width, "micro_batch_size": len(batches[0][0]), "forward_only": False}
    with NoCuda():
        get_forward_backward_func()(
            forward_step_func=_forward(mask), data_iterator=iter(batches), model=[model],
            num_microbatches=len(batches), **settings,
        )  # fmt: skip
    return gradients(model)


def gradients(model: DistributedDataParallel) -> dict[str, Tensor]:
    """What is in Megatron's buffers."""
    return {n: p.main_grad.clone() for n, p in model.module.named_parameters() if hasattr(p, "main_grad")}


def _forward(masked: bool) -> Any:
    def forward(batches: Iterator[tuple[Tensor, Tensor]], model: Any) -> tuple[Tensor, Any]:
        token_ids, mask = next(batches)
        positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
        out = model(token_ids, positions, None, loss_mask=mask if masked else None)
        return out, lambda logits: ((logits**2).mean(), {})  # any loss will do for a policy

    return forward


def context_step(saved: Path, place: Place, *, packed: bool) -> dict[str, float]:
    """A head's step on states that context parallel ranks hold in parts: pieces r and 2 size - 1 - r of each row."""
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    head = cotrainer(wrapped(saved, place))
    token_ids, mask = text([row for row in rows(3, 6) if row.answer])
    token_ids, mask = (torch.nn.functional.pad(x, (0, -x.shape[1] % 4)) for x in (token_ids, mask))
    states = torch.randn(*token_ids.shape, 32, generator=torch.Generator().manual_seed(0))

    def dealt(row: Tensor) -> Tensor:
        pieces = row.chunk(2 * size)
        return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])

    parts = [torch.stack([dealt(row) for row in x]) for x in (states, token_ids, mask)]
    if not packed:
        head._learn(parts[0].transpose(0, 1), parts[1], parts[2], None)
        return head.step()
    starts = torch.arange(len(token_ids) + 1) * token_ids.shape[1]
    packing = PackedSeqParams(qkv_format="thd", cu_seqlens_q=starts, cu_seqlens_kv=starts)
    states, token_ids, mask = (x.flatten(0, 1)[None] for x in parts)
    head._learn(states.transpose(0, 1), token_ids, mask, packing)
    return head.step()


MAKE_NORM = WrappedTorchNorm.__new__


def _whole_norm(kind: type, config: Any, *args: Any, **settings: Any) -> Any:
    config = copy.copy(config)
    config.sequence_parallel = False
    return MAKE_NORM(kind, config, *args, **settings)


class NoCuda(TorchFunctionMode):
    """Tensors that are asked for on "cuda" by name are made on the CPU: Megatron's schedules and optimizers do so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        settings = dict(kwargs or {})
        if str(settings.get("device", "")).startswith("cuda"):
            settings["device"] = "cpu"
        return func(*args, **settings)
