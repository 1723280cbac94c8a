"""Pseudo states beside text that the model has already read: for training, where the backbone is frozen.

Real states see no pseudo state, so they, their keys and their values are the same in every epoch. Here they come from a
pass of their own, without gradient, and only pseudo states go through the later layers.
"""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy, tapped
from bebop.model.firp import PseudoStates, rotary_pair


@dataclass(frozen=True, slots=True, kw_only=True)
class RealText:
    """What pseudo states read of texts that stand side by side, right-padded with 0."""

    hidden: Tensor  # [B, L, d] final, normed
    entering: Mapping[int, Tensor]  # layer that a state has gone through -> [B, L, d]
    held: Tensor  # [n, 2, B, Hkv, L, D] keys and values of the n layers from the first that a pseudo state goes through

    @staticmethod
    def beside(texts: "Sequence[RealText]") -> "RealText":
        """Some more of them side by side."""
        length = max(text.hidden.shape[1] for text in texts)

        def padded(parts: list[Tensor], batch: int) -> Tensor:
            shape, whole = [*parts[0].shape], sum(part.shape[batch] for part in parts)
            shape[batch], shape[-2] = whole, length
            made, first = parts[0].new_zeros(shape), 0
            for part in parts:
                end = first + part.shape[batch]
                made.narrow(batch, first, end - first).narrow(-2, 0, part.shape[-2]).copy_(part)
                first = end
            return made

        return RealText(
            hidden=padded([t.hidden for t in texts], 0),
            entering={layer: padded([t.entering[layer] for t in texts], 0) for layer in texts[0].entering},
            held=padded([t.held for t in texts], 2),
        )

    def only(self, layers: Collection[int]) -> "RealText":
        """What states that enter after ``layers``, some of those it was read for, read of it; nothing is copied."""
        first = min(layers) - min(self.entering) if layers else len(self.held)
        entering = {layer: self.entering[layer] for layer in layers}
        return RealText(hidden=self.hidden, entering=entering, held=self.held[first:])

    def row(self, row: int, length: int) -> "RealText":
        """A copy of one of the texts, which has so many tokens."""
        rows, own = slice(row, row + 1), slice(0, length)
        return RealText(
            hidden=self.hidden[rows, own].clone(),
            entering={layer: states[rows, own].clone() for layer, states in self.entering.items()},
            held=self.held[:, :, rows, :, own].clone(),
        )


class _Recorded(CausalContext):
    """Attends as ever, and keeps keys and values of some layers."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.kept: list[Tensor] = []  # [2,B,Hkv,L,D]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See ``AttentionContext``."""
        if layer >= self.first:
            self.kept.append(torch.stack([key, value]))
        return super().attend(layer, query, key, value, scaling)


class _BesideText:
    """Pseudo states of one step at a time; see ``PseudoContext`` for what they see."""

    def __init__(self, real: RealText, anchors: Tensor, masked: bool) -> None:
        self.held, self.first, self.masked = real.held, min(real.entering), masked
        places = torch.arange(real.hidden.shape[1], device=anchors.device)
        unseen = (places > anchors[..., None])[:, None, None]
        self.bias = torch.zeros_like(unseen, dtype=real.held.dtype).masked_fill_(unseen, float("-inf"))  # [B,1,1,A,L]
        self.earlier: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> [B,Hkv,1,A,D] of each step

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See ``AttentionContext``; n = A. Query heads of a group are rows of one product with the text."""
        batch, heads, width, size = query.shape
        kv_heads, group = key.shape[1], heads // key.shape[1]
        earlier = self.earlier.setdefault(layer, [])
        earlier.append((key[:, :, None], value[:, :, None]))
        own = earlier[-1:] if self.masked else earlier
        q = query.reshape(batch, kv_heads, group, width, size) * scaling
        keys, values = self.held[layer - self.first]
        scores = (q.flatten(2, 3) @ keys.transpose(-1, -2)).view(batch, kv_heads, group, width, -1)
        alone = [(q * k).sum(-1, keepdim=True) for k, _ in own]
        weights = torch.cat([scores.add_(self.bias), *alone], -1).softmax(-1)
        text, *parts = weights.split([scores.shape[-1], *[1] * len(own)], -1)
        out = (text.flatten(2, 3) @ values).view_as(q)
        for part, (_, v) in zip(parts, own, strict=True):
            out = out + part * v
        return out.reshape(batch, heads, width, size).transpose(1, 2)


@torch.no_grad()
def read_text(policy: Policy, layers: Sequence[int], texts: Sequence[Sequence[int]], batch: int = 32) -> list[RealText]:
    """What pseudo states that enter after ``layers`` (from 1) read of each text. Texts of like length go together.

    Raises:
        UserError: a model whose layers are not given rotary embeddings as one pair of tensors.
    """
    decoder, first = policy.backbone.get_decoder(), min(layers)
    read: dict[int, RealText] = {}
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        ids = pad_sequence([torch.tensor(texts[i], device=policy.device) for i in part], batch_first=True)
        positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        context = _Recorded(first)

        def asked(module: Any, args: Any, settings: dict[str, Any]) -> None:
            rotary_pair(decoder, settings)

        with ExitStack() as stack:
            taps = stack.enter_context(tapped(decoder.layers, sorted({layer - 1 for layer in layers})))
            hook = decoder.layers[0].register_forward_pre_hook(asked, with_kwargs=True)
            stack.callback(hook.remove)
            hidden = policy.hidden(ids, positions, context)
        held = torch.stack(context.kept) if context.kept else hidden.new_zeros(0, 2, *ids.shape[:1], 1, ids.shape[1], 1)
        whole = RealText(hidden=hidden, entering={tap + 1: states for tap, states in taps.items()}, held=held)
        read |= {i: whole.row(row, len(texts[i])) for row, i in enumerate(part)}
    return [read[i] for i in range(len(texts))]


def size_of_text(policy: Policy, layers: Sequence[int]) -> int:
    """Bytes that ``read_text`` takes for a token."""
    config = policy.backbone.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * heads * size * (config.num_hidden_layers - min(layers))
    return int(cached + config.hidden_size * (1 + len({*layers}))) * policy.backbone.dtype.itemsize


def pseudo_beside(
    policy: Policy, network: PseudoStates, real: RealText, anchors: Tensor, steps: int, taps: bool = False
) -> tuple[Tensor, list[list[Tensor]]]:
    """Final, normed pseudo states [B,A,steps,d], equal to those of ``hidden_with_pseudo`` up to rounding.

    Args:
        policy: its backbone is frozen.
        network: a matrix that takes a gradient gets it through its own step and those after it.
        real: read for the layers of this network.
        anchors: [B,A] positions.
        steps: the first so many.
        taps: also give what each step [B,A,d] is when it enters and after each layer that it goes through.
    """
    decoder, context = policy.backbone.get_decoder(), _BesideText(real, anchors, network.masked)
    drafts, passed = [], []
    for step in range(steps):
        layer, positions = network.layers[step], anchors + step + 1
        state = network.pseudo(step, real.entering[layer], anchors)
        through = [state]
        rotary = decoder.rotary_emb(state, positions)
        for module in decoder.layers[layer:]:
            state = module(
                state, attention_mask=None, position_ids=positions, position_embeddings=rotary, context=context
            )
            through.append(state)
        drafts.append(decoder.norm(state))
        passed.append(through if taps else [])
    return torch.stack(drafts, 2), passed
