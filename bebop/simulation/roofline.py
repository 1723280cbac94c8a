"""Roofline estimate of the seconds of a pass, from the data of a GPU and the model's shape; nothing is measured.

A pass takes as long as the slower of its products and its traffic to memory (Williams, Waterman and Patterson, 2009,
"Roofline"). The communication of tensor parallelism comes on top. ``pays`` asks whether drafts are worth their passes;
``recipes/cluster`` derives the simulator's costs from it.

Left out: norms, sampling, the vocabulary-parallel gather, the imbalance of experts, and everything that grows with the
number of kernels. Shares of the peaks stand in for them (fields of ``Gpu``).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bebop.bench.peaks import PEAKS, measured
from bebop.errors import UserError

GIGABYTE = 1e9
BF16 = 2  # bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """GPU and its links: peaks from ``benchmarks/peaks.py``, shares of them fitted or assumed."""

    flops: float  # a second, bf16, dense
    bandwidth: float  # bytes a second, of its memory
    memory: float  # bytes
    nvlink: float  # bytes a second, each way, within a machine
    network: float  # bytes a second, each way, between machines
    host: float  # bytes a second from its memory to the machine's
    per_machine: int = 8
    # Fitted, each on one published speed-up (benchmarks/published/points.yaml, fit):
    products: float = 0.67  # of the peak, in decoding and prefills
    draft_launch: float = 8.7e-4  # seconds of one draft step beside its products and its traffic
    # Assumed, not measured:
    mfu: float = 0.35  # of the peak, in training
    traffic: float = 0.8  # of the memory's bandwidth
    sent: float = 0.5  # of a link's bandwidth
    latency: float = 1e-5  # seconds of one all-reduce within a machine
    launch: float = 5e-4  # seconds between two passes: scheduler, sampling
    object_store: float = 2e9  # bytes a second through Ray's object store, from machine to machine
    usable: float = 0.9  # of the memory


def _gpu(name: str) -> Gpu:
    """Return a row of ``PEAKS``, with measured operations and bandwidth if a card of the kind was measured."""
    peaks = measured(name)
    return Gpu(
        flops=peaks.flops, bandwidth=peaks.bandwidth, memory=peaks.memory, nvlink=peaks.nvlink, network=peaks.network,
        host=peaks.host,
    )  # fmt: skip


GPUS = {name: _gpu(name) for name in PEAKS if name != "cpu"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Decoder with a gated MLP or experts, and an MTP head of one layer.

    ``Model(layers=32, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocabulary=128256)`` is
    Llama-3.1-8B.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # of the MLP of dense layers
    vocabulary: int
    tied: bool = False  # whether one matrix is embedding and output
    experts: int = 0  # of a layer, without the shared ones; 0: all layers are dense
    active_experts: int = 0  # experts of a token
    expert_intermediate: int = 0
    shared_experts: int = 0  # experts of every token
    dense_layers: int = 0  # of a model with experts
    cached: int | None = None  # numbers that a token caches in a layer; None: keys and values of ``kv_heads``
    cached_layers: int | None = None  # layers whose cache grows with the context; None: all (others: linear attention)
    projections: int | None = None  # parameters of a layer's attention; None: queries, keys, values and output
    scored: int | None = None  # FLOPs of one position that attends to one other in a layer; None: score and value

    @property
    def attention(self) -> float:
        """Return the parameters of a layer's attention, without norms and biases, which are a few thousand."""
        if self.projections is not None:
            return self.projections
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def layer(self) -> float:
        """Return the parameters of a dense layer."""
        return self.attention + 3 * self.hidden * self.intermediate

    @property
    def expert(self) -> float:
        """Return the parameters of one expert."""
        return 3 * self.hidden * self.expert_intermediate

    @property
    def output(self) -> float:
        """Return the parameters of the output matrix; the embedding has the same number."""
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> float:
        """Return the parameters of the policy."""
        return self.read(math.inf) + self.output * (not self.tied)

    @property
    def head(self) -> float:
        """Return the parameters of the MTP head: a layer, and the projection of state and embedding."""
        layer = self._experts_layer(self.active_experts) if self.experts else self.layer
        return layer + 2 * self.hidden**2

    @property
    def multiplied(self) -> float:
        """Return the parameters multiplied with one token: all but the embedding, and of the experts only its own."""
        return self._parameters(self.active_experts)

    def read(self, tokens: float) -> float:
        """Return the parameters read by a pass over ``tokens`` tokens: a batch touches more experts than one token.

        Each token is assumed to choose ``active_experts`` of ``experts`` at random, independently of its neighbours.
        """
        touched = self.experts * (1 - (1 - self.active_experts / self.experts) ** tokens) if self.experts else 0.0
        return self._parameters(touched)

    def _parameters(self, experts: float) -> float:
        """Return the parameters of all layers, with ``experts`` experts each, and of the output matrix."""
        dense = self.dense_layers if self.experts else self.layers
        return dense * self.layer + (self.layers - dense) * self._experts_layer(experts) + self.output

    def _experts_layer(self, experts: float) -> float:
        return self.attention + (experts + self.shared_experts) * self.expert

    @property
    def kv_bytes(self) -> float:
        """Return the bytes of one token's keys and values in one layer, bf16."""
        return BF16 * (2 * self.kv_heads * self.head_dim if self.cached is None else self.cached)

    @property
    def growing(self) -> int:
        """Return the number of layers whose cache grows with the context."""
        return self.layers if self.cached_layers is None else self.cached_layers

    @property
    def attended(self) -> float:
        """Return the FLOPs in one layer of one position attending to one other."""
        return 4 * self.heads * self.head_dim if self.scored is None else self.scored


def pass_seconds(
    gpu: Gpu,
    model: Model,
    ranks: int,
    *,
    rows: float,
    positions: int,
    context: float,
    layers: int,
    multiplied: float,
    read_bytes: float,
) -> float:
    """Return the seconds of a pass over ``rows * positions`` tokens on ``ranks`` GPUs, without its launch.

    Args:
        gpu: the card.
        model: the shape of the model.
        ranks: GPUs that share the pass by tensor parallelism.
        rows: completions.
        positions: tokens of each row.
        context: tokens whose keys and values each row reads.
        layers: layers that read them.
        multiplied: parameters that a token is multiplied with.
        read_bytes: bytes of weights that the pass reads.
    """
    tokens = rows * positions
    products = 2 * multiplied * tokens + layers * model.attended * context * tokens
    traffic = read_bytes + layers * model.kv_bytes * context * rows
    worked = products / (ranks * gpu.flops * gpu.products)
    moved = traffic / (ranks * gpu.bandwidth * gpu.traffic)
    sent = 0.0
    if ranks > 1:  # two all-reduces a layer, of 2 (t - 1) / t times the states of all tokens
        states = tokens * model.hidden * BF16 * 2 * (ranks - 1) / ranks
        sent = 2 * layers * (gpu.latency + states / (gpu.nvlink * gpu.sent))
    return max(worked, moved) + sent


# ---- shapes, from the config.json of the named checkpoint


def _dense(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, intermediate: int, vocabulary: int, **other: Any
) -> Model:
    return Model(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, intermediate=intermediate,
        vocabulary=vocabulary, **other,
    )  # fmt: skip


def _latent(hidden: int, heads: int, queries: int, latent: int, nope: int, rope: int, value: int) -> dict[str, int]:
    """Return the fields of latent attention (DeepSeek-V2, 2405.04434, section 2.1) from the sizes of its projections.

    Decoding projects queries into the latent space: all heads read the same ``latent + rope`` numbers of a token.
    """
    asked = hidden * queries + queries * heads * (nope + rope) if queries else hidden * heads * (nope + rope)
    kept = hidden * (latent + rope) + latent * heads * (nope + value)
    return {
        "projections": asked + kept + heads * value * hidden,
        "scored": 2 * heads * (2 * latent + rope),
        "cached": latent + rope,
    }


QWEN, TIED = 151936, {"tied": True}
SHAPES: dict[str, tuple[str, Model]] = {
    "0.5b": ("Qwen2.5-0.5B", _dense(24, 896, 14, 2, 64, 4864, QWEN, **TIED)),
    "1.5b": ("Qwen2.5-1.5B", _dense(28, 1536, 12, 2, 128, 8960, QWEN, **TIED)),
    "1.7b": ("Qwen3-1.7B", _dense(28, 2048, 16, 8, 128, 6144, QWEN, **TIED)),
    "3b": ("Qwen2.5-3B", _dense(36, 2048, 16, 2, 128, 11008, QWEN, **TIED)),
    "4b": ("Qwen3-4B", _dense(36, 2560, 32, 8, 128, 9728, QWEN, **TIED)),
    "7b": ("Qwen2.5-7B", _dense(28, 3584, 28, 4, 128, 18944, 152064)),
    "mimo-7b": ("MiMo-7B", _dense(36, 4096, 32, 8, 128, 11008, 151680)),
    "8b": ("Llama-3.1-8B", _dense(32, 4096, 32, 8, 128, 14336, 128256)),
    "qwen3-8b": ("Qwen3-8B", _dense(36, 4096, 32, 8, 128, 12288, QWEN)),
    "9b": (
        "Qwen3.5-9B, 8 of 32 layers with full attention",
        _dense(32, 4096, 16, 4, 256, 12288, 248320, cached_layers=8),
    ),
    "14b": ("Qwen3-14B", _dense(40, 5120, 40, 8, 128, 17408, QWEN)),
    "32b": ("Qwen3-32B", _dense(64, 5120, 64, 8, 128, 25600, QWEN)),
    "70b": ("Llama-3-70B", _dense(80, 8192, 64, 8, 128, 28672, 128256)),
    "72b": ("Qwen2.5-72B", _dense(80, 8192, 64, 8, 128, 29568, 152064)),
    "30b-a3b": (
        "Qwen3-30B-A3B",
        _dense(48, 2048, 32, 4, 128, 6144, QWEN, experts=128, active_experts=8, expert_intermediate=768),
    ),
    "120b-a5b": (
        "gpt-oss-120b",
        _dense(36, 2880, 64, 8, 64, 2880, 201088, experts=128, active_experts=4, expert_intermediate=2880),
    ),
    "235b-a22b": (
        "Qwen3-235B-A22B",
        _dense(94, 4096, 64, 4, 128, 12288, QWEN, experts=128, active_experts=8, expert_intermediate=1536),
    ),
    "671b-a37b": (
        "DeepSeek-V3",
        _dense(
            61, 7168, 128, 128, 128, 18432, 129280, experts=256, active_experts=8, expert_intermediate=2048,
            shared_experts=1, dense_layers=3, **_latent(7168, 128, 1536, 512, 128, 64, 128),
        ),
    ),
}  # fmt: skip
MODELS = {"mimo-7b": SHAPES["mimo-7b"][1], "qwen2.5-72b": SHAPES["72b"][1]}  # names of recipes/cluster


def shape(name: str) -> tuple[str, Model]:
    """Return the model name and the shape for a size like ``7b``.

    An unlisted dense size is the nearest listed one with more or fewer layers.

    Raises:
        UserError: The name is no size.
    """
    key = name.strip().lower()
    if key in SHAPES:
        return SHAPES[key]
    try:
        wanted = float(key.removesuffix("b")) * 1e9
    except ValueError:
        wanted = math.nan
    if not key.endswith("b") or not 0.1e9 <= wanted <= 1e13:
        raise UserError(f"--params={name!r} is not possible: give a size such as 13b, or one of {', '.join(SHAPES)}")
    dense = {size: model for size, (_, model) in SHAPES.items() if not model.experts}
    near = min(dense, key=lambda size: abs(math.log(dense[size].parameters / wanted)))
    model = dense[near]
    outside = model.parameters - model.layers * model.layer
    layers = max(1, round((wanted - outside) / model.layer))
    return f"{SHAPES[near][0]} with {layers} layers", replace(model, layers=layers)


def from_config(content: Mapping[str, Any]) -> Model:
    """Return the shape that a Hugging Face ``config.json`` describes.

    Raises:
        UserError: A size is missing, or is no whole number of 1 or more.
    """
    content = {**content, **(content.get("text_config") or {})}  # models with images keep the language model there

    def size(*names: str, default: int | None = None) -> int:
        value = next((content[name] for name in names if content.get(name) is not None), default)
        if not isinstance(value, int) or isinstance(value, bool) or value < (1 if default is None else 0):
            raise UserError(f"config.json: {names[0]}={value!r} is not possible: a whole number of 1 or more is wanted")
        return value

    hidden, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    head_dim = size("head_dim", default=hidden // heads)
    experts = size("num_experts", "n_routed_experts", "num_local_experts", default=0)
    kinds = content.get("layer_types") or []
    # Hybrids of Qwen may give the distance of layers with full attention in place of a list.
    hybrid = str(content.get("model_type")).startswith(("qwen3_next", "qwen3_5"))
    every = size("full_attention_interval", default=4 if hybrid else 0)
    linear = sum("linear" in str(kind) for kind in kinds) if kinds else layers - layers // every if every else 0
    latent = size("kv_lora_rank", default=0)
    nope, rope, value = (size(name, default=0) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    queries = size("q_lora_rank", default=0)
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=size("num_key_value_heads", default=heads),
        head_dim=head_dim,
        intermediate=size("intermediate_size", "moe_intermediate_size"),
        vocabulary=size("vocab_size"),
        tied=bool(content.get("tie_word_embeddings", False)),
        experts=experts,
        active_experts=size("num_experts_per_tok", default=0) if experts else 0,
        expert_intermediate=size("moe_intermediate_size", "intermediate_size") if experts else 0,
        shared_experts=size("n_shared_experts", default=0) if experts else 0,
        dense_layers=min(layers, size("first_k_dense_replace", default=0)) if experts else 0,
        cached_layers=layers - linear if linear else None,
        **(_latent(hidden, heads, queries, latent, nope, rope, value) if latent else {}),
    )


def read_config(folder: str) -> Model:
    """Return the shape of the checkpoint in a folder; raise ``UserError`` if its ``config.json`` cannot be read."""
    path = Path(folder) / "config.json"
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"--model={folder!r} is not possible: {path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"--model={folder!r} is not possible: {path} holds no mapping")
    return from_config(content)
