"""Distributed checkpoints of megatron-core, of a head in training and of a whole model; any split reads any other's."""

import os
import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor, nn

from bebop.errors import UserError
from bebop.megatron_job.optimizer import HeadOptimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_head(folder: Path, model: nn.Module, adam: HeadOptimizer) -> None:
    """Write fp32 weights, moments and counters to ``folder``, which appears whole or not at all."""
    _write(folder, _head_state(model, adam))


def load_head(folder: Path, model: nn.Module, adam: HeadOptimizer) -> None:
    """Take over what ``save_head`` wrote, from any split over processes."""
    state = _read(folder, _head_state(model, adam))
    adam.version, adam.adam.skipped = int(state["version"]), int(state["skipped"])
    moments = adam.moments()
    with torch.no_grad():
        for name, master in adam.masters.items():
            master.copy_(state[f"master.{name}"])
            for moment in MOMENTS:
                moments[name][moment].copy_(state[f"{moment}.{name}"])
            moments[name]["step"].fill_(int(state["steps"]))
            adam.named[name].data.copy_(master)


def save_model(folder: Path, model: Any) -> None:
    """Write a whole GPTModel, under megatron-core's own names."""
    _write(folder, _model_state(model))


def load_model(folder: Path, model: Any) -> None:
    """Fill a GPTModel from a distributed checkpoint."""
    model.load_state_dict(_read(folder, _model_state(model)), strict=False)


def _model_state(model: Any) -> dict[str, Any]:
    """The group is asked for where an MTP layer has its own copy of the embedding, on a last stage."""
    copies = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state: dict[str, Any] = model.sharded_state_dict(prefix="", metadata={"dp_cp_group": copies})
    return state


def _head_state(model: Any, adam: HeadOptimizer) -> dict[str, Any]:
    """What is kept of a head: sharded tensors on the last stage, numbers on all."""
    state: dict[str, Any] = {"version": adam.version, "skipped": adam.adam.skipped, "steps": 0}
    if not adam.masters:
        return state
    moments = adam.moments()
    state["steps"] = int(next(iter(moments.values()))["step"])
    parameters = model.mtp.sharded_state_dict(prefix="mtp.")
    for name, master in adam.masters.items():
        tensors: Mapping[str, Tensor] = {"master": master, **{kind: moments[name][kind] for kind in MOMENTS}}
        for kind, tensor in tensors.items():
            state[f"{kind}.{name}"] = make_sharded_optimizer_tensor(parameters[name], tensor, prefix=kind)
    return state


def _write(folder: Path, state: dict[str, Any]) -> None:
    # Without it the processes that megatron-core writes with die, and it waits for them for ever.
    if find_spec("psutil") is None:
        raise UserError("megatron-core needs psutil to write checkpoints: pip install psutil")
    scratch = folder.with_name(f".{folder.name}.new")
    if dist.get_rank() == 0:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
    dist.barrier()
    dist_checkpointing.save(state, str(scratch))
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        os.replace(scratch, folder)
    dist.barrier()


def _read(folder: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    try:
        found: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    except (OSError, RuntimeError, ValueError, KeyError, dist_checkpointing.core.CheckpointingException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder} is no checkpoint of this model, or is damaged: {reason}") from error
    return found
