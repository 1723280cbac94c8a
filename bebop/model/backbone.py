"""A policy: a Hugging Face causal LM as backbone, its tokenizer and (if there is one) its MTP head."""

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers import GenerationConfig, PreTrainedTokenizerBase

from bebop.errors import UserError
from bebop.kernels import few_rows
from bebop.model.attention import AttentionContext, CausalContext, PackedContext
from bebop.model.fingerprint import fingerprint
from bebop.model.mtp import MTPHead

if TYPE_CHECKING:  # transformers' modeling code, 4.2 s of processor time to import
    from transformers import PreTrainedModel

ONEDNN = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None
LARGE = 2**20  # multiplications from which oneDNN is faster, for any shape ...
ROOM = 2  # free memory on a GPU, in sizes of the new weights, from which they are staged there before loading
LARGE_MATRIX = 2**19  # ... and weights, even if each is used once: reading them then takes the time


def stop_token_ids(generation: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return every token that ends a completion, in order."""
    ids = generation.eos_token_id if generation is not None else None
    listed = [ids] if isinstance(ids, int) else list(ids or ())
    own = tokenizer.eos_token_id
    return tuple(sorted({*listed, *([own] if isinstance(own, int) else [])}))


@dataclass(slots=True, kw_only=True)
class Policy:
    """The loaded content of a checkpoint. ``mtp`` is None where the checkpoint has no MTP weights."""

    backbone: "PreTrainedModel"
    tokenizer: PreTrainedTokenizerBase
    mtp: MTPHead | None
    layout: str  # the checkpoint layout of the MTP weights; see bebop.model.layouts
    parts: dict[str, nn.Module] = field(default_factory=dict)  # trained ones, see bebop.model.parts
    stored: Mapping[str, torch.dtype] = field(default_factory=dict)  # types in a checkpoint of it, by names on disk
    draft: "Policy | None" = None  # a smaller model that drafts for it, frozen; see ``checkpoint.load_draft``
    drafting: str = ""  # the part that replaces the MTP head, see ``head``; empty: none
    stock: bool = False  # the backbone runs on transformers' own attention, without bebop's caches

    def hidden(self, token_ids: Tensor, positions: Tensor, context: AttentionContext) -> Tensor:
        """Return final, normed hidden states [B,n,d] of token ids [B,n] at ``positions`` [B,n]."""
        decoder = self.backbone.get_decoder()
        if self.stock:
            return self._stock_hidden(token_ids, context)
        out = decoder(input_ids=token_ids, position_ids=positions, use_cache=False, context=context)
        return out.last_hidden_state

    def _stock_hidden(self, token_ids: Tensor, context: AttentionContext) -> Tensor:
        """Return hidden states by transformers' own forward: of right-padded rows, or of rows laid end to end.

        Nothing masks the padding. It comes last, so attention, windows, convolutions and recurrent states of real
        tokens do not see it. Rows end to end are laid side by side for the pass.
        """
        decoder = self.backbone.get_decoder()
        if isinstance(context, PackedContext):
            rows = context.rows
            return rows.packed(self._stock_hidden(rows.padded(token_ids), CausalContext()))
        assert isinstance(context, CausalContext), "a backbone on transformers' attention has no cache of bebop's"
        places = torch.arange(token_ids.shape[1], device=token_ids.device).expand_as(token_ids)
        # Autocast would choose experts in bfloat16, which servers do not. Weights in float32 are a trainer's master
        # weights, which need it.
        kind = token_ids.device.type
        wanted = torch.is_autocast_enabled(kind) and self.backbone.dtype == torch.float32
        with torch.autocast(kind, torch.bfloat16, enabled=wanted, cache_enabled=False):
            return decoder(input_ids=token_ids, position_ids=places, use_cache=False).last_hidden_state

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the language-model head: [..., d] -> [..., V]."""
        head = self.backbone.get_output_embeddings()
        if torch.is_grad_enabled() or type(head) is not nn.Linear or head._forward_pre_hooks:
            out: Tensor = head(hidden)
            return out
        return product(hidden, head.weight, head.bias)

    def embed(self, token_ids: Tensor) -> Tensor:
        """Return token embeddings: [...] -> [..., d]."""
        return self.backbone.get_input_embeddings()(token_ids)

    @property
    def device(self) -> torch.device:
        """Return the device of the weights."""
        return self.backbone.get_input_embeddings().weight.device

    @property
    def vocab_size(self) -> int:
        """Return the number of rows of the language-model head."""
        return int(self.backbone.config.vocab_size)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return every token that ends a completion, by the tokenizer and the generation settings."""
        return stop_token_ids(self.backbone.generation_config, self.tokenizer)

    def modules(self) -> list[nn.Module]:
        """Return the modules that hold weights: the backbone, then the head if there is one."""
        return [self.backbone] if self.mtp is None else [self.backbone, self.mtp]

    @property
    def head(self) -> nn.Module | None:
        """Return the module that drafts, is co-trained and sent to engines: the MTP head, or the part in its place."""
        return self.parts[self.drafting] if self.drafting else self.mtp

    def weights(self, mtp: bool = False) -> dict[str, Tensor]:
        """Return named weights to send to an engine: ``backbone.*`` and, with ``mtp``, ``mtp.*``; shared ones once.

        ``mtp.*`` are the weights of ``head``, which may be a part.
        """
        named = {f"backbone.{name}": p for name, p in self.backbone.named_parameters()}
        if mtp and self.head is not None:
            named |= {f"mtp.{name}": p for name, p in self.head.named_parameters()}
        return named

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Copy weights, named as in ``weights``, into the modules; raise ``UserError`` for an unknown name."""
        own = self.weights(mtp=True)
        unknown = [name for name in weights if name not in own]
        if unknown:
            raise UserError(f"weights do not fit the model: {unknown[0]} and {len(unknown) - 1} more are not known")
        for name, tensor in weights.items():
            own[name].data.copy_(tensor, non_blocking=True)
        if self.device.type == "cuda":  # the owner of the weights may write to them afterwards
            torch.cuda.current_stream(self.device).synchronize()

    def head_fingerprint(self) -> str:
        """Return the fingerprint of ``head``; empty where there is none."""
        return "" if self.head is None else fingerprint(dict(self.head.named_parameters()))


def staged(weights: Mapping[str, Tensor], stream: "torch.cuda.Stream | None") -> Mapping[str, Tensor]:
    """Return weights on the GPU of ``stream``, copied beside the work in progress there.

    The weights are returned unchanged without a GPU (a CPU reads them in place), or if the GPU's memory has no room for
    twice their size.
    """
    if stream is None:
        return weights
    size, device = sum(tensor.numel() * tensor.element_size() for tensor in weights.values()), stream.device
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # the last weights' among it
    if torch.cuda.mem_get_info(device)[0] + idle < ROOM * size:
        return weights
    try:
        with torch.cuda.stream(stream):
            there = {name: tensor.to(device, non_blocking=True) for name, tensor in weights.items()}
    except torch.OutOfMemoryError:
        there = dict(weights)
    stream.synchronize()
    return there


def head_weights(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the head's weights among those of ``Policy.weights``, under the head's own names."""
    return {name.removeprefix("mtp."): tensor for name, tensor in weights.items() if name.startswith("mtp.")}


def mixed_precision(policy: Policy) -> torch.autocast:
    """Return the context for training a network in fp32 beside a policy: bfloat16 products beside a bfloat16 one."""
    return torch.autocast(
        policy.device.type, torch.bfloat16, enabled=policy.backbone.dtype == torch.bfloat16, cache_enabled=False
    )


def shared_tables(policy: Policy) -> tuple[Tensor, Tensor]:
    """Return the embedding and the language-model head of the target, both [V, d]."""
    backbone = policy.backbone
    embedding, head = backbone.get_input_embeddings().weight, backbone.get_output_embeddings().weight
    return embedding.detach(), head.detach()


@contextmanager
def tapped(modules: Any, layers: Collection[int]) -> Iterator[dict[int, Tensor]]:
    """Yield the outputs of these decoder layers, which the block fills; negative numbers count from the last layer."""
    states: dict[int, Tensor] = {}

    def keep(layer: int) -> Any:
        return lambda _module, _inputs, out: states.update({layer: out[0] if isinstance(out, tuple) else out})

    hooks = [modules[layer].register_forward_hook(keep(layer)) for layer in layers]
    try:
        yield states
    finally:
        for hook in hooks:
            hook.remove()


# ---- products with weight matrices while decoding: two libraries and a kernel, the fastest by the size of the product
#
# torch multiplies fp32 matrices on a CPU with MKL. oneDNN, which comes with torch as well, takes longer to call. For
# large products it takes half the time on processors for which MKL has no special kernels. Few rows and a large
# matrix go to ``kernels/few_rows.py``. The choice follows from sizes and not from a measurement at start-up, so that a
# job that resumes on another machine of the same kind rounds as before.


def onednn_rows(weight: Tensor) -> float:
    """Return the number of rows from which oneDNN is faster for ``weight`` [N, K]; infinite if it is unavailable."""
    if ONEDNN is None or weight.dtype != torch.float32 or weight.device.type != "cpu":
        return math.inf
    return 0 if weight.numel() >= LARGE_MATRIX else math.ceil(LARGE / weight.numel())


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``linear`` without gradients: [..., K], [N, K], [N] -> [..., N]."""
    if 0 < x.numel() <= few_rows.MAX_ROWS * weight.shape[1] and few_rows.suits(weight):
        return few_rows.few_rows(x.reshape(-1, weight.shape[1]), weight, bias).view(*x.shape[:-1], -1)
    return by_library(x, weight, bias)


def by_library(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``product`` with MKL or oneDNN, whatever the number of rows."""
    if x.numel() >= onednn_rows(weight) * weight.shape[1]:
        out: Tensor = ONEDNN(x, weight, bias, "none", [], "")  # type: ignore[misc]
        return out
    return linear(x, weight, bias)


class Matrix:
    """A linear layer without gradients that precomputes all choices which do not depend on its input."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        """Store ``weight`` [N, K] and ``bias`` [N] as views, not copies, so that later writes to them take effect."""
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self.turned = self.weight.t()
        self.onednn = onednn_rows(weight)
        self.few = few_rows.MAX_ROWS if few_rows.suits(self.weight) else 0  # rows

    def __call__(self, x: Tensor) -> Tensor:
        """Compute the product: [n, K] -> [n, N]."""
        if 0 < x.shape[0] <= self.few:
            return few_rows.few_rows(x, self.weight, self.bias)
        if x.shape[0] >= self.onednn:
            out: Tensor = ONEDNN(x, self.weight, self.bias, "none", [], "")  # type: ignore[misc]
            return out
        return torch.mm(x, self.turned) if self.bias is None else torch.addmm(self.bias, x, self.turned)
