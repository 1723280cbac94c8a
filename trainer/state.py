"""What an exact resume needs of a trainer, unsharded and by name: any number of ranks can load it."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bebop.errors import UserError
from bebop.trainer.optim import GuardedAdamW
from bebop.trainer.scorer import like, whole

State = dict[str, Any]


def whole_copies(named: Mapping[str, Tensor], dtype: torch.dtype | None = None, keep: bool = True) -> dict[str, Tensor]:
    """Full copies on the CPU; all ranks take part, one tensor at a time, and those that do not ``keep`` get nothing."""
    full = {}
    for name, tensor in named.items():
        gathered = whole(tensor.detach())
        if keep:
            full[name] = gathered.to("cpu", dtype or gathered.dtype, copy=True)
    return full


def optimizer_state(optimizer: GuardedAdamW, keep: bool = True) -> State:
    """Parameters, AdamW's moments and the steps skipped in a row; all ranks take part."""
    states = {name: optimizer.state[p] for name, p in optimizer.named.items() if p in optimizer.state}
    moments = {f"{name}/{key}": value for name, state in states.items() for key, value in state.items()}
    return {
        "skipped": optimizer.skipped,
        "weights": whole_copies(optimizer.named, keep=keep),
        "optimizer": whole_copies(moments, keep=keep),
    }


def load_optimizer_state(optimizer: GuardedAdamW, state: State, owner: str) -> None:
    """Take over what ``optimizer_state`` gave a rank that keeps it; every rank is given the same.

    ``UserError`` for other parameters than ``owner``'s: "head".
    """
    named = optimizer.named
    given = {name: tuple(t.shape) for name, t in state["weights"].items()}
    wanted = {name: tuple(p.shape) for name, p in named.items()}
    if given != wanted:
        name = next(n for n in {**wanted, **given} if given.get(n) != wanted.get(n))
        raise UserError(
            f"the checkpoint belongs to another {owner}: {name} has shape {given.get(name)}, "
            f"the model needs {wanted.get(name)}"
        )
    with torch.no_grad():
        for name, parameter in named.items():
            parameter.copy_(like(state["weights"][name], parameter))
    optimizer.state.clear()
    for key, value in state["optimizer"].items():
        name, field = key.rsplit("/", 1)
        # The step count is a scalar that AdamW keeps on the CPU; the moments live where their parameter lives.
        moment = value.clone() if value.dim() == 0 else like(value, named[name]).clone()
        optimizer.state[named[name]][field] = moment
    optimizer.skipped = state["skipped"]


def random_state() -> State:
    """States of torch's random generators in this process."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_random_state(state: State) -> None:
    """Go on drawing where ``random_state`` was taken; those of GPUs only if there are as many."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
