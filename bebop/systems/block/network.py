"""Networks of block drafting: the drafter of whole blocks, and the choice of a block size.

``BlockDraftNetwork`` has the layout of DFlash (SPEC 5.1): one pass predicts every masked token of a block. Slot 0 of a
block is the newest token, the others are MASK. Slots see one another and, as keys and values of every layer, the
projected states of the target's tapped layers for the text before. Embedding and language-model head are the target's.

``BlockLengthNetwork`` chooses a request's block size from the target's output for its prompt (BlockPilot, SPEC 5.4).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from bebop.errors import UserError
from bebop.model.attention import ATTENTION, AttentionContext


class TextContext(AttentionContext, Protocol):
    """Attention context that also stores text, as keys and values from the target's states."""

    def write(self, layer: int, key: Tensor, value: Tensor) -> object:
        """Store key and value [B,Hkv,n,D] of one layer."""
        ...


class BlockDraftNetwork(nn.Module):
    """Qwen3 layers over a block; ``read`` adds the text before it."""

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        taps: Sequence[int],
        layers: int = 2,
        block: int = 8,
        rope_theta: float = 10_000.0,
        norm_eps: float = 1e-6,
    ) -> None:
        """Create the network. ``taps``: layers of the target that it reads; ``block``: slots of a block in training,
        the anchor's included.
        """
        super().__init__()
        config = Qwen3Config(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
            attn_implementation=ATTENTION,
        )
        self.config, self.taps, self.block = config, tuple(taps), block
        self.kv_heads, self.head_dim = kv_heads, head_dim
        self.mask = nn.Parameter(torch.randn(hidden_size) * config.initializer_range)
        self.fc = nn.Linear(len(self.taps) * hidden_size, hidden_size, bias=False)
        self.hidden_norm = Qwen3RMSNorm(hidden_size, eps=norm_eps)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(layers))
        self.norm = Qwen3RMSNorm(hidden_size, eps=norm_eps)
        # Kept in a tuple, so that no dtype conversion of the module rounds its frequencies.
        self._rotary = (Qwen3RotaryEmbedding(config),)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the module; the rotary frequencies move along and keep their dtype."""
        super()._apply(fn, recurse)
        self._rotary[0].to(self.mask.device)
        return self

    def read(self, states: Mapping[int, Tensor], positions: Tensor, context: TextContext) -> None:
        """Add text to the context: the target's states [B,n,d] after each tapped layer, at ``positions`` [B,n]."""
        features = self.hidden_norm(self.fc(torch.cat([states[tap] for tap in self.taps], -1)))
        cos, sin = (x[:, None] for x in self._rotary[0](features, positions))
        shape = (*positions.shape, self.kv_heads, self.head_dim)
        for layer in self.layers:
            attention: Any = layer.self_attn
            key = attention.k_norm(attention.k_proj(features).view(shape)).transpose(1, 2)
            value = attention.v_proj(features).view(shape).transpose(1, 2)
            context.write(attention.layer_idx, key * cos + rotate_half(key) * sin, value)

    def slots(self, anchors: Tensor, block: int) -> Tensor:
        """Return the inputs [..., b, d] of blocks whose newest tokens have the embeddings ``anchors`` [..., d]."""
        masks = self.mask.expand(*anchors.shape[:-1], block - 1, -1)
        return torch.cat([anchors[..., None, :], masks], -2)

    def forward(self, slots: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return normed states [B,n,d] of ``slots`` [B,n,d] at ``positions`` [B,n], for the language-model head.

        The state of a slot predicts the token of that slot, not the one after it; the anchor's state is unused.
        """
        rotary = self._rotary[0](slots, positions)
        x = slots
        for layer in self.layers:
            x = layer(x, attention_mask=None, position_embeddings=rotary, context=context)
        return self.norm(x)


def taps_of(layers: int, count: int) -> list[int]:
    """Return ``count`` of a target's ``layers`` layers, evenly spaced from 1 to L - 3: 1 and 9 of 12 (SPEC 5.1)."""
    if not 1 <= count <= max(1, layers - 3):
        raise UserError(f"options.taps={count} is not possible: a model of {layers} layers has 1..{max(1, layers - 3)}")
    first, last = min(1, layers - 1), max(layers - 3, 0)
    if count == 1:
        return [layers // 2]
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


# ---- the choice of a block size


TOP = 16  # sorted logits among the features


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEnd:
    """Target's output at the end of B prompts."""

    logits: Tensor  # [B, V] of the target at the last token, raw
    hidden: Tensor  # [B, d] its state there, final norm applied
    lengths: Tensor  # [B] tokens of the prompts


def _sorted(end: PromptEnd) -> Tensor:
    """Return the largest logits in descending order, the entropy (nats) and the margin, independent of token ids."""
    logits = end.logits.float()
    top = logits.topk(min(TOP, logits.shape[-1])).values
    logp = logits.log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1, keepdim=True)
    return torch.cat([top, entropy, top[:, :1] - top[:, 1:2]], -1)


# Possible inputs of the network; BlockPilot found normalised logits and softmax worse than raw logits.
FEATURES: Mapping[str, Callable[[PromptEnd], Tensor]] = {
    "logits": lambda end: end.logits,
    "sorted": _sorted,
    "hidden": lambda end: end.hidden,
    "length": lambda end: end.lengths[:, None] / 100,
}


class BlockLengthNetwork(nn.Module):
    """Scorer of the candidate block sizes: two hidden layers, the second with a residual. The largest score decides.

    Training defines the scores: logits of a classifier, or the expected tokens per cycle of each size.
    """

    def __init__(
        self,
        *,
        inputs: int,
        candidates: Sequence[int],
        default: int,
        hidden: int = 64,
        layers: int = 2,
        dropout: float = 0.2,
        features: str = "logits",
    ) -> None:
        """Create the network. ``inputs``: number of inputs, V for logits; ``features``: a row of ``FEATURES``.

        ``candidates``: block sizes b, the newest token's slot included, ascending. ``default``: the size until one is
        chosen, which takes the logits of a request's first cycle.
        """
        super().__init__()
        assert list(candidates) == sorted(set(candidates)), "candidates rise"
        self.candidates, self.default, self.features = tuple(candidates), default, features
        self.first = nn.Linear(inputs, hidden)
        self.hidden = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(layers - 1))
        self.last = nn.Linear(hidden, len(self.candidates))
        self.dropout = nn.Dropout(dropout)
        nn.init.kaiming_normal_(self.first.weight, nonlinearity="relu")
        for layer in self.hidden:
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")  # type: ignore[arg-type]
        nn.init.xavier_uniform_(self.last.weight)

    def forward(self, features: Tensor) -> Tensor:
        """Return scores [B, C] of the candidates for features [B, inputs]."""
        x = self.dropout(self.first(features).relu())
        for layer in self.hidden:
            x = x + self.dropout(layer(x).relu())
        return self.last(x)

    def sizes(self, features: Tensor) -> Tensor:
        """Return the block size [B] for features [B, inputs]."""
        candidates = torch.tensor(self.candidates, device=features.device)
        return candidates[self(features.to(self.last.weight.dtype)).argmax(-1)]

    def choose(self, end: PromptEnd) -> Tensor:
        """Return the block size [B] of each prompt."""
        return self.sizes(FEATURES[self.features](end))
