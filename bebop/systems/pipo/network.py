"""Network of PIPO: two tokens in, two tokens out (SPEC 2.2).

A compressor folds the embeddings of two tokens into one input of its own backbone, which predicts the first token of
the next pair. An MTP block drafts the second, and a small head estimates the confidence in that draft. Embedding and
language-model head are the policy's, frozen, and not part of the network.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from bebop.config.fields import check
from bebop.errors import UserError
from bebop.model.attention import ATTENTION, AttentionContext, CausalContext
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead, init_from_backbone

Compression = Literal["mlp", "random"]
# Fields of a configuration that describe how weights were stored, not the network.
NOT_OF_THE_NETWORK = ("architectures", "dtype", "transformers_version", "_name_or_path", "num_nextn_predict_layers")


class Compressor(nn.Module):
    """Compressor of two embeddings into one (SPEC Eq. 1)."""

    def __init__(self, size: int, kind: Compression) -> None:
        """Create the compressor. ``mlp``: a + b + MLP([a; b]), first a + b; ``random``: W [a; b], first noise."""
        super().__init__()
        self.inner = nn.Linear(2 * size, 2 * size) if kind == "mlp" else None
        self.outer = nn.Linear(2 * size, size)
        with torch.no_grad():
            self.outer.bias.zero_()
            if kind == "mlp":
                self.outer.weight.zero_()

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        """Compress the embeddings of both tokens of n pairs, each [..., d], to [..., d]."""
        x = torch.cat([first, second], -1)
        if self.inner is None:
            return self.outer(x)
        return first + second + self.outer(nn.functional.silu(self.inner(x)))


class ConfidenceHead(nn.Module):
    """Estimator of the chance that a draft is as good as the teacher's token (SPEC Eq. 6); inputs get no gradient."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(2 * size, eps=eps)
        self.inner = nn.Linear(2 * size, size, bias=False)
        self.outer = nn.Linear(size, 1, bias=False)

    def forward(self, *seen: Tensor) -> Tensor:
        """Return the logit [...] for the input states [..., d]."""
        x = self.norm(torch.cat([one.detach() for one in seen], -1))
        return self.outer(nn.functional.silu(self.inner(x)))[..., 0]


class PairModel(nn.Module):
    """Backbone over pairs, MTP block inside the pair, compressor and confidence head.

    Position ids are pair indices, also in the MTP block. Pair i is (x_2i, x_2i+1), with ``pad`` for a missing second
    token.
    """

    def __init__(
        self, *, backbone: Mapping[str, Any], pad: int, compressor: Compression = "mlp", tau: float = 0.5
    ) -> None:
        """Create the network from the configuration ``backbone`` of a Hugging Face decoder.

        ``pad``: the token that fills a pair. ``tau``: the default threshold of the confidence in decoding.
        """
        super().__init__()
        kind = {name: value for name, value in backbone.items() if name != "model_type"}
        config = AutoConfig.for_model(backbone["model_type"], **kind)
        self.pad, self.tau = pad, tau
        self.decoder = AutoModel.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
        self.config = self.decoder.config
        self.mtp = MTPHead(self.decoder, zero_first=False)
        self.decoder.set_input_embeddings(nn.Identity())  # it is given embeddings
        self.compressor = Compressor(config.hidden_size, compressor)
        self.head = ConfidenceHead(config.hidden_size, config.rms_norm_eps)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or convert the module; the rotary frequencies move along and keep their dtype."""
        rotary = self.decoder.rotary_emb
        frequencies = dict(rotary.named_buffers())
        super()._apply(fn, recurse)
        for name, exact in frequencies.items():
            if not exact.is_meta:
                setattr(rotary, name, exact.to(getattr(rotary, name).device))
        return self

    @property
    def layers(self) -> int:
        """Return the total number of attention layers; the MTP block's is the last."""
        return int(self.config.num_hidden_layers) + 1

    def compress(self, embeddings: Tensor) -> Tensor:
        """Compress the embeddings [..., 2, d] of pairs to inputs [..., d]."""
        z: Tensor = self.compressor(embeddings[..., 0, :], embeddings[..., 1, :])
        return z

    def states(self, inputs: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return normed states h [B, n, d], which predict the first token of the next pair.

        ``inputs`` are [B, n, d], ``positions`` pair positions [B, n]. Layers of the context: 0 .. L - 1.
        """
        out = self.decoder(inputs_embeds=inputs, position_ids=positions, use_cache=False, context=context)
        states: Tensor = out.last_hidden_state
        return states

    def draft_states(self, firsts: Tensor, states: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return normed states u [B, n, d], which predict the second token of the next pair (SPEC Eq. 4).

        Args:
            firsts: embeddings [B, n, d] of the first token of the next pair.
            states: h [B, n, d].
            positions: pair positions [B, n], those of ``states``.
            context: its layer is L, behind those of the backbone.
        """
        drafted: Tensor = self.mtp(firsts, states, positions, context)
        return drafted

    def confidence_logits(self, states: Tensor, drafted: Tensor) -> Tensor:
        """Return logits [...] of the confidence in drafts, from h and u [..., d]; neither gets a gradient."""
        logits: Tensor = self.head(states, drafted)
        return logits

    def confidence(self, states: Tensor, drafted: Tensor) -> Tensor:
        """Return the confidence [...] in drafts, in (0, 1), from h and u [..., d]."""
        return self.confidence_logits(states, drafted).sigmoid()

    def logits(self, policy: Policy, states: Tensor) -> Tensor:
        """Return logits [..., V] of h or u [..., d] by the policy's language-model head; ``pad`` is never predicted."""
        logits = policy.logits(states.to(policy.backbone.dtype)).float()
        never = torch.arange(logits.shape[-1], device=logits.device) == self.pad
        return logits.masked_fill(never, float("-inf"))

    def read(self, policy: Policy, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """Return states h and u, both [B, n - 1, d], of whole rows of pairs [B, n, 2] (token ids).

        Entry i of both belongs to pair i + 1: h predicts its first token. u sees that token and predicts the second.
        """
        embeddings = policy.embed(pairs)
        positions = torch.arange(pairs.shape[1] - 1, device=pairs.device).expand(len(pairs), -1)
        h = self.states(self.compress(embeddings[:, :-1]), positions, CausalContext())
        return h, self.draft_states(embeddings[:, 1:, 0], h, positions, CausalContext())

    @torch.no_grad()
    def start_from(self, policy: Policy) -> None:
        """Copy the weights of a policy's backbone and, if it has one, of its MTP head.

        A network with fewer layers copies those of ``spaced_layers``, in their order.
        """
        own = policy.backbone.get_decoder().state_dict()
        kept = spaced_layers(policy.backbone.config.num_hidden_layers, int(self.config.num_hidden_layers))
        self.decoder.load_state_dict({name: own[_of_layer(name, kept)] for name in self.decoder.state_dict()})
        if policy.mtp is None:
            init_from_backbone(self.mtp, self.decoder)
        else:
            self.mtp.load_state_dict(policy.mtp.state_dict())


def spaced_layers(depth: int, count: int) -> list[int]:
    """Return ``count`` of ``depth`` layers, from 0, evenly spaced, including the first and the last."""
    return [round(i * (depth - 1) / max(1, count - 1)) for i in range(count)]


def _of_layer(name: str, kept: list[int]) -> str:
    """Return the backbone's name of a weight, whose network copies the layers ``kept``."""
    start, found, after = name.partition("layers.")
    layer, _, rest = after.partition(".")
    return f"{start}layers.{kept[int(layer)]}.{rest}" if found else name


def settings_for(
    policy: Policy, compressor: Compression = "mlp", layers: int | None = None, pad: int | None = None
) -> dict[str, Any]:
    """Return the settings of a network for a policy.

    Args:
        policy: the policy whose backbone the network's resembles.
        compressor: how two embeddings become one.
        layers: layers of the network's backbone; None: as many as the policy has.
        pad: the token that fills half pairs, which no text may contain; None: the tokenizer's pad token.

    Raises:
        UserError: There is no token for padding alone, or the policy has fewer layers.
    """
    if pad is not None:
        last = policy.vocab_size - 1
        check(pad <= last, "options.pad", pad, f"give a number from 0 to {last}")
        check(pad not in policy.eos_token_ids, "options.pad", pad, "that token ends completions: give one no text has")
    pad = policy.tokenizer.pad_token_id if pad is None else pad
    if pad is None or pad in policy.eos_token_ids:
        state = "no pad token" if pad is None else "a pad token that ends completions"
        raise UserError(
            f"part=pipo is not possible: the model's tokenizer has {state}; a PAD fills half pairs: give options.pad"
        )
    config = policy.backbone.get_decoder().config
    changed = {name: value for name, value in config.to_diff_dict().items() if name not in NOT_OF_THE_NETWORK}
    if layers is not None:
        depth = int(config.num_hidden_layers)
        check(
            layers <= depth, "options.layers", layers, f"the model has {depth} layers: give as many or fewer, or null"
        )
        changed["num_hidden_layers"] = layers
        if changed.get("layer_types"):
            changed["layer_types"] = [changed["layer_types"][i] for i in spaced_layers(depth, layers)]
    return {
        "backbone": {**changed, "model_type": config.model_type},
        "pad": int(pad),
        "compressor": compressor,
    }


def as_pairs(token_ids: list[int] | tuple[int, ...], pad: int) -> list[tuple[int, int]]:
    """Return tokens as pairs; the last one is filled with ``pad`` if their number is odd."""
    filled = [*token_ids, pad] if len(token_ids) % 2 else [*token_ids]
    return list(zip(filled[::2], filled[1::2], strict=True))
