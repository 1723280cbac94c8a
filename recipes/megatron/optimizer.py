"""The optimizer of an MTP head under megatron-core: its own AdamW, learning rate, gradient norm and reduction.

The head's parameters are in none of Megatron's gradient buffers, so that neither its norm nor its clipping nor its
optimizer sees them. What it leaves out: sharding of the optimizer's state over data parallel ranks (a head is one
layer), and experts.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bebop.config import HeadConfig
from bebop.megatron_job.parallel import Place
from bebop.megatron_job.weights import rule_of
from bebop.trainer.optim import GuardedAdamW
from bebop.trainer.schedule import warm_up

OF_HEADS = ("q_layernorm.weight", "k_layernorm.weight")


class HeadOptimizer:
    """AdamW on fp32 copies of a head's parameters. The ranks of the last pipeline stage have them; others run along."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], config: HeadConfig, place: Place, device: torch.device
    ) -> None:
        """``named``: this rank's part of the head; empty on all but the last stage."""
        self.named, self.config, self.place, self.device = dict(named), config, place, device
        # By name: Megatron marks parameters as split only where it initialises them itself.
        self.split = {name: rule_of(name, 0).split is not None for name in named}
        self.version = 0  # finished steps
        self.masters = {name: p.detach().float().clone() for name, p in self.named.items()}
        self.adam = GuardedAdamW(
            self.masters, config, setting="head.lr", loss="the loss of the MTP head", causes="weights"
        )

    def zero_grad(self) -> None:
        """Forget the gradients of the last step."""
        for parameter in self.named.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, scale: float = 1.0) -> dict[str, float]:
        """Sum gradients over data parallel ranks, clip by the head's own norm, step; every rank of a job calls it.

        ``scale``: what the sum is multiplied by, for gradients of sums instead of means.

        Returns:
            head/grad_norm (before clipping; left out where it is not finite), head/lr, head/skipped.

        Raises:
            UserError: the third gradient in a row that is not finite.
        """
        self._collect(scale)
        numbers = self.adam.guarded_step(warm_up(self.config, self.version), self._grad_norm())
        if not numbers["skipped"]:
            for name, master in self.masters.items():
                self.named[name].copy_(master)
        self.adam.zero_grad()
        self.version += 1
        return {f"head/{name}": value for name, value in numbers.items()}

    def _collect(self, scale: float) -> None:
        for name, master in self.masters.items():
            grad = self.named[name].grad
            master.grad = torch.zeros_like(master) if grad is None else grad.float()
            dist.all_reduce(master.grad, group=self.place.data_group)
            if name.endswith(OF_HEADS):  # a copy, of whose gradient each tensor rank has the part of its heads
                dist.all_reduce(master.grad, group=self.place.tensor_group)
            master.grad *= scale

    def _grad_norm(self) -> Tensor:
        """Of the whole head: parts of split parameters add up over tensor ranks, copies count once."""
        sums = torch.zeros(2, device=self.device)  # split, copied
        for name, master in self.masters.items():
            assert master.grad is not None
            sums[0 if self.split[name] else 1] += master.grad.pow(2).sum()
        if self.masters:
            dist.all_reduce(sums[:1], group=self.place.tensor_group)
        last = dist.get_global_rank(self.place.pipeline_group, self.place.pipelines - 1)
        dist.broadcast(sums, last, group=self.place.pipeline_group)
        return sums.sum().sqrt()

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """AdamW's tensors of each parameter, made if there was no step yet."""
        for master in self.masters.values():
            if not self.adam.state[master]:
                zeros = {name: torch.zeros_like(master) for name in ("exp_avg", "exp_avg_sq")}
                self.adam.state[master].update({"step": torch.zeros(()), **zeros})
        return {name: self.adam.state[master] for name, master in self.masters.items()}
