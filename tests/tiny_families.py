"""Tiny random checkpoints of families with MTP heads, under the names that the families publish.

Backbone and MTP decoder layer are transformers' own classes; the names of the MTP weights are written out here, apart
from ``bebop.model.layouts``, so that they hold that module against what is published. Experts are stored one by one.
"""

import copy
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from bebop.model.checkpoint import resolve

SIZES = {
    "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "bos_token_id": None, "pad_token_id": None, "initializer_range": 0.15,
}  # fmt: skip
HYBRID = {
    "layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2, "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
QWEN_EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1, "norm_topk_prob": True,
}  # fmt: skip
ROUTED = {
    "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "first_k_dense_replace": 1,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 24, "rope_interleave": True,
}  # fmt: skip

# Places of the parts beside the decoder layer: norm of embeddings, norm of hidden states, projection, final norm.
MIMO = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
QWEN = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
DEEPSEEK = ("enorm", "hnorm", "eh_proj", "shared_head.norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family: its ``model_type``, what differs from ``SIZES``, and the names of its MTP layer.

    ``Family(kind="llama", prefix="model.mtp_layers.0.", layer="", parts=MIMO)``.
    """

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    prefix: str  # of all MTP weights; {L} is the number of layers of the backbone
    layer: str  # what precedes the decoder layer's own names
    parts: tuple[str, str, str, str]
    hidden_first: bool = False  # whether the projection reads the hidden state before the embedding
    own_tables: bool = False  # whether the MTP layer holds copies of embedding and language-model head
    config: dict[str, Any] = field(default_factory=dict)  # more of config.json
    drop: tuple[str, ...] = ()  # settings that the family's config.json does not have


NEXTN = {"num_nextn_predict_layers": 1}
FAMILIES: dict[str, Family] = {
    "qwen3_next": Family(
        kind="qwen3_next", settings=HYBRID | QWEN_EXPERTS, prefix="mtp.", layer="layers.0.", parts=QWEN
    ),
    "qwen3_5": Family(
        kind="qwen3_5_text",
        settings=HYBRID,
        prefix="mtp.",
        layer="layers.0.",
        parts=QWEN,
        config={"mtp_num_hidden_layers": 1},
    ),
    "qwen3_5_moe": Family(
        kind="qwen3_5_moe_text",
        settings=HYBRID | QWEN_EXPERTS,
        prefix="mtp.",
        layer="layers.0.",
        parts=QWEN,
        config={"mtp_num_hidden_layers": 1},
    ),
    "deepseek_v3": Family(
        kind="deepseek_v3",
        settings=ROUTED | LATENT | {"n_group": 2, "topk_group": 1},
        prefix="model.layers.{L}.",
        layer="",
        parts=DEEPSEEK,
        own_tables=True,
        config=NEXTN
        | {
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "moe_layer_freq": 1,
        },  # vLLM and SGLang go by the first
        drop=("head_dim",),
    ),
    "glm4_moe": Family(
        kind="glm4_moe",
        settings=ROUTED | {"partial_rotary_factor": 0.5, "use_qk_norm": True, "attention_bias": True},
        prefix="model.layers.{L}.",
        layer="",
        parts=DEEPSEEK,
        own_tables=True,
        config=NEXTN,
    ),
    "mimo": Family(
        kind="qwen2",
        settings={"head_dim": 16},
        prefix="model.mtp_layers.0.",
        layer="",
        parts=MIMO,
        hidden_first=True,
        config={**NEXTN, "architectures": ["MiMoForCausalLM"]},
        drop=("head_dim",),
    ),
    "llama": Family(
        kind="llama",
        prefix="model.mtp_layers.0.",
        layer="",
        parts=MIMO,
        hidden_first=True,
        config=NEXTN,
    ),
}


def write_family(
    folder: Path, name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any
) -> Path:
    """Write a tiny random checkpoint of ``FAMILIES[name]`` and return its folder.

    ``settings`` replace those of the family's configuration. No two weights are alike, norms and biases of routers
    included, so that a tensor in the wrong place shows. The tokenizer is that of the built-in model.
    """
    family = FAMILIES[name]
    tokenizer = AutoTokenizer.from_pretrained(resolve("tiny"))
    own = {**SIZES, **family.settings, "vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id, **settings}
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family.kind, **{key: value for key, value in own.items() if key not in family.drop})
    backbone = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    layers = config.num_hidden_layers
    prefix = family.prefix.format(L=layers)
    mtp = mtp_modules(backbone)
    with torch.no_grad():
        for module in (backbone, *mtp.values()):
            _randomize(module, config.initializer_range)
        # Random logits are flat: sharper ones make distributions that differ from token to token.
        backbone.lm_head.weight.normal_(0, 6 / config.hidden_size**0.5)
    _cast(backbone, dtype)
    backbone.save_pretrained(folder)  # under published names, experts one by one
    tensors = load_file(folder / "model.safetensors")
    for part, module in mtp.items():
        place = prefix + (family.layer if part == "layer" else f"{_part_name(family, part)}.")
        for key, tensor in _cast(module, dtype).state_dict().items():
            tensors |= {place + published: value for published, value in _published(key, tensor.clone()).items()}
    if family.own_tables:
        tensors[f"{prefix}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{prefix}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    if family.hidden_first:
        place = f"{prefix}{_part_name(family, 'project')}.weight"
        tensors[place] = torch.cat(tensors[place].chunk(2, 1)[::-1], 1).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    stored = json.loads((folder / "config.json").read_text()) | family.config
    (folder / "config.json").write_text(json.dumps(stored, indent=2))
    tokenizer.save_pretrained(folder)
    return folder


def mtp_modules(backbone: Any) -> dict[str, nn.Module]:
    """Return the modules of the MTP layer, not filled: the family's own norms and decoder layer, with full attention.

    They run on transformers' eager attention.
    """
    decoder = backbone.get_decoder()
    norm, layer = type(decoder.norm), type(decoder.layers[0])
    config = copy.deepcopy(backbone.config)
    config._attn_implementation = "eager"
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, "full_attention"]
    size, eps = config.hidden_size, config.rms_norm_eps
    return {
        "token_norm": norm(size, eps=eps),
        "hidden_norm": norm(size, eps=eps),
        "project": nn.Linear(2 * size, size, bias=False),
        "layer": layer(config, config.num_hidden_layers),
        "final_norm": norm(size, eps=eps),
    }


def read_mtp(folder: Path, name: str, backbone: Any) -> dict[str, nn.Module]:
    """Return the modules of the MTP layer with the weights that a folder publishes; the projection as it is stored."""
    family, tensors = FAMILIES[name], load_file(folder / "model.safetensors")
    prefix = family.prefix.format(L=backbone.config.num_hidden_layers)
    modules = mtp_modules(backbone)
    for part, module in modules.items():
        place = prefix + (family.layer if part == "layer" else f"{_part_name(family, part)}.")
        state = {key: _joined(place + key, tensors) for key in module.state_dict()}
        module.load_state_dict(state)
        module.eval()
    return modules


def _part_name(family: Family, part: str) -> str:
    return dict(zip(("token_norm", "hidden_norm", "project", "final_norm"), family.parts, strict=True))[part]


def _joined(key: str, tensors: dict[str, Tensor]) -> Tensor:
    """Return a weight of a decoder layer from its published pieces."""
    parsed = re.fullmatch(r"(.*experts)\.(gate_up_proj|down_proj)", key)
    if parsed is None:
        return tensors[key]
    place, kind = parsed.groups()
    count = len({name for name in tensors if re.fullmatch(re.escape(place) + r"\.\d+\.up_proj\.weight", name)})
    names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
    return torch.stack([torch.cat([tensors[f"{place}.{i}.{one}.weight"] for one in names]) for i in range(count)])


def _cast(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast the parameters; biases of routers stay in float32, as published."""
    for parameter in module.parameters():
        parameter.data = parameter.data.to(dtype)
    return module


def _randomize(module: nn.Module, spread: float) -> None:
    """Give all weights random values: what is not initialized, and what begins as 1 or 0, as well."""
    for name, parameter in module.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, spread)
        elif not name.endswith(("A_log", "dt_bias")):  # of linear attention, random from the start
            parameter.copy_(torch.where(parameter.isfinite(), parameter, 0.0) + 0.2 * torch.randn_like(parameter))
    for name, buffer in module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.1)


def _published(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """Return a weight of a decoder layer under its published names: stacked experts become three matrices each."""
    parsed = re.fullmatch(r"(.*experts)\.(gate_up_proj|down_proj)", key)
    if parsed is None:
        return {key: tensor}
    place, kind = parsed.groups()
    out = {}
    for i, matrix in enumerate(tensor):
        if kind == "down_proj":
            out[f"{place}.{i}.down_proj.weight"] = matrix.clone()
        else:
            half = len(matrix) // 2
            out[f"{place}.{i}.gate_proj.weight"] = matrix[:half].clone()
            out[f"{place}.{i}.up_proj.weight"] = matrix[half:].clone()
    return out
