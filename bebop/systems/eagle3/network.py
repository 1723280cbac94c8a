"""Network of EAGLE-3 (Li et al., arXiv 2503.01840), with the weight names of its public checkpoints.

``fc`` combines the states of three target layers into one. One Llama layer reads it beside the embedding of the next
token; its queries, keys and values take both, 2d numbers. Recursive steps read the layer's own output, before the final
norm, instead of ``fc``'s. A head of its own covers a draft vocabulary, and ``d2t`` maps draft ids to tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from bebop.model.attention import AttentionContext

FLOOR = -1e9  # logit of tokens outside the draft vocabulary: probability 0 in fp32, and the entropy is not NaN


class Eagle3Attention(nn.Module):
    """Attention whose queries, keys and values read the concatenated embedding and state."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        size, bias = config.head_dim, bool(config.attention_bias)
        self.size, self.scaling = size, size**-0.5
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = nn.Linear(2 * config.hidden_size, heads * size, bias=bias)
        self.k_proj = nn.Linear(2 * config.hidden_size, kv_heads * size, bias=bias)
        self.v_proj = nn.Linear(2 * config.hidden_size, kv_heads * size, bias=bias)
        self.o_proj = nn.Linear(heads * size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], context: AttentionContext) -> Tensor:
        """Map [B, n, 2d] to [B, n, d]; ``rotary``: cosines and sines [B, n, D]."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        cos, sin = (part[:, None] for part in rotary)
        query, key = (part * cos + rotate_half(part) * sin for part in (query, key))
        attended = context.attend(0, query, key, value, self.scaling)
        return self.o_proj(attended.flatten(2))


class Eagle3Layer(nn.Module):
    """Decoder layer of EAGLE-3: a Llama layer except for the input of its attention."""

    def __init__(self, config: LlamaConfig, norm_before_residual: bool) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = norm_before_residual
        self.self_attn = Eagle3Attention(config)
        self.mlp = LlamaMLP(config)
        self.hidden_norm = LlamaRMSNorm(size, eps=eps)
        self.input_layernorm = LlamaRMSNorm(size, eps=eps)
        self.post_attention_layernorm = LlamaRMSNorm(size, eps=eps)

    def forward(
        self, embeddings: Tensor, hidden: Tensor, rotary: tuple[Tensor, Tensor], context: AttentionContext
    ) -> Tensor:
        """Map embeddings and states [B, n, d] to states [B, n, d] without a final norm."""
        normed = self.hidden_norm(hidden)
        residual = normed if self.norm_before_residual else hidden
        x = torch.cat([self.input_layernorm(embeddings), normed], -1)
        x = residual + self.self_attn(x, rotary, context)
        return x + self.mlp(self.post_attention_layernorm(x))


class Eagle3Network(nn.Module):
    """EAGLE-3 drafter network; its call signature is that of ``MTPHead``."""

    d2t: Tensor
    t2d: Tensor

    def __init__(
        self,
        *,
        hidden_size: int,
        intermediate_size: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        vocab_size: int,
        draft_vocab_size: int,
        taps: Sequence[int],
        rope: Mapping[str, Any],
        max_positions: int,
        norm_eps: float = 1e-6,
        own_embedding: bool = False,
        norm_before_residual: bool = False,
        attention_bias: bool = False,
    ) -> None:
        """Create a network with random weights, whose draft vocabulary is the first ``draft_vocab_size`` tokens.

        Args:
            hidden_size: d, the target's.
            intermediate_size: width of the MLP.
            heads: query heads.
            kv_heads: key and value heads.
            head_dim: size of each head.
            vocab_size: V, the target's.
            draft_vocab_size: W, tokens that can be drafted.
            taps: layers of the target whose output is read, the lowest first.
            rope: ``rope_parameters`` of a Llama configuration.
            max_positions: for rotary embeddings that need it.
            norm_eps: epsilon of all norms.
            own_embedding: whether it has its own embedding; else it reads the target's.
            norm_before_residual: whether the residual is the normed state; public checkpoints have both.
            attention_bias: whether queries, keys and values have a bias.
        """
        super().__init__()
        config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=1,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab_size,
            rms_norm_eps=norm_eps,
            # A Llama layer turns all of a head: a target that turns a part of it says so with this factor.
            rope_parameters={name: value for name, value in rope.items() if name != "partial_rotary_factor"},
            max_position_embeddings=max_positions,
            attention_bias=attention_bias,
        )
        self.config, self.taps = config, tuple(taps)
        self.vocab_size, self.draft_vocab_size = vocab_size, draft_vocab_size
        self.norm_before_residual = norm_before_residual
        self.fc = nn.Linear(len(self.taps) * hidden_size, hidden_size, bias=False)
        self.midlayer = Eagle3Layer(config, norm_before_residual)
        self.norm = LlamaRMSNorm(hidden_size, eps=norm_eps)
        self.lm_head = nn.Linear(hidden_size, draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size) if own_embedding else None
        self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(vocab_size) < draft_vocab_size)
        # Kept in a tuple, so that no dtype conversion of the module rounds its frequencies.
        self._rotary = (LlamaRotaryEmbedding(config),)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the module; the rotary frequencies move along and keep their dtype."""
        super()._apply(fn, recurse)
        self._rotary[0].to(self.norm.weight.device)
        return self

    @property
    def tokens(self) -> Tensor:
        """Return the token [W] of each draft id, ascending; ``d2t`` stores the difference of the two."""
        return self.d2t + torch.arange(self.draft_vocab_size, device=self.d2t.device)

    def choose(self, tokens: Tensor) -> None:
        """Make ``tokens`` [W] the draft vocabulary."""
        own = tokens.to(self.d2t.device).sort().values
        self.d2t.copy_(own - torch.arange(len(own), device=own.device))
        self.t2d.zero_()[own] = True

    def features(self, layers: Mapping[int, Tensor]) -> Tensor:
        """Return the input states [B, n, d] of the first step, from the target's states [B, n, d] after each tapped
        layer.
        """
        return self.fc(torch.cat([layers[tap] for tap in self.taps], -1))

    def forward(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Take one step for n anchors: embeddings of tokens t+1 and states of t, both [B, n, d] -> states [B, n, d].

        ``positions`` [B, n] is t for the first step and grows by one with each recursive step. The result is not
        normed: the
        next recursive step reads it.
        """
        return self.midlayer(embeddings, hidden, self._rotary[0](hidden, positions), context)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits [..., V] of states [..., d]; tokens outside the draft vocabulary have ``FLOOR``."""
        own = self.lm_head(self.norm(hidden))
        if self.draft_vocab_size == self.vocab_size:
            return own
        wide = own.new_full((*own.shape[:-1], self.vocab_size), FLOOR)
        return (
            wide.index_copy_(-1, self.tokens, own) if not own.requires_grad else wide.index_copy(-1, self.tokens, own)
        )


def taps_of(layers: int) -> list[int]:
    """Return the three target layers that EAGLE-3 reads: 1, L/2 - 1 and L - 4 of L = ``layers``, as in the engines.

    A model of fewer than seven layers has them closer together, and may repeat a layer.
    """
    return [min(1, layers - 1), max(layers // 2 - 1, 0), max(layers - 4, 0)] if layers > 6 else _close(layers)


def _close(layers: int) -> list[int]:
    """Return the first, a middle and the second-to-last layer of a small target."""
    return [0, (layers - 1) // 2, max(layers - 2, 0)]
