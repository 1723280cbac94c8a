"""megatron-core's MTP layer as an MTP head of ``bebop.model.mtp``: recursive, with the attention of drafting.

``MegatronHead`` takes the place of ``MTPHead``, and ``chain`` and ``unroll`` run unchanged: the recursion is the same
by construction. Attention heads and the feed-forward layer are split over tensor ranks.
"""

from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch import Tensor, nn

from bebop.errors import UserError
from bebop.model.attention import AttentionContext, CausalContext

ROUND = 1024  # lengths of the table of rotations


class ContextAttention(nn.Module):
    """Replacement for megatron-core's core attention; an attention context determines where keys and values live."""

    def __init__(self, config: Any, **_: Any) -> None:
        """Take the scale from a TransformerConfig; the other arguments (layer number, kind of mask) are not used."""
        super().__init__()
        self.context: AttentionContext = CausalContext()
        self.scale = config.softmax_scale if getattr(config, "softmax_scale", None) else config.kv_channels**-0.5

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **_: Any
    ) -> Tensor:
        """Attend causally: query [s, b, H, D], key and value [s, b, Hkv, D] of this rank's heads -> [s, b, H * D]."""
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = self.context.attend(0, q, k, v, self.scale)
        return out.transpose(0, 1).flatten(2)


class MegatronHead(nn.Module):
    """MTP layer of a GPTModel, called like ``MTPHead``; tensors [B, n, d] are whole on every tensor rank."""

    def __init__(self, layer: nn.Module, rotary: nn.Module, zero_first: bool) -> None:
        """Wrap ``layer``, a MultiTokenPredictionLayer, which stays a part of its model.

        Raises:
            UserError: attention or rotary positions of an unknown kind.
        """
        super().__init__()
        # Through tuples, so that parameters have one name only.
        self._layer, self._rotary = (layer,), tuple[Any]((rotary,))
        self.zero_first = zero_first
        attention = inner(layer).self_attention
        if not hasattr(attention, "linear_qkv") or type(rotary) is not RotaryEmbedding:
            kinds = f"{type(attention).__name__} with {type(rotary).__name__}"
            raise UserError(f"an MTP layer of {kinds} is not known: grouped-query attention with rotary positions is")
        if not isinstance(attention.core_attention, ContextAttention):
            attention.core_attention = ContextAttention(attention.config)
        attention.checkpoint_core_attention = False  # recomputation would add its keys to the chain a second time
        self._core = (attention.core_attention,)
        whole(layer)

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Take one step for n anchors, like ``MTPHead.forward``."""
        if self.zero_first:
            embeddings = embeddings.masked_fill((positions == 0)[..., None], 0)
        layer: Any = self._layer[0]
        table = self._rotary[0].get_emb((int(positions.max()) // ROUND + 1) * ROUND)  # [length, 1, 1, D]
        turns = table[positions.T][:, :, 0]  # [n, B, 1, D]
        self._core[0].context = context
        x = layer._concat_embeddings(hidden.transpose(0, 1), embeddings.transpose(0, 1))
        x, _ = inner(layer)(hidden_states=x, attention_mask=None, rotary_pos_emb=turns)
        self._core[0].context = CausalContext()
        return layer.final_layernorm(x).transpose(0, 1)


def inner(layer: nn.Module) -> Any:
    """Return the transformer layer inside an MTP layer; megatron-core renamed it in 0.17."""
    block = getattr(layer, "transformer_layer", None) or getattr(layer, "mtp_model_layer", None)
    if block is None or not hasattr(block, "self_attention"):
        raise UserError(f"the MTP layer {type(layer).__name__} has no transformer layer with self-attention: not known")
    return block


def whole(layer: nn.Module) -> None:
    """Make an MTP layer work on whole sequences and keep its gradients to itself, whatever its model does.

    Sequence parallelism is turned off inside it, and no linear layer adds gradients to Megatron's buffers.
    """
    modules: Any = layer.modules()
    for module in modules:
        if hasattr(module, "sequence_parallel"):
            parallel = bool(module.sequence_parallel)
            module.sequence_parallel = False
            if parallel and hasattr(module, "allreduce_dgrad"):
                module.allreduce_dgrad = True
        if hasattr(module, "gradient_accumulation_fusion"):
            module.gradient_accumulation_fusion = False
    for parameter in layer.parameters():
        if hasattr(parameter, "sequence_parallel"):
            parameter.sequence_parallel = False


def constant(hidden: Tensor, sequence_parallel: bool) -> Tensor:
    """Return hidden states [s, b, d] without their graph, gathered if sequence parallelism splits s over ranks."""
    hidden = hidden.detach()
    if sequence_parallel:
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        with torch.no_grad():
            hidden = gather_from_sequence_parallel_region(hidden)
    return hidden
