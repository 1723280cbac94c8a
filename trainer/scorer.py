"""The trainer's forward pass: packed rows in, log-probs and entropies of their answer tokens out; and its sharding.

One module around the whole pass, language-model head included, because FSDP2 gathers the weights of a module around
that module's ``forward``: embedding, final norm and head (tied or not) form the root's group, each layer its own.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy
from bebop.trainer.logprobs import token_logprobs
from bebop.trainer.packing import PackedRows


class Scorer(nn.Module):
    """Scores packed rows under softmax(logits / temperature). Parameters are named as in ``Policy.weights()``."""

    def __init__(self, policy: Policy, temperature: float, mixed: bool = False) -> None:
        """``mixed``: matrix products in bfloat16 over fp32 weights (autocast)."""
        super().__init__()
        self.policy = policy
        self.backbone = policy.backbone
        self.temperature = temperature
        self.mixed = mixed
        self.kept: list[tuple[PackedRows, Tensor]] | None = None  # rows and hidden states [N, d], where they are wanted

    def forward(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Log-probs [A] of the answer tokens and entropies [A] of the distributions that they come from."""
        device = rows.token_ids.device
        # No cache of casts: each weight is used once a pass, and the cache would keep gathered shards alive.
        with torch.autocast(device.type, torch.bfloat16, enabled=self.mixed, cache_enabled=False):
            context = PackedContext(rows.lengths)
            hidden = self.policy.hidden(rows.token_ids[None], rows.positions[None], context)[0]
            if self.kept is not None:
                self.kept.append((rows, hidden.detach()))
            head: Any = self.backbone.get_output_embeddings()
            return token_logprobs(
                hidden[rows.predictors],
                head.weight,
                rows.targets,
                temperature=self.temperature,
                bias=getattr(head, "bias", None),
                dtype=torch.bfloat16 if self.mixed else None,
            )


def shard(scorer: Scorer, mesh: DeviceMesh) -> None:
    """Split every parameter over the ranks of ``mesh``, in place (FSDP2): a group per layer and one for the rest."""
    for layer in scorer.backbone.get_decoder().layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(scorer, mesh=mesh)


def reshard(scorer: Scorer) -> None:
    """Back to shards, as ``parameters()`` has them; after a pass without gradients the root's group is still whole."""
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def whole_tables(policy: Policy) -> tuple[Tensor, Tensor]:
    """Token embedding and language-model head [V, d], whole and detached; every rank takes part."""
    backbone = policy.backbone
    tables = (backbone.get_input_embeddings().weight, backbone.get_output_embeddings().weight)
    embedding, head = (whole(table.detach()) for table in tables)
    return embedding, head


def whole(tensor: Tensor) -> Tensor:
    """The full tensor behind a shard; every rank has to take part. A plain tensor is returned as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(full: Tensor, shard: Tensor) -> Tensor:
    """A full tensor (the same on all ranks) placed, typed and split as ``shard`` is; no communication."""
    full = full.to(device=shard.device, dtype=shard.dtype)
    if not isinstance(shard, DTensor):
        return full
    return distribute_tensor(full, shard.device_mesh, shard.placements, src_data_rank=None)
