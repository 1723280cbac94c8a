"""Backends of head training: the interface that ``HeadTrainer`` uses, and the backends on PyTorch's own ranks.

Master weights are fp32; a bfloat16 model runs under autocast. There is no dropout, and no gradient into embedding,
language-model head or backbone.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from bebop.errors import UserError
from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.trainer.chains import ChainRows
from bebop.trainer.objectives import Sampling, Steps, unroll
from bebop.trainer.optim import gradient_norm, whole_copies
from bebop.trainer.scorer import whole_tables

Shared = tuple[Tensor, Tensor]  # token embedding and language-model head, both [V, d]
ChainLoss = Callable[[Steps], Tensor]


class HeadBackend(Protocol):
    """One rank's part of a head, its passes and its collectives; all ranks make the same calls."""

    rank: int  # among the ranks that share the rows of an update
    world: int
    scale: float  # of a loss, before its backward pass

    @property
    def named(self) -> Mapping[str, Tensor]:
        """Return the parameters that the optimizer steps, in fp32; empty on a rank without a part of the head."""

    @property
    def device(self) -> torch.device:
        """Return the device of the computation."""

    def updating(self) -> AbstractContextManager[None]:
        """Return a context for the passes of an update, which starts without gradients."""

    def loss(self, rows: ChainRows, loss: ChainLoss, hidden: Tensor | None) -> Tensor | None:
        """Return the loss of some rows; None on a rank without a head.

        ``hidden`` are their states [B, L, d], if known.
        """

    def reduce(self, scale: float) -> Tensor:
        """Sum the gradients of ``named`` over the ranks, times ``scale``; return the norm of the whole gradient."""

    def total(self, numbers: Tensor) -> Tensor:
        """Sum numbers over the ranks that share rows, in place, on every rank."""

    def stepped(self) -> None:
        """Use the new values of ``named`` after a step of the optimizer."""

    def weights(self) -> dict[str, Tensor]:
        """Return the whole head in fp32 on the CPU, by the names of ``MTPHead``."""


class HeadLoss(nn.Module):
    """The whole pass, from tokens to the loss, in one ``forward``: FSDP2 gathers weights around it."""

    def __init__(self, policy: Policy, sampling: Sampling, mixed: bool) -> None:
        super().__init__()
        assert policy.head is not None
        self.policy, self.sampling, self.mixed = policy, sampling, mixed
        self.backbone, self.head = policy.backbone, policy.head

    def forward(
        self, rows: ChainRows, loss: ChainLoss, hidden: Tensor | None = None, shared: Shared | None = None
    ) -> Tensor:
        """Return the loss of some rows; ``hidden`` [B, L, d] saves the backbone's pass if its states are known.

        ``shared``: embedding and language-model head, if the backbone's own are split over the ranks.
        """
        with torch.autocast(rows.token_ids.device.type, torch.bfloat16, enabled=self.mixed, cache_enabled=False):
            with torch.no_grad():
                if hidden is None:
                    positions = torch.arange(rows.token_ids.shape[1], device=rows.token_ids.device)
                    hidden = self.policy.hidden(rows.token_ids, positions.expand_as(rows.token_ids), CausalContext())
                table = None if shared is None else shared[0]
                embeddings = self.policy.embed(rows.token_ids) if table is None else table[rows.token_ids]
            weight = self.backbone.get_output_embeddings().weight if shared is None else shared[1]
            if self.mixed:
                hidden, embeddings, weight = (x.to(torch.bfloat16) for x in (hidden, embeddings, weight))
            return loss(self.steps(embeddings, hidden, weight, rows))

    def steps(self, embeddings: Tensor, hidden: Tensor, weight: Tensor, rows: ChainRows) -> Steps:
        """Return the head's chains over rows, from embeddings and states [B, L, d]; ``weight`` [V, d]: the model's."""
        assert isinstance(self.head, MTPHead)
        return unroll(self.head, embeddings, hidden, weight, rows, self.sampling)


class TorchBackend:
    """Base class of the backends of a ``Policy``."""

    taps: tuple[int, ...] = ()  # layers whose states the head reads beside the final ones, see ``Scorer.taps``
    loss_module: type[HeadLoss] = HeadLoss

    def __init__(self, policy: Policy, sampling: Sampling, rank: int, world: int, mixed: bool) -> None:
        assert policy.head is not None
        if getattr(policy.backbone.get_output_embeddings(), "bias", None) is not None:
            raise UserError("the model's language-model head has a bias, which head training does not have")
        self.policy, self.rank, self.world, self.scale = policy, rank, world, 1.0
        policy.head.float().requires_grad_(True)
        self.module = self.loss_module(policy, sampling, mixed)
        self.shared: Shared | None = None

    @property
    def named(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the head by name."""
        assert self.policy.head is not None
        return dict(self.policy.head.named_parameters())

    @property
    def device(self) -> torch.device:
        """Return the device of the policy."""
        return self.policy.device

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Clear the gradients for the passes of an update."""
        for parameter in self.named.values():
            parameter.grad = None
        yield

    def loss(self, rows: ChainRows, loss: ChainLoss, hidden: Tensor | None = None) -> Tensor:
        """Return the loss of some rows; ``hidden`` are their states [B, L, d], if known."""
        value: Tensor = self.module(rows, loss, hidden, self.shared)
        return value

    def reduce(self, scale: float) -> Tensor:
        """Scale the gradients of ``named`` and return their norm."""
        for parameter in self.named.values():
            if parameter.grad is not None:
                parameter.grad *= scale
        return gradient_norm(self.named.values())

    def total(self, numbers: Tensor) -> Tensor:
        """Sum numbers over the ranks, in place, on every rank."""
        if self.world > 1:
            dist.all_reduce(numbers)
        return numbers

    def stepped(self) -> None:
        """Do nothing: the optimizer steps the parameters themselves."""

    def weights(self) -> dict[str, Tensor]:
        """Return the whole head in fp32 on the CPU, by the names of ``MTPHead``."""
        return whole_copies(self.named)


class FSDPBackend(TorchBackend):
    """A head by itself, its backbone frozen; with several ranks both are split over them (FSDP2)."""

    def __init__(self, policy: Policy, sampling: Sampling, rank: int = 0, world: int = 1) -> None:
        """Use ``policy`` and freeze its backbone; with ``world`` > 1 a process group must exist."""
        policy.backbone.eval().requires_grad_(False)
        super().__init__(policy, sampling, rank, world, policy.backbone.dtype == torch.bfloat16)
        self.scale = float(world)  # FSDP averages gradients over the ranks; the loss of the rows is the sum over them
        if world > 1:
            mesh = init_device_mesh(policy.device.type, (world,))
            for layer in policy.backbone.get_decoder().layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(self.module, mesh=mesh)


class WholeBackend(TorchBackend):
    """A whole head on every rank, beside a policy that another trainer may have split over the ranks."""

    def __init__(
        self, policy: Policy, sampling: Sampling, rank: int = 0, world: int = 1, mixed: bool | None = None
    ) -> None:
        """Make a backend; ``mixed``: under bfloat16 autocast; None: if the backbone is in bfloat16 now."""
        mixed = policy.backbone.dtype == torch.bfloat16 if mixed is None else mixed
        super().__init__(policy, sampling, rank, world, mixed)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Run the passes of an update with whole embedding and language-model head."""
        if self.world > 1 or isinstance(self.policy.backbone.get_output_embeddings().weight, DTensor):
            self.shared = whole_tables(self.policy)
        try:
            with super().updating():
                yield
        finally:
            self.shared = None

    def reduce(self, scale: float) -> Tensor:
        """Sum the gradients over the ranks, scale them and return their norm."""
        if self.world > 1:
            for parameter in self.named.values():
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                dist.all_reduce(parameter.grad)
        return super().reduce(scale)
