"""A lean forward pass through the usual decoder layers: weights and numbers of transformers' modules, fewer calls.

A pass over a small model, or over few tokens, is mostly calls: of modules, of their keyword arguments, of operators on
little data. Here q, k and v are one product, gate and up another, rotary embeddings come from a table, and only needed
arguments are passed on. The matrices of a product lie one after the other in memory, and the modules' own parameters
are views of them. So new weights are written through, checkpoints keep their names, and nothing is held twice.

On a CUDA device three Triton kernels do the work between the products (``kernels/layer_triton.py``), with references
here. The output of a layer stays apart from the states until the norm of the next layer adds it.

The module is for decoding alone: it gives no gradients. Unlisted families, and layers with hooks, run as transformers'
modules.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from bebop.kernels.verify import compiled
from bebop.model.attention import AttentionContext, SlotContext
from bebop.model.backbone import Matrix, Policy
from bebop.model.mtp import MTPHead

# Families of transformers 5 whose forward is the one below: norm, attention, sum, norm, gated MLP, sum.
FAMILIES = ("Llama", "Qwen2", "Qwen3")
SILU = ("SiLU", "SiLUActivation")  # names of the classes
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}

Rotary = tuple[Tensor, Tensor]  # cosines and signed sines [B,1,n,D], or [N,1,D] of rows end to end
_as_modules = [False]


@contextmanager
def as_modules() -> Iterator[None]:
    """Run all code within this block with transformers' modules, for callers that hook or replace them."""
    before, _as_modules[0] = _as_modules[0], True
    try:
        yield
    finally:
        _as_modules[0] = before


def lean_hidden(policy: Policy, length: int) -> Callable[[Tensor, Tensor, AttentionContext], Tensor]:
    """Return ``Policy.hidden`` for decoding, at position ids below ``length``."""
    decoder = policy.backbone.get_decoder()
    known = type(decoder).__name__ in [f"{family}Model" for family in FAMILIES] and all(map(_known, decoder.layers))
    return LeanDecoder(policy, length) if known else policy.hidden


def lean_head(head: MTPHead, length: int) -> Callable[[Tensor, Tensor, Tensor, AttentionContext], Tensor]:
    """Return an MTP head for decoding, at position ids below ``length``, with the module's call signature."""
    return LeanHead(head, length) if _known(head.layer) else head


def _known(layer: Any) -> bool:
    if type(layer).__name__ not in [f"{family}DecoderLayer" for family in FAMILIES]:
        return False  # its parts may have other names
    own = {name: module for part in (layer.self_attn, layer.mlp) for name, module in part.named_children()}
    return (
        type(layer).__module__.startswith("transformers.models.")
        and all(type(own[name]) is nn.Linear for name in LINEAR)
        and getattr(layer.self_attn, "sliding_window", None) is None
    )


class LeanDecoder:
    """The decoder of a policy, with the call signature of ``Policy.hidden``."""

    def __init__(self, policy: Policy, length: int) -> None:
        self.policy, self.decoder = policy, policy.backbone.get_decoder()
        self.length = length
        self._read()

    def _read(self) -> None:
        self.layers = [LeanLayer(layer) for layer in self.decoder.layers]
        self.table = RotaryTable(self.decoder.rotary_emb, self.length, self.decoder.norm.weight)
        self.norm = Norm(self.decoder.norm)

    def __call__(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return final, normed hidden states [B, n, d] of token ids [B, n] at ``positions`` [B, n]."""
        if _as_modules[0]:
            return self.policy.hidden(token_ids, positions, context)
        if self.layers[0].replaced():
            self._read()
        x = embedding(token_ids, self.decoder.embed_tokens.weight)
        rotary, shape = self.table.at(positions, context), x.shape
        x = x.flatten(0, 1)  # a product of two matrices is one call, one of more dimensions several
        more: Tensor | None = None
        for layer in self.layers:
            if layer.hooked():
                wide = (x if more is None else x + more).view(shape)
                given = {"position_ids": positions, "position_embeddings": self.decoder.rotary_emb(wide, positions)}
                x, more = layer.module(wide, attention_mask=None, context=context, **given).flatten(0, 1), None
            else:
                x, more = layer(x, more, shape, rotary, context)
        return self.norm.of_sum(x, more)[1].view(shape)


class LeanHead:
    """An MTP head, with the module's call signature."""

    def __init__(self, head: MTPHead, length: int) -> None:
        self.head, self.length = head, length
        self._read()

    def _read(self) -> None:
        head = self.head
        self.layer = LeanLayer(head.layer)
        self.norms = [Norm(module) for module in (head.token_norm, head.hidden_norm, head.final_norm)]
        self.project = Matrix(head.project.weight)
        self.table = RotaryTable(head.rotary, self.length, head.project.weight)

    def __call__(self, embeddings: Tensor, hidden: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return the hidden states [B, n, d] of one step of the head."""
        head = self.head
        if _as_modules[0] or self.layer.hooked() or any(norm.hooked() for norm in self.norms):
            out: Tensor = head(embeddings, hidden, positions, context)
            return out
        if self.layer.replaced():
            self._read()
        if head.zero_first:
            embeddings = embeddings.masked_fill((positions == 0)[..., None], 0)
        token_norm, hidden_norm, final_norm = self.norms
        x = self.project(torch.cat([token_norm(embeddings), hidden_norm(hidden)], -1).flatten(0, 1))
        x, more = self.layer(x, None, hidden.shape, self.table.at(positions, context), context)
        return final_norm.of_sum(x, more)[1].view(hidden.shape)


class LeanLayer:
    """A decoder layer."""

    def __init__(self, module: Any) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.module = module
        self.layer, self.scaling, size = attention.layer_idx, attention.scaling, attention.head_dim
        self.heads = [p.weight.shape[0] // size for p in (attention.q_proj, attention.k_proj, attention.v_proj)]
        self.size, self.rotated = size, sum(self.heads[:2])
        self.qkv = Matrix(*joined([attention.q_proj, attention.k_proj, attention.v_proj]))
        self.gate_up = Matrix(*joined([mlp.gate_proj, mlp.up_proj]))
        self.out, self.down = (Matrix(p.weight, p.bias) for p in (attention.o_proj, mlp.down_proj))
        self.before, self.between = Norm(module.input_layernorm), Norm(module.post_attention_layernorm)
        own = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.own_norms = [Norm(norm) for norm in own if norm is not None]
        self.activation = mlp.act_fn.forward
        self.gated = type(mlp.act_fn).__name__ in SILU

    def replaced(self) -> bool:
        """Return whether the module's matrices are no longer the joined ones, after a move or a change of type."""
        return bool(self.module.self_attn.q_proj.weight.data_ptr() != self.qkv.weight.data_ptr())

    def hooked(self) -> bool:
        """Return whether a hook wants the module's own arguments.

        Hooks that read outputs are called from here, so that reading states between layers does not change rounding.
        """
        return bool(self.module._forward_pre_hooks or self.module._forward_hooks_with_kwargs)

    def __call__(
        self, x: Tensor, more: Tensor | None, shape: torch.Size, rotary: Rotary, context: AttentionContext
    ) -> tuple[Tensor, Tensor | None]:
        """Map states and the pending output of the layer before, both [B*n,d], to those of this layer.

        The two results may already be added; then the second one is None. ``shape`` [B,n,d] is the shape that hooks
        see.
        """
        before, normed = self.before.of_sum(x, more)
        x, more = self._states(before, normed, shape, rotary, context)
        if not (hooks := self.module._forward_hooks):
            return x, more
        out = more.add_(x)
        for hook in hooks.values():
            changed = hook(self.module, (before.view(shape),), out.view(shape))
            out = out if changed is None else changed.flatten(0, 1)
        return out, None

    def _states(
        self, x: Tensor, normed: Tensor, shape: torch.Size, rotary: Rotary, context: AttentionContext
    ) -> tuple[Tensor, Tensor]:
        qkv = self.qkv(normed).view(*shape[:2], -1, self.size)
        qkv = qkv[0] if is_end_to_end(context) else qkv.transpose(1, 2)  # [N,heads,D] or [B,heads,n,D]
        attended = self._attended(qkv, rotary, context)
        x, normed = self.between.of_sum(x, self.out(attended.reshape(x.shape[0], -1)))
        both = self.gate_up(normed)
        if self.gated and compiled(None, both):
            return x, self.down(layer_triton().gated(both))
        gate, up = both.chunk(2, -1)
        return x, self.down(self.activation(gate).mul_(up))

    def _attended(self, qkv: Tensor, rotary: Rotary, context: AttentionContext) -> Tensor:
        """Write keys and values of a product [B,heads,n,D] or [N,heads,D] and attend -> [B,n,H,D] or [N,H,D]."""
        if compiled(None, qkv) and isinstance(context, SlotContext) and (stores := context.stores(self.layer)):
            query_heads, kv_heads, _ = self.heads
            query = layer_triton().turn_and_store(qkv, *self._norms(), rotary, (query_heads, kv_heads), *stores)
            return context.attend_stored(self.layer, query, self.scaling)
        turned, value = qkv.split_with_sizes([self.rotated, self.heads[2]], 1)
        turned = self._turned(turned, rotary)
        if is_end_to_end(context):
            assert isinstance(context, SlotContext)
            return context.attend_end_to_end(self.layer, turned, value, self.scaling)
        query, key = turned.split_with_sizes(self.heads[:2], 1)
        return context.attend(self.layer, query, key, value, self.scaling)

    def _norms(self) -> tuple[list[Tensor], float]:
        """Return the weights [D] of the norms of queries and keys, none if there are none, and their epsilon."""
        norms = self.own_norms
        return [norm.weight for norm in norms], norms[0].eps if norms else 0.0

    def _turned(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Return queries and keys [B,H+Hkv,n,D] or [N,H+Hkv,D] with rotary embeddings, normed if the family does so."""
        norms, sizes = self.own_norms, self.heads[:2]
        if compiled(None, x):
            return layer_triton().turn(x, *self._norms(), rotary, sizes[0])
        if norms:
            parts = x.split_with_sizes(sizes, 1)
            x = torch.cat([norm(part) for norm, part in zip(norms, parts, strict=True)], 1)
        return rotate(x, rotary)


class Norm:
    """A root mean square norm, in fp32 for any type, as in transformers."""

    def __init__(self, module: Any) -> None:
        self.module, self.weight, self.eps = module, module.weight, module.variance_epsilon
        self.shape = module.weight.shape

    def hooked(self) -> bool:
        """Return whether the module has hooks."""
        return bool(self.module._forward_hooks or self.module._forward_pre_hooks)

    def of_sum(self, x: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the sum of states [..., d] and the pending output ``more``, if there is one, and the norm of the sum.

        The sum may overwrite ``more``.
        """
        if more is None:
            return x, self(x)
        if compiled(None, x):
            return layer_triton().add_norm(x, more, self.weight, self.eps)
        x = more.add_(x)
        return x, self(x)

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise states [..., d] -> [..., d]."""
        if compiled(None, x):
            return layer_triton().norm(x, self.weight, self.eps)
        if x.dtype == torch.float32:
            return torch.rms_norm(x, self.shape, self.weight, self.eps)
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class RotaryTable:
    """Cosines and signed sines of a module of rotary embeddings, at all positions."""

    def __init__(self, module: Any, length: int, like: Tensor) -> None:
        """Compute the table for ``length`` positions, with the type and device of ``like``."""
        with _plain_tensors():
            cos, sin = (x[0] for x in module(like, torch.arange(length, device=like.device)[None]))
            half = sin.shape[-1] // 2
            # rotate_half negates the first half of its result; here the sines carry the sign instead.
            self.both = torch.stack([cos, torch.cat([-sin[:, :half], sin[:, half:]], -1)], 1)  # [length,2,D]

    def at(self, positions: Tensor, context: AttentionContext) -> Rotary:
        """Return cosines and sines of position ids [B,n]; [N,1,D] where a pass of ``context`` has rows end to end."""
        if is_end_to_end(context):
            positions = positions[0]
        cos, sin = self.both[positions].unbind(-2)
        return cos[:, None], sin[:, None]


def is_end_to_end(context: AttentionContext) -> bool:
    """Return whether a pass has its rows end to end, and not side by side."""
    return isinstance(context, SlotContext) and context.ragged is not None


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """Apply rotary embeddings to x [B,H,n,D] or [N,H,D]."""
    cos, sin = rotary
    return (x * cos).add_(x.roll(x.shape[-1] // 2, -1).mul_(sin))


def joined(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor | None]:
    """Return the joint weights [N,K] and biases [N] of linear layers with one input.

    The layers' own weights and biases become views of them.
    """
    biases = [layer.bias for layer in layers if layer.bias is not None]
    assert len(biases) in (0, len(layers)), "all have a bias, or none"
    return _join([layer.weight for layer in layers]), _join(biases) if biases else None


def _join(parts: Sequence[Tensor]) -> Tensor:
    first, whole = parts[0].data, (sum(map(len, parts)), *parts[0].shape[1:])
    size, sizes = first.element_size(), [part.numel() for part in parts]
    places = [first.data_ptr() + size * sum(sizes[:i]) for i in range(len(parts))]
    storages = {part.untyped_storage().data_ptr() for part in parts}
    if len(storages) == 1 and [part.data_ptr() for part in parts] == places:  # another engine has joined them
        return first.as_strided(whole, first.stride())
    with _plain_tensors():
        together = torch.cat([part.data for part in parts])
        for part, own in zip(parts, together.split([len(part) for part in parts]), strict=True):
            part.data = own
    return together


def layer_triton() -> ModuleType:
    """Return the kernels of a CUDA device, for states that are ``compiled``; other machines may lack Triton."""
    return import_module("bebop.kernels.layer_triton")


@contextmanager
def _plain_tensors() -> Iterator[None]:
    """Make tensors within this block trainable, even inside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield
