"""Distributed megatron-core checkpoints of a head in training and of a whole model; any split reads any other."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from torch import Tensor

from bebop.errors import UserError
from bebop.megatron_job.backend import MegatronBackend
from bebop.trainer.heads import HeadTrainer

MOMENTS = ("exp_avg", "exp_avg_sq")


def save_head(folder: Path, trainer: HeadTrainer) -> None:
    """Write fp32 weights, moments and counters to ``folder``, which appears whole or not at all."""
    _write(folder, _head_state(trainer))


def load_head(folder: Path, trainer: HeadTrainer) -> None:
    """Load a checkpoint of ``save_head``, written under any split over processes."""
    state = _read(folder, _head_state(trainer))
    trainer.version, trainer.optimizer.skipped = int(state["version"]), int(state["skipped"])
    moments = _moments(trainer)
    with torch.no_grad():
        for name, master in trainer.backend.named.items():
            master.copy_(state[f"master.{name}"])
            for moment in MOMENTS:
                moments[name][moment].copy_(state[f"{moment}.{name}"])
            moments[name]["step"].fill_(int(state["steps"]))
    trainer.backend.stepped()


def save_model(folder: Path, model: Any) -> None:
    """Write a whole GPTModel under megatron-core's own names."""
    _write(folder, _model_state(model))


def load_model(folder: Path, model: Any) -> None:
    """Fill a GPTModel from a distributed checkpoint."""
    model.load_state_dict(_read(folder, _model_state(model)), strict=False)


def _model_state(model: Any) -> dict[str, Any]:
    state: dict[str, Any] = model.sharded_state_dict(prefix="", metadata=_metadata())
    return state


def _metadata() -> dict[str, Any]:
    """Return the group of replicas; shared experts need it, and so does a last stage with a copy of the embedding."""
    return {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}


def _moments(trainer: HeadTrainer) -> dict[str, dict[str, Tensor]]:
    """Return AdamW's tensors of each parameter; create them if there was no step yet."""
    state, named = trainer.optimizer.state, trainer.backend.named
    for master in named.values():
        if not state[master]:
            zeros = {name: torch.zeros_like(master) for name in MOMENTS}
            where = master.device if trainer.optimizer.defaults["fused"] else "cpu"  # as ``load_optimizer_state``
            state[master].update({"step": torch.zeros((), device=where), **zeros})
    return {name: state[master] for name, master in named.items()}


def _head_state(trainer: HeadTrainer) -> dict[str, Any]:
    """Return the state of a head: sharded tensors on the last stage, numbers on all."""
    backend = trainer.backend
    assert isinstance(backend, MegatronBackend)
    moments = _moments(trainer)
    steps = torch.tensor(int(next(iter(moments.values()))["step"]) if moments else 0, device=backend.device)
    # megatron-core writes the numbers of rank 0 alone, which under pipeline parallelism has no part of the head.
    dist.all_reduce(steps, dist.ReduceOp.MAX)
    state: dict[str, Any] = {"version": trainer.version, "skipped": trainer.optimizer.skipped, "steps": int(steps)}
    if not backend.named:
        return state
    parameters = backend.model.mtp.sharded_state_dict(prefix="mtp.", metadata=_metadata())
    for name, master in backend.named.items():
        tensors: Mapping[str, Tensor] = {"master": master, **{kind: moments[name][kind] for kind in MOMENTS}}
        for kind, tensor in tensors.items():
            state[f"{kind}.{name}"] = make_sharded_optimizer_tensor(parameters[name], tensor, prefix=kind)
    return state


def _write(folder: Path, state: dict[str, Any]) -> None:
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
        loaded: dict[str, Any] = dist_checkpointing.load(wanted, str(folder))
    except (OSError, RuntimeError, ValueError, KeyError, dist_checkpointing.core.CheckpointingException) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{folder} is no checkpoint of this model, or is damaged: {reason}") from error
    return loaded
