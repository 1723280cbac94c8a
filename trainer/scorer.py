"""The trainer's forward pass, from packed rows to log-probs and entropies of completion tokens, and its sharding.

One module holds the whole pass, language-model head included, because FSDP2 gathers the weights of a module around that
module's ``forward``: embedding, final norm and head (tied or not) form the root's group, each layer its own.

Intermediates of a layer are kept for the backward pass or, with ``recompute_layers``, computed again from its input.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bebop.model.attention import PackedContext
from bebop.model.backbone import Policy, tapped
from bebop.model.routing import Replay, Routers, watch_routers
from bebop.trainer.packing import PackedRows

# Logits held at once, by device: 64 MB in fp32 on a CPU, 1 GB on a GPU. Each chunk reads the whole language-model head:
# at V = 152k a small one has 110 rows, for which a GPU waits for memory.
CHUNK_ELEMENTS = {"cuda": 1 << 28, "cpu": 1 << 24}


class Scorer(nn.Module):
    """Scores packed rows under softmax(logits / temperature). Parameters are named as in ``Policy.weights()``."""

    def __init__(self, policy: Policy, temperature: float, mixed: bool = False) -> None:
        """Use ``policy`` for the pass.

        ``mixed``: matrix products in bfloat16 over fp32 weights, by autocast, or by FSDP2 once it is sharded.
        """
        super().__init__()
        self.policy = policy
        self.backbone = policy.backbone
        self.temperature = temperature
        self.mixed = mixed
        self.autocast = mixed
        self.kept: list[tuple[PackedRows, Tensor]] | None = None  # rows and hidden states [N, d]; None: not kept
        self.taps: tuple[int, ...] = ()  # layers whose states are appended to those: [N, (1 + T) d]
        self.routers: Routers | None = None  # of a mixture of experts, see ``watch_routing``
        self.replays = self.balances = False
        self.routing: Replay | None = None  # choices of the routers in the latest pass

    def watch_routing(self, replays: bool, balances: bool) -> None:
        """Watch the choices of routers; called before ``recompute_layers`` and ``shard``.

        ``replays``: routers choose the engine's experts, where they are recorded. ``balances``: logits are kept for the
        load balancing loss.
        """
        self.routers, self.replays, self.balances = watch_routers(self.backbone), replays, balances

    @property
    def loss_dtype(self) -> torch.dtype:
        """Return the dtype of the loss: the backbone's, or fp32 if the backbone is frozen in bfloat16."""
        return torch.promote_types(self.backbone.dtype, torch.float32)

    def forward(self, rows: PackedRows) -> tuple[Tensor, Tensor]:
        """Return log-probs [A] of the completion tokens and entropies [A] of the distributions that they come from."""
        device = rows.token_ids.device
        # No cache of casts: each weight is used once a pass, and the cache would keep gathered shards alive.
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast, cache_enabled=False):
            context = PackedContext(rows.lengths)
            if self.routers is not None:
                recorded = rows.routing if self.replays else None
                self.routing = Replay(self.routers, recorded, self.balances and torch.is_grad_enabled())
                context.routing = self.routing
            taps = () if self.kept is None else self.taps
            with tapped(self.backbone.get_decoder().layers, taps) as layers:
                hidden = self.policy.hidden(rows.token_ids[None], rows.positions[None], context)[0]
            if self.kept is not None:
                # In bfloat16, as the head reads them: its inputs do not depend on the number of ranks.
                states = hidden.detach()
                if taps:
                    states = torch.cat([states, *(layers[tap][0].detach().to(states.dtype) for tap in taps)], -1)
                self.kept.append((rows, states.to(torch.bfloat16) if self.mixed else states))
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
    """Split every parameter over the ranks of ``mesh``, in place (FSDP2): a group per layer and one for the rest.

    A mixed scorer gathers weights and computes in bfloat16, and sums gradients over the ranks in fp32. Autocast would
    gather fp32 and keep a bfloat16 copy of every weight until the backward pass.
    """
    precision = MixedPrecisionPolicy()
    if scorer.mixed:
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        scorer.autocast = False
    for layer in scorer.backbone.get_decoder().layers:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(scorer, mesh=mesh, mp_policy=precision)


def recompute_layers(policy: Policy) -> None:
    """Keep only the input of each layer for the backward pass, which computes the layer once more (checkpointing).

    Call this before ``shard``: FSDP2 gathers around ``forward``, so that the second pass finds the weights that the
    backward pass has gathered.
    """
    for layer in policy.backbone.get_decoder().layers:
        layer.forward = partial(_recomputed, layer.forward)


def _recomputed(forward: Callable[..., Any], *inputs: Any, **settings: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **settings)
    # No random numbers are drawn in a layer, so their state need not be restored.
    return checkpoint(forward, *inputs, use_reentrant=False, preserve_rng_state=False, **settings)


def reshard(scorer: Scorer) -> None:
    """Return all modules to shards, as ``parameters()`` has them.

    After a pass without gradients the root's group is still whole.
    """
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@torch.no_grad()
def whole_tables(policy: Policy) -> tuple[Tensor, Tensor]:
    """Return the token embedding and language-model head [V, d], whole and detached; every rank takes part."""
    backbone = policy.backbone
    tables = (backbone.get_input_embeddings().weight, backbone.get_output_embeddings().weight)
    embedding, head = (whole(table.detach()) for table in tables)
    return embedding, head


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor behind a shard; every rank has to take part. A plain tensor is returned unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def like(full: Tensor, shard: Tensor) -> Tensor:
    """Return a full tensor (the same on all ranks) placed, typed and split as ``shard`` is; no communication."""
    full = full.to(device=shard.device, dtype=shard.dtype)
    if not isinstance(shard, DTensor):
        return full
    return distribute_tensor(full, shard.device_mesh, shard.placements, src_data_rank=None)


# ---- log-probs and entropies of tokens from hidden states, without ever holding the logits of all rows
#
# At 8192 rows and a vocabulary of 151,936 fp32 logits take 5 GB, and autograd would keep several such arrays. Here rows
# go through the head in chunks, and the backward computes each chunk's logits once more: one extra product with the
# head's matrix, a few per cent of an update.


def token_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    bias: Tensor | None = None,
    dtype: torch.dtype | None = None,
    chunk_elements: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return log p(target) [A] and the entropy of p in nats [A], p = softmax((hidden @ weight.T + bias) / temperature).

    hidden [A,d] (already gathered: completion tokens alone), weight [V,d], targets [A]. The matrix product is done in
    ``dtype`` (None: as ``hidden``), everything after it in fp32 or better. Both results have gradients.
    ``chunk_elements``: logits held at once; None: by the device.
    """
    elements = chunk_elements or CHUNK_ELEMENTS.get(hidden.device.type, CHUNK_ELEMENTS["cpu"])
    rows = max(1, elements // weight.shape[0])
    logp, entropy = _TokenLogprobs.apply(hidden, weight, bias, targets, temperature, dtype or hidden.dtype, rows)
    return logp, entropy


class _TokenLogprobs(torch.autograd.Function):
    """Autograd function of ``token_logprobs``.

    With z the scaled logits and H the entropy: dlogp_y/dz = 1[y] - p and dH/dz = -p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        dtype: torch.dtype,
        rows: int,
    ) -> tuple[Tensor, Tensor]:
        ctx.temperature, ctx.dtype, ctx.rows = temperature, dtype, rows
        ctx.set_materialize_grads(False)  # None tells that entropy takes no part in the loss
        cast_weight, cast_bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        logps, entropies = [], []
        for part, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            logq = _log_softmax(part.to(dtype), cast_weight, cast_bias, temperature)
            logps.append(logq.gather(1, target[:, None])[:, 0])
            entropies.append(-(logq.exp() * logq).sum(1))
        logp, entropy = torch.cat(logps), torch.cat(entropies)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logp: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, entropy = ctx.saved_tensors
        cast_weight, cast_bias = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        # Over all chunks in fp32: a bfloat16 sum of many chunks would lose the small ones. None: the weight is frozen.
        exact = torch.promote_types(weight.dtype, torch.float32)
        d_hidden = torch.zeros_like(hidden)
        d_weight = torch.zeros_like(weight, dtype=exact) if ctx.needs_input_grad[1] else None
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=exact)
        for start in range(0, len(hidden), ctx.rows):
            rows = slice(start, start + ctx.rows)
            part = hidden[rows].to(ctx.dtype)
            logq = _log_softmax(part, cast_weight, cast_bias, ctx.temperature)
            q = logq.exp()
            d_logits = torch.zeros_like(q)
            if grad_logp is not None:
                d_logits -= q * grad_logp[rows, None]
                d_logits.scatter_add_(1, targets[rows, None], grad_logp[rows, None].to(q.dtype))
            if grad_entropy is not None:
                # In place, as the other sums here: a chunk takes 3 arrays in fp32 at the highest.
                d_logits -= logq.add_(entropy[rows, None]).mul_(q).mul_(grad_entropy[rows, None])
            del logq, q
            d_logits = d_logits.div_(ctx.temperature).to(ctx.dtype)
            d_hidden[rows] = (d_logits @ cast_weight).to(hidden.dtype)
            if d_weight is not None:
                _add_product(d_weight, d_logits.T, part)
            if d_bias is not None:
                d_bias += d_logits.sum(0).to(exact)
        d_bias = None if bias is None or d_bias is None else d_bias.to(bias.dtype)
        d_weight = None if d_weight is None else d_weight.to(weight.dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of two matrices to ``total``, in place.

    On a GPU products in bfloat16 are summed up in fp32 within one call; a CPU rounds each to bfloat16 first.
    """
    if total.is_cuda and left.dtype != total.dtype:
        torch.ops.aten.addmm.dtype_out(total, left, right, total.dtype, out=total)
    else:
        total += (left @ right).to(total.dtype)


def _log_softmax(hidden: Tensor, weight: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return the log softmax of the scaled logits [A,V] in fp32 or better."""
    logits = functional.linear(hidden, weight, bias)
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).div_(temperature).log_softmax(-1)
