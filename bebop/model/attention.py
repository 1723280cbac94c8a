"""One attention implementation for every Hugging Face backbone; a *context* decides where keys and values live.

transformers looks attention functions up by name and hands keyword arguments down to them. So any dense causal LM of
its library runs on the engine's slot cache, on packed training rows and on the MTP training chain without a line of
model code here: load it with ``attn_implementation="bebop"`` and call it with ``context=...``.

The contexts compute plain causal attention over the whole text and nothing else. A model that needs more would run and
give wrong numbers: it can ignore the keyword arguments for caps and windows, and transformers makes no masks for
unknown attention functions. So ``refuse_config`` and ``refuse_call`` accept only settings that are known to be right.
``bebop.model.parity`` then compares the model with Hugging Face's own forward. The lists here refuse settings whose
effect a short text does not show.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from inspect import signature
from typing import TYPE_CHECKING, Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedConfig

from bebop.errors import UserError
from bebop.kernels.tree_verify import visible
from bebop.model.ragged_attention import Ragged, RaggedAttention
from bebop.model.routing import Routing

# Most scores that the later steps of a chain hold at once, over all heads: 64 MB in fp32 on a CPU, 1 GB on a GPU.
SCORES = {"cuda": 1 << 28, "cpu": 1 << 24}
# Keyword arguments of transformers' attention functions that change nothing, with any value ...
IGNORED = ("position_ids", "cache_position", "use_cache")
# ... and the neutral values of others; None is neutral for all of them.
NEUTRAL = {"dropout": 0.0, "is_causal": True, "output_attentions": False}
# Fixed frequencies. Excluded are dynamic and longrope, whose frequencies depend on the longest text of a pass: a packed
# row would change with its neighbours, and cached keys would become wrong.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
LAYER_TYPES = ("full_attention",)
# Settings whose names match limit or change the reach of attention, often far beyond a short text ...
REACH = re.compile(
    r"window|chunk|sink(?!horn)|alibi|softcap|cross_att|bidirectional|index(er)?_|kv_lora|kv_shared|is_encoder|local_att"
)
# ... except for these, which describe a window that no layer need have: layer_types and the calls decide.
NO_REACH = ("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern", "chunk_size_feed_forward")


STOCK_ADVICE = "bebop.adapt trains its MTP head, and rollout=sglang or rollout=vllm serve it"


def refuse_call(module: nn.Module, mask: Tensor | None, settings: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if a call of the attention function asks for anything but causal attention."""
    if mask is not None:
        settings = {**settings, "attention_mask": mask}
    if not getattr(module, "is_causal", True):
        settings = {**settings, "is_causal": False}
    for name, value in settings.items():
        neutral = value is None or name in IGNORED or (name in NEUTRAL and value == NEUTRAL[name])
        if not neutral:
            shown = " (a tensor)" if isinstance(value, Tensor) else f"={value}"
            raise UserError(f"the model's attention asks for {name}{shown}, which bebop's does not have")


def refuse_config(config: PreTrainedConfig, path: str, any_backbone: bool = False) -> None:
    """Raise ``UserError`` if a model's settings need features that bebop's attention lacks; read no weights.

    ``any_backbone``: transformers' own attention may run the backbone. Its positions must still be supported, since the
    MTP head uses them too.
    """
    text = config.get_text_config()
    if (refused := _rope_type(text)) is not None:
        raise UserError(f"model.path={path!r}, a {config.model_type} model: {refused}")
    if not any_backbone and (refused := needs_stock(config)) is not None:
        raise UserError(f"model.path={path!r}, a {config.model_type} model: {refused}; {STOCK_ADVICE}")


def needs_stock(config: PreTrainedConfig) -> str | None:
    """Return why a backbone needs transformers' own attention; None if bebop's suffices."""
    text = config.get_text_config()
    return _layer_type(text) or _reach(text)


def _layer_type(config: PreTrainedConfig) -> str | None:
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - {*LAYER_TYPES})
    return f"layer_types {', '.join(strange)} is not possible: {', '.join(LAYER_TYPES)} is" if strange else None


def _rope_type(config: PreTrainedConfig) -> str | None:
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    per_layer = [value for value in given.values() if isinstance(value, Mapping)]
    for rope in per_layer or [given]:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ROPE_TYPES:
            return f"rope_type={kind!r} is not possible: {', '.join(ROPE_TYPES)} are"
    return None


def _reach(config: PreTrainedConfig) -> str | None:
    settings = {name: value for name, value in config.to_dict().items() if REACH.search(name) and name not in NO_REACH}
    if settings.get("use_sliding_window") is False or getattr(config, "layer_types", None):
        settings.pop("sliding_window", None)  # unused, or excluded by the check of layer_types
    named = next((f"{name}={value!r}" for name, value in settings.items() if value), None)
    return f"{named} is not possible: bebop's attention sees the whole text, each layer its own keys" if named else None


ATTENTION: str  # name of ``attention`` in transformers' registry; see ``__getattr__``


class AttentionContext(Protocol):
    """Storage of keys and values, and the rule which entries a token sees."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute the attention of one layer: query [B,H,n,D], key and value [B,Hkv,n,D] -> [B,n,H,D]."""
        ...


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context: AttentionContext,
    scaling: float,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Compute attention in a context, with transformers' signature; refuse calls that a context would get wrong."""
    refuse_call(module, attention_mask, settings)
    return context.attend(module.layer_idx, query, key, value, scaling), None  # type: ignore[arg-type]


if not TYPE_CHECKING:  # otherwise mypy would accept any name in this module

    def __getattr__(name: str) -> str:
        """Register ``attention`` with transformers on the first access to ``ATTENTION``, and return the name.

        Not at import: transformers' modeling code takes 4.2 s of processor time, and a job's driver never runs a model.
        """
        if name != "ATTENTION":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("bebop", attention)
        globals()[name] = "bebop"
        return "bebop"


class PackedContext:
    """Rows laid end to end in one row without padding; each attends causally to itself alone.

    The linear layers then waste nothing on padding. Attention pads to the longest row, except on a GPU in 16 bits,
    where PyTorch has flash attention over rows of unequal lengths.
    """

    def __init__(self, lengths: Tensor) -> None:
        """Store ``lengths`` [R], the tokens of each row, which sum to N."""
        self.lengths, self.longest = lengths, int(lengths.max())
        self.routing: Routing | None = None  # routing of the mixtures of experts in a pass

    @cached_property
    def rows(self) -> Ragged:
        """Return the place of each token among padded rows."""
        return Ragged.of(self.lengths, self.longest)

    @cached_property
    def bounds(self) -> Tensor:
        """Return the starts of rows and the end of the last one [R + 1], in the format of flash attention."""
        return pad(self.lengths.cumsum(0), (1, 0)).to(torch.int32)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Let each row of [1, H, N, D] attend to itself -> [1, N, H, D]."""
        kind = query.device.type
        # Autocast casts the inputs of PyTorch's own attention, but not those of flash attention here.
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        if kind == "cuda" and _has_flash(query, dtype):
            q, k, v = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))  # [N, H, D]
            return self._unpadded(q, k, v, scaling)[None]
        q, k, v = (self.rows.padded(x.transpose(1, 2)).transpose(1, 2) for x in (query, key, value))  # [R, H, L, D]
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        return self.rows.packed(out.transpose(1, 2))  # [1, N, H, D]

    def _unpadded(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend without padding: [N, H, D] and twice [N, Hkv, D] -> [N, H, D]."""
        varlen = flash_varlen()
        assert varlen is not None
        # The window is how far back (no limit) and forward (not at all) a token sees. From PyTorch 2.13 on, shared
        # keys and values need a flag; 2.11 and 2.12 detect them by the shapes.
        shared: dict[str, Any] = {}
        if query.shape[1] != key.shape[1] and "enable_gqa" in signature(varlen).parameters:
            shared["enable_gqa"] = True
        ends, longest = self.bounds, self.longest
        out = varlen(query, key, value, ends, ends, longest, longest, scale=scaling, window_size=(-1, 0), **shared)
        assert isinstance(out, Tensor)  # a pair, with log-sum-exps, only where they are asked for
        return out


def _has_flash(query: Tensor, dtype: torch.dtype) -> bool:
    """Return whether flash attention takes queries [..., D] of a GPU: in 16 bits, from Ampere on, heads of 256 or less.

    PyTorch's own attention takes the others.
    """
    size = query.shape[-1]
    right = dtype in (torch.bfloat16, torch.float16) and size <= 256 and size % 8 == 0
    return right and torch.cuda.get_device_capability(query.device) >= (8, 0) and flash_varlen() is not None


@cache
def flash_varlen() -> Callable[..., Any] | None:
    """Return PyTorch's flash attention over rows end to end; None for a build without it.

    It is imported on first use: the import loads the compiler, which takes seconds.
    """
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn


class CausalContext:
    """Right-padded rows side by side: plain causal attention, no cache. Padding comes last, so causality hides it."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend to all earlier entries and the own one, [B, H, n, D] -> [B, n, H, D]."""
        gqa = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2)


class ChainContext:
    """Recursive MTP steps in training, with exactly the visibility of drafting (SPEC 0.5, chain mask).

    A step-i query at anchor t sees the step-1 entries of anchors <= t, and its own chain's entries of steps 2..i.
    Each pass is the next step; rows are right-padded, so causality alone hides the padding.
    """

    def __init__(self, anchors: Tensor | None = None) -> None:
        """Begin before step 1.

        ``anchors`` [B,A]: the positions whose chains continue after step 1; None: all, from 0 on.
        """
        self.anchors = anchors
        self.keys: list[Tensor] = []  # [B,Hkv,T,D] of step 1, [B,Hkv,A,D] of each later one
        self.values: list[Tensor] = []

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend as the next step; later steps may hold fewer anchors than earlier ones (the first of them)."""
        self.keys.append(key)
        self.values.append(value)
        if len(self.keys) == 1:  # step 1 is plain causal attention, for which there are fused kernels
            return CausalContext().attend(layer, query, key, value, scaling)
        batch, heads, width, _ = query.shape
        anchors = torch.arange(width, device=query.device)[None] if self.anchors is None else self.anchors[:, :width]
        most = SCORES.get(query.device.type, SCORES["cpu"]) // max(1, batch * heads * self.keys[0].shape[2])
        if width <= most:
            return self._scored(query, anchors, 0, scaling)
        # Chunks of anchors, whose scores the backward pass computes again: memory never holds those of all anchors.
        parts = [
            checkpoint(
                self._scored, q, at, first, scaling, len(self.keys), use_reentrant=False, preserve_rng_state=False
            )
            for first, q, at in zip(
                range(0, width, max(1, most)), query.split(max(1, most), 2), anchors.split(max(1, most), 1), strict=True
            )
        ]
        return torch.cat(parts, 1)

    def _scored(self, query: Tensor, anchors: Tensor, first: int, scaling: float, steps: int | None = None) -> Tensor:
        """Attend with the chains from number ``first`` on: [B,H,A,D] -> [B,A,H,Dv].

        ``anchors`` is [B,A] or [1,A]. ``steps``: number of steps so far; a backward pass may run when there are more.
        """
        batch, heads, width, size = query.shape
        kv_heads, length = self.keys[0].shape[1:3]
        rows = slice(first, first + width)
        q = query.reshape(batch, kv_heads, heads // kv_heads, width, size) * scaling
        unseen = torch.arange(length, device=q.device) > anchors[..., None]  # [B,A,T]
        scores = (q @ self.keys[0][:, :, None].transpose(-1, -2)).masked_fill(unseen[:, None, None], float("-inf"))
        own = [(q * k[:, :, None, rows]).sum(-1, keepdim=True) for k in self.keys[1:steps]]
        weights = torch.cat([scores, *own], -1).softmax(-1)
        out = weights[..., :length] @ self.values[0][:, :, None]
        for i, v in enumerate(self.values[1:steps]):
            out = out + weights[..., length + i : length + i + 1] * v[:, :, None, rows]
        return out.reshape(batch, heads, width, -1).transpose(1, 2)  # values of latent attention have their own size


class BlockContext:
    """Blocks of a drafter in training, as they are while drafting: rows side by side, many blocks a row (SPEC 5.1).

    A slot sees the row's text strictly before its anchor and all slots of its own block; blocks do not see each other.
    """

    def __init__(self, anchors: Tensor, block: int, length: int) -> None:
        """Compute which entries each slot sees.

        Args:
            anchors: [B,A] positions.
            block: number of slots of each block.
            length: length of the text, which ``write`` stores first.
        """
        owner = torch.arange(anchors.shape[1] * block, device=anchors.device) // block
        text = torch.arange(length, device=anchors.device) < anchors[:, owner, None]  # [B,A*b,L]
        own = (owner[:, None] == owner).expand(len(anchors), -1, -1)  # [B,A*b,A*b]
        self.seen = torch.cat([text, own], -1)[:, None]
        self.text: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values [B,Hkv,L,D] of the text."""
        self.text[layer] = (key, value)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Attend with n = A * b slots, one block after the other."""
        keys, values = (torch.cat(pair, 2) for pair in zip(self.text[layer], (key, value), strict=True))
        gqa = query.shape[1] != key.shape[1]
        out = scaled_dot_product_attention(query, keys, values, self.seen, scale=scaling, enable_gqa=gqa)
        return out.transpose(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The entries that a pass over contexts writes in slots ``first``, ``first`` + 1, ..., padded to the right."""

    first: int
    entries: Tensor  # [n, W]
    positions: Tensor  # [n, W] position ids
    used: int  # number of entries that are read

    @classmethod
    def of(
        cls, first: int, starts: Sequence[int], lengths: Sequence[int], width: int, room: int, device: torch.device
    ) -> Self:
        """Return the span of ``lengths`` tokens each, padded to ``width``, behind the ``starts`` existing entries.

        ``room``: entries of a slot; no context uses the last one. Padding that would lie beyond the slot goes there.
        Other padding lies behind its own row, where it is never seen before it is overwritten.
        """
        steps = torch.arange(width, device=device).expand(len(starts), width)
        if not any(starts):
            return cls(first=first, entries=steps, positions=steps, used=width)
        begins, counts = torch.tensor([[*starts], [*lengths]], device=device)[..., None]
        entries = (begins + steps).clamp_max(room - 1)
        positions = torch.minimum(entries, begins + counts - 1)
        used = max(start + length for start, length in zip(starts, lengths, strict=True))
        return cls(first=first, entries=entries, positions=positions, used=used)


def _flat(store: Tensor) -> Tensor:
    """Return keys or values [B,Hkv,C,D] as a view [B*Hkv*C,D], with a row for each entry of a head."""
    return store.view(-1, store.shape[-1])


Tree = tuple[Tensor, Tensor]  # first [B]; ways [B,n,m]: which of entries first + 0..m-1 each sees, besides all before


def seen_by(entries: Tensor, used: int, tree: Tree | None) -> Tensor:
    """Return which of the first ``used`` entries each of ``entries`` [B,n] sees, [B,n,P] (bool).

    The arguments are those of ``SlotContext.place``.
    """
    if tree is None:
        return torch.arange(used, device=entries.device) <= entries[..., None]
    return visible(*tree, used)


def cache_shape(config: PreTrainedConfig, layers: int = 0) -> tuple[int, int, int]:
    """Return layers, heads of keys and values, and their size, of a model with these settings; ``layers`` 0: all."""
    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return layers or config.num_hidden_layers, kv_heads, head_dim


# Where the new entries of a layer go: keys and values [P,Hkv,E,D], in pages of E entries or in slots; a page table
# [B,T], which names the page of entries 0..E-1, E..2E-1, ... of each row; the new entries [B,n]. Where rows lie end to
# end, each token has a row of the table: [N,T] and [N].
Stores = tuple[tuple[Tensor, Tensor], Tensor, Tensor]


class SlotContext:
    """The engine's cache: one slot a request, each with its own length, all preallocated.

    Rows 0..B-1 are the active slots, so that the used part of the cache is a view and nothing is copied. ``place`` sets
    where new entries are written. In a chain, a query at entry t sees entries 0..t of its own slot. Entries beyond it
    (rejected drafts) are never seen and are overwritten by the next pass.
    """

    def __init__(self, layers: int, slots: int, length: int, kv_heads: int, head_dim: int, like: Tensor) -> None:
        shape = (layers, slots, kv_heads, length, head_dim)
        self.keys = torch.zeros(shape, dtype=like.dtype, device=like.device)
        self.values = torch.zeros_like(self.keys)
        self._shown = torch.zeros((), dtype=like.dtype, device=like.device)  # added to the score of a visible entry
        self._hidden = self._shown - float("inf")  # added to the score of an invisible entry
        self.first_layer = 0  # index of the module's layer that is stored in row 0
        self.first_slot = 0
        self._written: Tensor | None = None  # [B*Hkv*n] rows of [S*Hkv*C,D] that the pass writes, computed on demand
        self.entries: Tensor  # [B,n] entries that the next pass writes
        numbers = torch.arange(slots * kv_heads, device=like.device)
        self._begins = length * numbers.view(slots, kv_heads)  # [S,Hkv] rows of [S*Hkv*C,D]
        self._numbers = torch.arange(slots, device=like.device)[:, None]  # [S,1] of the slots, for ``stores``
        self.bias: Tensor
        self.ragged: Ragged | None = None
        self.routing: Routing | None = None  # routing of the mixtures of experts in a pass
        self._end_to_end: Callable[[int], RaggedAttention]  # plan for a number of query heads
        # Views shared by the layers of a pass and by passes of one size; with few tokens, making them dominates.
        self._views: tuple[tuple[int, int, int], list[tuple[Tensor, Tensor, Tensor, Tensor]]] = ((0, 0, 0), [])
        self._rows: tuple[Tensor | None, int, Tensor] = (None, 0, self.keys)

    @classmethod
    def for_model(cls, config: PreTrainedConfig, slots: int, length: int, like: Tensor, layers: int = 0) -> Self:
        """Return a cache for a model with these settings, with the type and device of ``like``; ``layers`` 0: all."""
        count, kv_heads, head_dim = cache_shape(config, layers)
        return cls(count, slots, length, kv_heads, head_dim, like)

    def place(self, entries: Tensor, used: int, tree: Tree | None = None, ragged: Ragged | None = None) -> None:
        """Set the entries [B,n] that the next pass writes; ``used`` (P) is the number of entries that it reads.

        The model gets position ids separately: siblings in a tree have one position and an entry each.

        Args:
            entries: [B,n].
            used: P.
            tree: the entries that each one sees; None: a chain, all entries up to its own.
            ragged: rows end to end, [1,N] of these; entries that padding writes are overwritten before they are seen.
        """
        self.ragged, self.entries = ragged, entries
        if ragged is not None:
            assert tree is None, "rows of chains alone are laid end to end"
            keys, values = self.keys[:, self.first_slot :], self.values[:, self.first_slot :]
            self._end_to_end = cache(partial(RaggedAttention.of, keys, values, entries, used, ragged))
            return
        self._written = None
        # [B,1,1,n,P], one row per group
        self.bias = torch.where(seen_by(entries, used, tree), self._shown, self._hidden)[:, None, None]

    def seen(self) -> Tensor:
        """Return which entries each row of the pass sees [B,n,P] (bool)."""
        return self.bias[:, 0, 0] == 0

    def attend_end_to_end(self, layer: int, turned: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Compute ``attend`` for rows end to end: queries and keys [N,H+Hkv,D] in one, values [N,Hkv,D] -> [N,H,D]."""
        return self._end_to_end(turned.shape[1] - value.shape[1])(layer - self.first_layer, turned, value, scaling)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
        """Write the new entries of a layer and attend as ``place`` has set, [B, H, n, D] -> [B, n, H, D]."""
        if self.ragged is not None:
            turned = torch.cat([query, key], 1)[0].transpose(0, 1)
            return self.attend_end_to_end(layer, turned, value[0].transpose(0, 1), scaling)[None]
        if torch.is_grad_enabled():
            self.write(layer, key, value)
        else:
            self._write(self._views_of(len(query))[layer - self.first_layer][:2], key, value)
        return self.attend_stored(layer, query, scaling)

    def stores(self, layer: int) -> Stores | None:
        """Return where a kernel writes the new entries of a layer; None: ``attend`` writes them.

        A caller that writes them calls ``attend_stored`` afterwards.
        """
        if self.ragged is not None:
            return None
        index, rows = layer - self.first_layer, slice(self.first_slot, self.first_slot + len(self.entries))
        return (self.keys[index], self.values[index]), self._numbers[rows], self.entries

    def attend_stored(self, layer: int, query: Tensor, scaling: float) -> Tensor:
        """Attend as ``attend`` does once the new entries of the layer are written, [B, H, n, D] -> [B, n, H, D]."""
        batch, heads, width, size = query.shape
        keys, values = self._views_of(batch)[layer - self.first_layer][2:]
        group = heads // keys.shape[1]
        # The query heads of a group become rows of one query: keys and values are read once, without a copy.
        q = query.reshape(batch, -1, group * width, size)
        out = scaled_dot_product_attention(q, keys, values, self._bias_of(group), scale=scaling)
        # One copy moves the heads innermost, for any layout of the fused kernels' output.
        return out.unflatten(2, (group, width)).permute(0, 3, 1, 2, 4).reshape(batch, width, heads, size)

    def _views_of(self, batch: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Return the keys and values of each layer, once for writing and once for reading.

        Those for writing, without gradients, are [B*Hkv*C,D]; those for reading are [B,Hkv,P,D].
        """
        size = (self.first_slot, batch, self.bias.shape[-1])
        if self._views[0] != size:
            rows, used = slice(size[0], size[0] + batch), slice(size[2])
            both = [(self.keys[i, rows], self.values[i, rows]) for i in range(len(self.keys))]
            self._views = (size, [(_flat(k), _flat(v), k[:, :, used], v[:, :, used]) for k, v in both])
        return self._views[1]

    def _bias_of(self, group: int) -> Tensor:
        """Return the bias [B,1,group*n,P] where ``group`` query heads are rows of one."""
        if self._rows[0] is not self.bias or self._rows[1] != group:
            self._rows = (self.bias, group, self.bias.expand(-1, 1, group, -1, -1).flatten(2, 3))
        return self._rows[2]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store keys and values [B,Hkv,n,D] where ``place`` has set."""
        self._write([_flat(store) for store in self.held(layer, len(key))], key, value)

    def _places(self, entries: Tensor) -> Tensor:
        """Return which rows of [B*Hkv*C,D] hold ``entries`` [B,n] of the rows of a pass: [B*Hkv*n]."""
        return (self._begins[: len(entries), :, None] + entries[:, None]).flatten()

    def _write(self, stores: Sequence[Tensor], key: Tensor, value: Tensor) -> None:
        if self._written is None:
            self._written = self._places(self.entries)
        # Row by row: on a CPU, scatter_ takes a hundred times as long in bfloat16.
        for store, new in zip(stores, (key, value), strict=True):
            store.index_copy_(0, self._written, new.reshape(-1, new.shape[-1]))

    def held(self, layer: int, batch: int) -> tuple[Tensor, Tensor]:
        """Return keys and values [B,Hkv,C,D] that the rows of a pass hold in a layer, as views."""
        rows = slice(self.first_slot, self.first_slot + batch)
        return self.keys[layer - self.first_layer, rows], self.values[layer - self.first_layer, rows]

    def compact(self, first: Tensor, kept: Tensor) -> None:
        """Move entries ``first`` [B] + ``kept`` [B,n] of rows 0..B-1 to ``first`` + 0, 1, ..., in all layers."""
        steps = torch.arange(kept.shape[1], device=first.device)
        sources, places = (self._places(first[:, None] + numbers) for numbers in (kept, steps))
        for store in (self.keys, self.values):
            flat = store.flatten(1, 3)
            flat[:, places] = flat[:, sources]

    @contextmanager
    def at(self, slot: int) -> Iterator[None]:
        """Map row 0 of a pass to slot ``slot`` within this block."""
        self.first_slot = slot
        try:
            yield
        finally:
            self.first_slot = 0

    @contextmanager
    def at_span(self, span: Span) -> Iterator[None]:
        """Let a pass within this block write the entries of a span and see those before them."""
        with self.at(span.first):
            self.place(span.entries, span.used)
            yield

    def copy_slot(self, source: int, first: int, end: int, length: int) -> None:
        """Copy the first ``length`` entries of one slot to slots first..end-1 (which may include it)."""
        for store in (self.keys, self.values):
            store[:, first:end, :, :length] = store[:, source : source + 1, :, :length].clone()

    def snapshot(self, slot: int, length: int) -> tuple[Tensor, ...]:
        """Return a copy of the first ``length`` entries of a slot: keys and values [layers, Hkv, length, D]."""
        return self.keys[:, slot, :, :length].clone(), self.values[:, slot, :, :length].clone()

    def restore(self, slot: int, held: tuple[Tensor, ...], length: int) -> None:
        """Write the first ``length`` entries of a ``snapshot`` into a slot."""
        for store, own in zip((self.keys, self.values), held, strict=True):
            store[:, slot, :, :length] = own[:, :, :length]
