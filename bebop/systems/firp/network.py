"""Pseudo hidden states of future tokens inside the backbone (FIRP, SPEC 3).

For step k a matrix W_k maps the state of token i after layer t_k to one that represents token i + k. It enters the next
layer as a further element of the sequence at position id i + k and passes through all later layers. The language-model
head reads the result as the distribution of token i + k + 1. Real states never see pseudo states.

Training runs pseudo states beside text that the model has read already. The backbone is frozen, so real states, keys
and values are the same in every epoch: they come from one pass without gradient (``read_text``), and only pseudo states
pass through the later layers (``pseudo_beside``).
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from bebop.errors import UserError
from bebop.model.attention import AttentionContext, CausalContext, SlotContext
from bebop.model.backbone import Policy, tapped
from bebop.model.mtp import gather_rows


class PseudoStates(nn.Module):
    """Matrices W_1..W_K (SPEC Eq. 3 of section 3): d x d, no bias, initially the identity."""

    def __init__(
        self, *, hidden_size: int, layers: Sequence[int], masked: bool = False, chances: Sequence[Sequence[float]] = ()
    ) -> None:
        """Create the matrices for ``layers``: t_1 <= ... <= t_K, the number of layers before each enters, from 1.

        ``masked``: a pseudo state does not see those of earlier steps of its own anchor, an ablation. ``chances``: how
        often the token of rank 0, 1, ... of each step was right on calibration text, which determines the trees.
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
        """Return pseudo states [B,A,d] of ``step`` (from 0) for anchors [B,A], from real states [B,n,d] after its
        layer.
        """
        own = self.maps[step]
        made: Tensor = own(gather_rows(hidden, anchors).to(own.weight.dtype)).to(hidden.dtype)  # type: ignore[arg-type]
        return made

    def check(self, policy: Policy) -> None:
        """Raise ``UserError`` if the model has too few layers, or layers without the expected rotary embeddings."""
        decoder, depth = policy.backbone.get_decoder(), policy.backbone.config.num_hidden_layers
        if max(self.layers) > depth:
            raise UserError(f"pseudo states enter after layer {max(self.layers)}, and the model has layers 1..{depth}")
        if not all(hasattr(decoder, name) for name in ("layers", "norm", "rotary_emb")):
            raise UserError(
                f"pseudo states need decoder layers with rotary embeddings: {type(decoder).__name__} differs"
            )


class PseudoContext:
    """Attention context of real states, then pseudo states, step by step for all anchors (SPEC 3.2).

    Real states attend as usual. A pseudo state sees the real ones up to its anchor, itself and, unless masked, those of
    earlier steps of its anchor.
    """

    def __init__(self, real: AttentionContext, width: int, seen: Tensor, masked: bool = False) -> None:
        """Combine ``real``, the context of the first ``width`` rows, with ``seen`` [B,A,P]: the text entries an anchor
        sees.
        """
        self.real, self.width, self.seen, self.masked = real, width, seen, masked

    @classmethod
    def training(cls, anchors: Tensor, length: int, masked: bool = False) -> "PseudoContext":
        """Create the context of right-padded rows of ``length`` tokens, with ``anchors`` [B,A]."""
        seen = torch.arange(length, device=anchors.device) <= anchors[..., None]
        return cls(CausalContext(), length, seen, masked)

    def text(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values [B,Hkv,P,D] of the text, given those of this pass."""
        return key, value

    def own(self, count: int) -> Tensor:
        """Return a mask [count, count] of the pseudo states that each of ``count`` sees."""
        anchors = self.seen.shape[1]
        places = torch.arange(count, device=self.seen.device)
        step, anchor = places // anchors, places % anchors
        earlier = step == step[:, None] if self.masked else step <= step[:, None]
        return earlier & (anchor == anchor[:, None])

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend from n = width + pseudo states."""
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
    """Context of pseudo states in a pass over the engine's cache, in which they leave no entries."""

    def __init__(self, cache: SlotContext, anchors: Tensor, masked: bool = False) -> None:
        """Use a placed ``cache``; each row of the pass in ``anchors`` [B,A] sees what its real state sees."""
        visible = cache.seen()  # [B,n,P]
        seen = visible.gather(1, anchors[..., None].expand(-1, -1, visible.shape[-1]))
        super().__init__(cache, visible.shape[1], seen, masked)
        self.cache, self.routing = cache, cache.routing

    def text(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return the cache's keys and values: the pass has already written its own entries."""
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
    """Run a pass with pseudo states in it; return final, normed real states [B,n,d], and pseudo states [B,A,K,d].

    Args:
        policy: receives no gradient through the states that the matrices read.
        network: the matrices, the only source of gradient if the backbone is frozen.
        token_ids: [B,n].
        positions: [B,n] position ids; a pseudo state's is its anchor's plus k.
        anchors: [B,A] rows of this pass, i. Pseudo state (i, k) predicts the token after i + k.
        context: made for these anchors.
        steps: the first so many steps; None: all K.

    Raises:
        UserError: a model whose layers do not receive rotary embeddings as one pair of tensors.
    """
    count = len(network.layers) if steps is None else steps
    with _entered(policy.backbone.get_decoder(), network, positions, anchors, count):
        states = policy.hidden(token_ids, positions, context)
    width = token_ids.shape[1]
    return states[:, :width], states[:, width:].unflatten(1, (count, -1)).transpose(1, 2)


@contextmanager
def _entered(decoder: Any, network: PseudoStates, positions: Tensor, anchors: Tensor, steps: int) -> Iterator[None]:
    """Let pseudo states enter after their layers within the block, and pass their position ids to later layers."""
    layers, width, each = network.layers[:steps], positions.shape[1], anchors.shape[1]
    starts = positions.gather(1, anchors)
    later = torch.cat([starts + k for k in range(1, steps + 1)], 1)  # [B, K * A]
    rotary: list[tuple[Tensor, Tensor]] = []  # of ``later``, computed once a state gives the dtype

    def enter(passed: int) -> Any:
        entering = [k for k, layer in enumerate(layers) if layer == passed]
        present = each * sum(layer <= passed for layer in layers)

        def hook(_module: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            hidden, *others = args
            # The input states are the frozen model's: no gradient flows back through them.
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
    """Return a layer's position arguments, extended to the pseudo states that are present."""
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
    """Return the rotary embeddings that a layer receives; raise ``UserError`` if they are not one pair of tensors."""
    given = settings.get("position_embeddings")
    if not (isinstance(given, tuple) and len(given) == 2 and all(isinstance(x, Tensor) for x in given)):
        raise UserError(
            f"pseudo states are not possible: {type(decoder).__name__} gives its layers no pair of rotary embeddings"
        )
    return given


def middle_layers(depth: int, count: int = 3) -> list[int]:
    """Return the layers where ``count`` steps enter a model of ``depth`` layers, consecutive: 5, 6 and 7 of 12."""
    return [min(max(1, depth // 2 - 1) + k, depth) for k in range(count)]


# ---- pseudo states beside previously read text


@dataclass(frozen=True, slots=True, kw_only=True)
class RealText:
    """Inputs of pseudo states from a batch of texts, right-padded with 0."""

    hidden: Tensor  # [B, L, d] final, normed
    entering: Mapping[int, Tensor]  # number of passed layers -> [B, L, d]
    held: Tensor  # [n, 2, B, Hkv, L, D] keys and values of the n layers from the first that a pseudo state goes through

    @staticmethod
    def beside(texts: "Sequence[RealText]") -> "RealText":
        """Collate texts into one batch."""
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
        """Return the inputs of states that enter after ``layers``, a subset of the layers it was read for, without
        copying.
        """
        first = min(layers) - min(self.entering) if layers else len(self.held)
        entering = {layer: self.entering[layer] for layer in layers}
        return RealText(hidden=self.hidden, entering=entering, held=self.held[first:])

    def row(self, row: int, length: int) -> "RealText":
        """Return a copy of one of the texts, which has ``length`` tokens."""
        rows, own = slice(row, row + 1), slice(0, length)
        return RealText(
            hidden=self.hidden[rows, own].clone(),
            entering={layer: states[rows, own].clone() for layer, states in self.entering.items()},
            held=self.held[:, :, rows, :, own].clone(),
        )


class _Recorded(CausalContext):
    """Causal context that also keeps keys and values of some layers."""

    def __init__(self, first: int) -> None:
        self.first = first
        self.kept: list[Tensor] = []  # [2,B,Hkv,L,D]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend causally, and keep keys and values of the layers that pseudo states pass through."""
        if layer >= self.first:
            self.kept.append(torch.stack([key, value]))
        return super().attend(layer, query, key, value, scaling)


class _BesideText:
    """Attention context of pseudo states, one step at a time; see ``PseudoContext`` for what they see."""

    def __init__(self, real: RealText, anchors: Tensor, masked: bool) -> None:
        self.held, self.first, self.masked = real.held, min(real.entering), masked
        places = torch.arange(real.hidden.shape[1], device=anchors.device)
        unseen = (places > anchors[..., None])[:, None, None]
        self.bias = torch.zeros_like(unseen, dtype=real.held.dtype).masked_fill_(unseen, float("-inf"))  # [B,1,1,A,L]
        self.earlier: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> [B,Hkv,1,A,D] of each step

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend from n = A pseudo states. Query heads of a group are rows of one product with the text."""
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
    """Return the inputs of pseudo states that enter after ``layers`` (from 1), for each text.

    Texts of similar length share a batch.

    Raises:
        UserError: a model whose layers do not receive rotary embeddings as one pair of tensors.
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
    """Return the bytes per token that ``read_text`` stores."""
    config = policy.backbone.config
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cached = 2 * heads * size * (config.num_hidden_layers - min(layers))
    return int(cached + config.hidden_size * (1 + len({*layers}))) * policy.backbone.dtype.itemsize


def pseudo_beside(
    policy: Policy, network: PseudoStates, real: RealText, anchors: Tensor, steps: int, taps: bool = False
) -> tuple[Tensor, list[list[Tensor]]]:
    """Return final, normed pseudo states [B,A,steps,d], equal to those of ``hidden_with_pseudo`` up to rounding.

    Args:
        policy: the model; its backbone is frozen.
        network: a matrix that takes a gradient gets it through its own step and those after it.
        real: read for the layers of this network.
        anchors: [B,A] positions.
        steps: the first so many steps.
        taps: also return each step's state [B,A,d] as it enters and after each layer that it passes.
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
