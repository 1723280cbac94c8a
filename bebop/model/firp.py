"""Pseudo hidden states of future tokens inside the backbone (SPEC 3, FIRP).

For step k a matrix W_k turns the state of token i after layer t_k into one that stands for token i + k. It enters the
next layer as a further element of the sequence at position id i + k, goes through all later layers, and what comes out
is read by the language-model head as the distribution of token i + k + 1. Real states never see pseudo states.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bebop.errors import UserError
from bebop.model.attention import AttentionContext, CausalContext, SlotContext
from bebop.model.backbone import Policy
from bebop.model.mtp import gather_rows


class PseudoStates(nn.Module):
    """The matrices W_1..W_K (SPEC Eq. 3 of section 3): d x d, no bias, the identity at first."""

    def __init__(
        self, *, hidden_size: int, layers: Sequence[int], masked: bool = False, chances: Sequence[Sequence[float]] = ()
    ) -> None:
        """``layers``: t_1 <= ... <= t_K, layers that a state has gone through, counted from 1.

        ``masked``: a pseudo state does not see those of earlier steps of its own anchor, an ablation. ``chances``: how
        often the token of rank 0, 1, ... of each step was right on text to calibrate with, from which trees are made.
        """
        super().__init__()
        if not layers or min(layers) < 1 or list(layers) != sorted(layers):
            raise UserError(f"layers={list(layers)} is not possible: give numbers from 1 on that do not fall")
        self.layers, self.masked = tuple(layers), masked
        self.chances = tuple(tuple(row) for row in chances)
        self.maps = nn.ModuleList(nn.Linear(hidden_size, hidden_size, bias=False) for _ in layers)
        for one in self.maps:
            nn.init.eye_(one.weight)  # type: ignore[arg-type]

    def pseudo(self, step: int, hidden: Tensor, anchors: Tensor) -> Tensor:
        """Pseudo states [B,A,d] of ``step`` (from 0) for anchors [B,A], from real states [B,n,d] after its layer."""
        own = self.maps[step]
        made: Tensor = own(gather_rows(hidden, anchors).to(own.weight.dtype)).to(hidden.dtype)  # type: ignore[arg-type]
        return made

    def check(self, policy: Policy) -> None:
        """``UserError`` if the model has fewer layers than these enter, or none that can be entered."""
        decoder, depth = policy.backbone.get_decoder(), policy.backbone.config.num_hidden_layers
        if max(self.layers) > depth:
            raise UserError(f"pseudo states enter after layer {max(self.layers)}, and the model has layers 1..{depth}")
        if not all(hasattr(decoder, name) for name in ("layers", "norm", "rotary_emb")):
            raise UserError(
                f"pseudo states need decoder layers with rotary embeddings: {type(decoder).__name__} differs"
            )


class PseudoContext:
    """Real states first, which attend as ever, then pseudo states, step by step for all anchors (SPEC 3.2).

    A pseudo state sees the real ones up to its anchor, itself and, unless masked, those of earlier steps of its anchor.
    """

    def __init__(self, real: AttentionContext, width: int, seen: Tensor, masked: bool = False) -> None:
        """``real``: of the first ``width`` rows; ``seen`` [B,A,P]: which of the text's entries an anchor sees."""
        self.real, self.width, self.seen, self.masked = real, width, seen, masked

    @classmethod
    def training(cls, anchors: Tensor, length: int, masked: bool = False) -> "PseudoContext":
        """For right-padded rows of ``length`` tokens side by side, with ``anchors`` [B,A]."""
        seen = torch.arange(length, device=anchors.device) <= anchors[..., None]
        return cls(CausalContext(), length, seen, masked)

    def text(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [B,Hkv,P,D] of the text, given those of this pass."""
        return key, value

    def own(self, count: int) -> Tensor:
        """Which pseudo states each of ``count`` of them sees [count, count]."""
        anchors = self.seen.shape[1]
        places = torch.arange(count, device=self.seen.device)
        step, anchor = places // anchors, places % anchors
        earlier = step == step[:, None] if self.masked else step <= step[:, None]
        return earlier & (anchor == anchor[:, None])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """See ``AttentionContext``; n = width + pseudo states."""
        n, count = self.width, query.shape[2] - self.width
        fed = key[:, :, :n], value[:, :, :n]
        real = self.real.attend(layer, query[:, :, :n], *fed, scaling)
        if not count:
            return real
        keys, values = (
            torch.cat([text, one[:, :, n:]], 2) for text, one in zip(self.text(layer, *fed), (key, value), strict=True)
        )
        text = self.seen.repeat(1, count // self.seen.shape[1], 1)
        seen = torch.cat([text, self.own(count).expand(len(text), -1, -1)], -1)[:, None]
        gqa = query.shape[1] != key.shape[1]
        pseudo = scaled_dot_product_attention(query[:, :, n:], keys, values, seen, scale=scaling, enable_gqa=gqa)
        return torch.cat([real, pseudo.transpose(1, 2)], 1)


class PseudoSlots(PseudoContext):
    """Beside a pass over the engine's cache. Pseudo states leave nothing in it."""

    def __init__(self, cache: SlotContext, anchors: Tensor, masked: bool = False) -> None:
        """``cache``: placed; ``anchors`` [B,A]: rows of the pass, each of which sees what its real state sees."""
        visible = cache.bias[:, 0, 0] == 0  # [B,n,P]
        seen = visible.gather(1, anchors[..., None].expand(-1, -1, visible.shape[-1]))
        super().__init__(cache, visible.shape[1], seen, masked)
        self.cache = cache

    def text(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """See ``PseudoContext``; the pass has written its own entries already."""
        keys, values = self.cache.held(layer, len(key))
        used = self.seen.shape[-1]
        return keys[:, :, :used], values[:, :, :used]


def hidden_with_pseudo(
    policy: Policy,
    network: PseudoStates,
    token_ids: Tensor,
    positions: Tensor,
    anchors: Tensor,
    context: PseudoContext,
    steps: int | None = None,
) -> tuple[Tensor, Tensor]:
    """A pass with pseudo states in it: final, normed real states [B,n,d], and pseudo states [B,A,K,d].

    Args:
        policy: receives no gradient through the states that the matrices read.
        network: the matrices, the gradient's only way in if the backbone is frozen.
        token_ids: [B,n].
        positions: [B,n] position ids; those of pseudo states are their anchor's and k.
        anchors: [B,A] rows of this pass, i. Pseudo state (i, k) predicts the token after i + k.
        context: made for these anchors.
        steps: the first so many; None: all K.

    Raises:
        UserError: a model whose layers are not given rotary embeddings as one pair of tensors.
    """
    count = len(network.layers) if steps is None else steps
    with _entered(policy.backbone.get_decoder(), network, positions, anchors, count):
        states = policy.hidden(token_ids, positions, context)
    width = token_ids.shape[1]
    return states[:, :width], states[:, width:].unflatten(1, (count, -1)).transpose(1, 2)


@contextmanager
def _entered(decoder: Any, network: PseudoStates, positions: Tensor, anchors: Tensor, steps: int) -> Iterator[None]:
    """While the block runs, pseudo states enter after their layers, and later layers get their position ids too."""
    layers, width, each = network.layers[:steps], positions.shape[1], anchors.shape[1]
    starts = positions.gather(1, anchors)
    later = torch.cat([starts + k for k in range(1, steps + 1)], 1)  # [B, K * A]
    rotary: list[tuple[Tensor, Tensor]] = []  # of ``later``, once there is a state to tell their type

    def enter(passed: int) -> Any:
        entering = [k for k, layer in enumerate(layers) if layer == passed]
        present = each * sum(layer <= passed for layer in layers)

        def hook(_module: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            hidden, *others = args
            # The states that are read are the frozen model's: no gradient goes on into what made them.
            made = [network.pseudo(k, hidden[:, :width].detach(), anchors) for k in entering]
            hidden = torch.cat([hidden, *made], 1)
            if passed < len(decoder.layers):
                if not rotary:
                    rotary.append(decoder.rotary_emb(hidden, later))
                settings = settings | _longer(decoder, settings, later[:, :present], rotary[0])
            return (hidden, *others), settings

        return hook

    modules = [*decoder.layers, decoder.norm]
    hooks = [
        modules[passed].register_forward_pre_hook(enter(passed), with_kwargs=True)
        for passed in range(min(layers), len(modules))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _longer(
    decoder: nn.Module, settings: Mapping[str, Any], later: Tensor, rotary: tuple[Tensor, Tensor]
) -> dict[str, Any]:
    """What a layer is told about positions, for those of the pseudo states that are present too."""
    given = rotary_pair(decoder, settings)
    batch, count = later.shape
    pair = tuple(
        torch.cat([one.expand(batch, -1, -1), more[:, :count]], 1) for one, more in zip(given, rotary, strict=True)
    )
    longer: dict[str, Any] = {"position_embeddings": pair}
    if settings.get("position_ids") is not None:
        longer["position_ids"] = torch.cat([settings["position_ids"].expand(batch, -1), later], 1)
    return longer


def rotary_pair(decoder: nn.Module, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The rotary embeddings that a layer is given; ``UserError`` if they are not one pair of tensors."""
    given = settings.get("position_embeddings")
    if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(x, Tensor) for x in given)):
        raise UserError(
            f"pseudo states are not possible: {type(decoder).__name__} gives its layers no pair of rotary embeddings"
        )
    return given


def middle_layers(depth: int, count: int = 3) -> list[int]:
    """Where ``count`` steps enter a model of so many layers: one layer after the other, 5, 6 and 7 of 12."""
    return [min(max(1, depth // 2 - 1) + k, depth) for k in range(count)]


EntryClass = PseudoStates
