"""What is wrong with models: name -> a change of the built-in model's files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.bad_input.damaged_files import DEEP

# config.json of a model: what is put in place of the built-in model's.
CONFIGS: dict[str, Mapping[str, Any]] = {
    "negative-vocab": {"vocab_size": -1},
    "text-vocab": {"vocab_size": "many"},
    "null-vocab": {"vocab_size": None},
    "huge-vocab": {"vocab_size": 10**30},
    "zero-layers": {"num_hidden_layers": 0, "layer_types": []},
    "text-layers": {"num_hidden_layers": "twelve"},
    "list-layers": {"num_hidden_layers": [12]},
    "nan-layers": {"num_hidden_layers": float("nan")},
    "negative-layers": {"num_hidden_layers": -3},
    "zero-heads": {"num_attention_heads": 0},
    "odd-heads": {"num_attention_heads": 5},
    "odd-groups": {"num_key_value_heads": 3},
    "zero-groups": {"num_key_value_heads": 0},
    "zero-width": {"hidden_size": 0},
    "negative-width": {"hidden_size": -128},
    "other-width": {"hidden_size": 64},
    "text-width": {"hidden_size": "wide"},
    "huge-width": {"hidden_size": 10**30},
    "zero-mlp": {"intermediate_size": 0},
    "strange-act": {"hidden_act": "warp"},
    "number-act": {"hidden_act": 7},
    "nan-eps": {"rms_norm_eps": float("nan")},
    "text-eps": {"rms_norm_eps": "small"},
    "text-positions": {"max_position_embeddings": "far"},
    "zero-positions": {"max_position_embeddings": 0},
    "strange-rope": {"rope_parameters": {"rope_type": "warp", "rope_theta": 1e4}},
    "number-rope": {"rope_parameters": 7},
    "empty-rope": {"rope_parameters": {"rope_type": "yarn"}},
    "text-theta": {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
    "strange-dtype": {"dtype": "float7"},
    "number-dtype": {"dtype": 7},
    "strange-layer-type": {"layer_types": ["warp"] * 12},
    "few-layer-types": {"layer_types": ["full_attention"]},
    "sliding": {"layer_types": ["sliding_attention"] * 12, "use_sliding_window": True, "sliding_window": 16},
    "list-type": {"model_type": ["qwen2"]},
    "null-type": {"model_type": None},
    "number-type": {"model_type": 7},
    "bert": {"model_type": "bert"},
    "t5": {"model_type": "t5"},
    "mamba": {"model_type": "mamba"},
    "gpt2": {"model_type": "gpt2"},
    "mixtral": {"model_type": "mixtral"},
    "whisper": {"model_type": "whisper"},
    "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "strange-quantized": {"quantization_config": {"quant_method": "warp"}},
    "number-quantized": {"quantization_config": 7},
}
TEXTS: dict[str, tuple[str, bytes]] = {  # a file of a model: its contents
    "config-list": ("config.json", b"[]"),
    "config-number": ("config.json", b"7"),
    "config-null": ("config.json", b"null"),
    "config-text": ("config.json", b'"qwen2"'),
    "config-empty": ("config.json", b""),
    "config-brace": ("config.json", b"{}"),
    "config-latin": ("config.json", b'{"model_type": "caf\xe9"}'),
    "config-bom": ("config.json", b'\xef\xbb\xbf{"model_type": "qwen2"}'),
    "config-nul": ("config.json", b"\0" * 40),
    "config-deep": ("config.json", DEEP),
    "config-digits": ("config.json", b'{"model_type": "qwen2", "vocab_size": ' + b"9" * 5000 + b"}"),
    "tokenizer-list": ("tokenizer.json", b"[]"),
    "tokenizer-empty": ("tokenizer.json", b""),
    "tokenizer-torn": ("tokenizer.json", b'{"version": "1.0", "model": {"type": "BPE", "voc'),
    "tokenizer-nul": ("tokenizer.json", b"\0" * 40),
    "tokenizer-kind": ("tokenizer.json", b'{"version": "1.0", "model": {"type": "warp"}}'),
    "tokenizer-deep": ("tokenizer.json", DEEP),
    "tokenizer-latin": ("tokenizer.json", b'{"caf\xe9": 1}'),
    "tokenizer-settings-list": ("tokenizer_config.json", b"[]"),
    "tokenizer-settings-number": ("tokenizer_config.json", b"7"),
    "tokenizer-settings-torn": ("tokenizer_config.json", b"{"),
    "tokenizer-settings-latin": ("tokenizer_config.json", b'{"a": "\xe9"}'),
    "tokenizer-settings-class": ("tokenizer_config.json", b'{"tokenizer_class": 7}'),
    "tokenizer-settings-deep": ("tokenizer_config.json", DEEP),
    "template-torn": ("chat_template.jinja", b"{% for message in %}"),
    "template-open": ("chat_template.jinja", b"{{ messages"),
    "template-raises": ("chat_template.jinja", b"{{ raise_exception('no users here') }}"),
    "template-divides": ("chat_template.jinja", b"{{ 1 / 0 }}"),
    "template-undefined": ("chat_template.jinja", b"{{ warp.speed.now }}"),
    "template-latin": ("chat_template.jinja", b"\xff\xfe"),
    "weights-empty": ("model.safetensors", b""),
    "weights-text": ("model.safetensors", b"not weights at all, but text"),
    "weights-header": ("model.safetensors", (1 << 62).to_bytes(8, "little") + b"{}"),
    "weights-json": ("model.safetensors", (8).to_bytes(8, "little") + b"nonsense"),
    "weights-list": ("model.safetensors", (2).to_bytes(8, "little") + b"[]"),
    "weights-none": ("model.safetensors", (2).to_bytes(8, "little") + b"{}"),
    "weights-offsets": (
        "model.safetensors",
        (64).to_bytes(8, "little")
        + b'{"a": {"dtype": "F32", "shape": [9], "data_offsets": [0, 4]}}'.ljust(64)
        + b"abcd",
    ),
    "weights-pointer": (
        "model.safetensors",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4193184\n",
    ),
}


def _tensors(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        file = folder / "model.safetensors"
        save_file(change(load_file(file)), file, metadata={"format": "pt"})

    return damage


def _index(folder: Path) -> None:
    """Says that the weights are in two files, of which one is missing."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    places = {"model.embed_tokens.weight": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


FIRST = "model.layers.0.self_attn.q_proj.weight"
WEIGHTS: dict[str, Callable[[Path], None]] = {
    "missing": _tensors(lambda state: {k: v for k, v in state.items() if k != FIRST}),
    "mismatched": _tensors(lambda state: state | {FIRST: state[FIRST][:5].contiguous()}),
    "integers": _tensors(lambda state: {k: v.int() for k, v in state.items()}),
    "folder": lambda folder: ((folder / "model.safetensors").unlink(), (folder / "model.safetensors").mkdir())[1],
    "shard": _index,
    "pickle": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin") and None,
    "mtp-shape": _tensors(lambda state: {k: v[:1].contiguous() if "mtp" in k else v for k, v in state.items()}),
    "mtp-part": _tensors(lambda state: {k: v for k, v in state.items() if "mtp" not in k or "norm" in k}),
    "no-tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
}
