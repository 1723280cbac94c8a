"""AdamW as all trainers here use it: the learning rate, the guarded step, and the state for an exact resume.

A step clips the gradient by its norm; a gradient that is not finite is skipped. States are unsharded and by name, so
that any number of ranks can load them.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from bebop.config.job import HeadConfig, TrainerConfig
from bebop.errors import UserError
from bebop.trainer.scorer import like, whole

MAX_SKIPPED = 3  # steps in a row without a finite gradient before training gives up
State = dict[str, Any]


def learning_rate(config: TrainerConfig, version: int) -> float:
    """Return the learning rate of the update after ``version`` finished ones: linear warm-up, then the schedule.

    ``cosine`` and ``linear`` would reach 0 at update ``steps``, one after the last.
    """
    if version < config.lr_warmup_steps:
        return config.lr * (version + 1) / config.lr_warmup_steps
    done = (version - config.lr_warmup_steps) / max(1, config.steps - config.lr_warmup_steps)
    done = min(1.0, done)
    factors = {"constant": 1.0, "linear": 1 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}
    return config.lr * factors[config.lr_schedule]


def warm_up(config: HeadConfig, version: int) -> float:
    """Return the learning rate of a head's update after ``version`` finished ones: linear warm-up, then constant."""
    return config.lr * min(1.0, (version + 1) / max(1, config.lr_warmup_steps))


class GuardedAdamW(torch.optim.AdamW):
    """AdamW over named parameters, sharded or not; norms and biases do not decay."""

    def __init__(
        self, named: Mapping[str, Tensor], config: TrainerConfig | HeadConfig, *, setting: str, loss: str, causes: str
    ) -> None:
        """Make an optimizer.

        Its error contains ``setting``, ``loss`` and ``causes``, such as "trainer.lr", "the loss", "rewards".
        """
        self.named, self.max_grad_norm = dict(named), config.max_grad_norm
        self.skipped = 0  # steps skipped in a row
        self._complaint = f"{setting}={config.lr}: {loss} is not finite in {MAX_SKIPPED} steps running"
        self._advice = f"lower it, or look for {causes} that are not finite"
        decay = [p for p in self.named.values() if p.ndim > 1]
        rest = [p for p in self.named.values() if p.ndim <= 1]
        groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}]
        # One kernel for all parameters on a GPU. A CPU keeps the loop, whose rounding stored numbers hold.
        fused = bool(self.named) and all(p.is_cuda for p in self.named.values())
        super().__init__(groups, lr=config.lr, betas=config.betas, fused=fused or None)

    def guarded_step(self, rate: float, norm: Tensor | None = None) -> dict[str, float]:
        """Clip the gradient and step at a learning rate; all ranks take part.

        ``norm``: of the whole gradient, if it covers more than these parameters.

        Returns:
            lr, skipped (0 or 1) and grad_norm (before clipping; left out if it is not finite).

        Raises:
            UserError: the third gradient in a row that is not finite.
        """
        parameters = [p for p in self.named.values() if p.grad is not None]
        if norm is None:
            norm = gradient_norm(parameters)
        finite = bool(norm.isfinite())
        for group in self.param_groups:
            group["lr"] = rate
        if finite:
            clip_grads_with_norm_(parameters, self.max_grad_norm, norm)
            self.step()
        self.skipped = 0 if finite else self.skipped + 1
        if self.skipped >= MAX_SKIPPED:
            raise UserError(f"{self._complaint} (gradient norm {float(norm)}); {self._advice}")
        # A skipped step has no norm worth averaging: it would make that of a whole update NaN.
        return {"lr": rate, "skipped": float(not finite)} | ({"grad_norm": float(norm)} if finite else {})


def gradient_norm(parameters: Iterable[Tensor]) -> Tensor:
    """Return the norm of all gradients together, sharded or not; all ranks take part."""
    return whole(get_total_norm([p.grad for p in parameters if p.grad is not None]))


def whole_copies(named: Mapping[str, Tensor], dtype: torch.dtype | None = None, keep: bool = True) -> dict[str, Tensor]:
    """Return full copies on the CPU; nothing on ranks that do not ``keep`` them.

    All ranks take part, one tensor at a time.
    """
    full = {}
    for name, tensor in named.items():
        gathered = whole(tensor.detach())
        if keep:
            full[name] = gathered.to("cpu", dtype or gathered.dtype, copy=True)
    return full


def optimizer_state(optimizer: GuardedAdamW, keep: bool = True) -> State:
    """Return parameters, AdamW's moments and the number of steps skipped in a row; all ranks take part."""
    states = {name: optimizer.state[p] for name, p in optimizer.named.items() if p in optimizer.state}
    moments = {f"{name}/{key}": value for name, state in states.items() for key, value in state.items()}
    return {
        "skipped": optimizer.skipped,
        "weights": whole_copies(optimizer.named, keep=keep),
        "optimizer": whole_copies(moments, keep=keep),
    }


def load_optimizer_state(optimizer: GuardedAdamW, state: State, owner: str) -> None:
    """Load the ``optimizer_state`` of a rank that keeps it; every rank gets the same.

    Raise ``UserError`` if its parameters are not those of ``owner``, such as "head".
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
        # The step count is a scalar on the CPU, or beside its parameter for fused kernels; moments live with theirs.
        where = named[name].device if optimizer.defaults["fused"] else "cpu"
        moment = value.to(where, copy=True) if value.dim() == 0 else like(value, named[name]).clone()
        optimizer.state[named[name]][field] = moment
    optimizer.skipped = state["skipped"]


def random_state() -> State:
    """Return the states of torch's random generators in this process."""
    return {"cpu": torch.get_rng_state(), "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []}


def set_random_state(state: State) -> None:
    """Restore the generators from ``random_state``; those of GPUs only if there are as many."""
    torch.set_rng_state(state["cpu"])
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
