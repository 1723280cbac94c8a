"""What is wrong with rows, logs, runs and models: name -> contents, or a change of the built-in model's files."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

GOOD = b'{"question": "1+1", "answer": "2"}\n'
DEEP = b"[" * 100_000

# Rows of questions.
ROWS: dict[str, bytes] = {
    "bom": b"\xef\xbb\xbf" + GOOD,
    "nul": GOOD + b"\0\0\0\0\n",
    "latin": b'{"question": "caf\xe9", "answer": "2"}\n',
    "surrogate": b'{"question": "a\\ud800b", "answer": "2"}\n',
    "surrogate-answer": b'{"question": "1+1", "answer": "\\udfff"}\n',
    "deep": b'{"question": ' + DEEP + b"\n",
    "digits": b'{"question": "1+1", "answer": ' + b"9" * 5000 + b"}\n",
    "list": b'["1+1", "2"]\n',
    "number": b"17\n",
    "null": b"null\n",
    "half": GOOD + b'{"question": "1+1", \n' + GOOD,
    "quotes": b"{'question': '1+1', 'answer': '2'}\n",
    "csv": b"question,answer\n1+1,2\n",
    "blank": b"\n \n\n",
    "nan-question": b'{"question": NaN, "answer": "2"}\n',
    "number-question": b'{"question": 11, "answer": "2"}\n',
    "null-question": b'{"question": null, "answer": "2"}\n',
    "empty-question": b'{"question": "  ", "answer": "2"}\n',
    "no-answer": b'{"question": "1+1"}\n',
    "null-answer": b'{"question": "1+1", "answer": null}\n',
    "no-messages": b'{"question": [], "answer": "2"}\n',
    "text-messages": b'{"question": ["1+1"], "answer": "2"}\n',
    "roleless": b'{"question": [{"content": "1+1"}], "answer": "2"}\n',
    "number-content": b'{"question": [{"role": "user", "content": 7}], "answer": "2"}\n',
    "null-content": b'{"question": [{"role": "user", "content": null}], "answer": "2"}\n',
    "surrogate-content": b'{"question": [{"role": "user", "content": "\\ud800"}], "answer": "2"}\n',
    "number-role": b'{"question": [{"role": 1, "content": "1+1"}], "answer": "2"}\n',
    "long": b'{"question": "' + b"1+" * 200_000 + b'1", "answer": "2"}\n',
}

GOOD_LOG = b'{"step": 1, "accept_length": 2.5, "entropy": 1.0}\n'
# Logs of other trainers, given with --from.
LOGS: dict[str, bytes] = {
    "bom": b"\xef\xbb\xbf" + GOOD_LOG,
    "nul": b"\0\0\n" + GOOD_LOG,
    "latin": b'{"step": 1, "task": "caf\xe9"}\n' + GOOD_LOG,
    "deep": b'{"step": ' + DEEP + b"\n" + GOOD_LOG,
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n" + GOOD_LOG,
    "list": b"[1, 2]\n" + GOOD_LOG,
    "null": b"null\n" + GOOD_LOG,
    "half": b'{"step": 1, \n' + GOOD_LOG,
    "blank": b"\n\n",
    "stepless": b'{"accept_length": 2.5}\n',
    "text-step": b'{"step": "one", "accept_length": 2.5}\n',
    "half-step": b'{"step": 1.5, "accept_length": 2.5}\n',
    "nan-step": b'{"step": NaN, "accept_length": 2.5}\n',
    "infinite-step": b'{"step": Infinity, "accept_length": 2.5}\n',
    "huge-step": b'{"step": 1e300, "accept_length": 2.5}\n',
    "true-step": b'{"step": true, "accept_length": 2.5}\n',
    "list-step": b'{"step": [1], "accept_length": 2.5}\n',
    "text-length": b'{"step": 1, "accept_length": "2.5"}\n',
    "short-length": b'{"step": 1, "accept_length": 0.5}\n',
    "negative-length": b'{"step": 1, "accept_length": -2}\n',
    "nan-length": b'{"step": 1, "accept_length": NaN}\n',
    "huge-length": b'{"step": 1, "accept_length": 1' + b"0" * 400 + b"}\n",
    "huge-entropy": b'{"step": 1, "accept_length": 2, "entropy": 1' + b"0" * 400 + b"}\n",
    "huge-tokens": b'{"step": 1, "accept_length": 2, "tokens": 1' + b"0" * 400 + b"}\n",
    "huge-rate": b'{"step": 1, "accept_length": 2, "accept_rate/1": 1' + b"0" * 400 + b"}\n",
    "huge-lag": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "lag": 1' + b"0" * 400 + b"}\n",
    "infinite-lag": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "lag": Infinity}\n',
    "wide-lag": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "lag": 1e30}\n',
    "meta-empty": b'{"step": 1, "meta_info": {}}\n',
    "meta-infinite": b'{"step": 1, "meta_info": {"spec_verify_ct": Infinity, "completion_tokens": 5}}\n',
    "meta-nan": b'{"step": 1, "meta_info": {"spec_verify_ct": NaN, "completion_tokens": 5}}\n',
    "meta-huge": b'{"step": 1, "meta_info": {"spec_verify_ct": 1' + b"0" * 400 + b', "completion_tokens": 5}}\n',
    "histogram-text": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "spec_accept_histogram": ["a"]}\n',
    "histogram-number": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "spec_accept_histogram": 7}\n',
    "histogram-ragged": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "spec_accept_histogram": [[1], 2]}\n',
    "histogram-nan": b'{"step": 1, "spec_verify_ct": 4, "completion_tokens": 9, "spec_accept_histogram": [NaN, 1]}\n',
    "verify-number": b'{"step": 1, "meta_info": {"bebop_verify": 7}}\n',
    "verify-numbers": b'{"step": 1, "meta_info": {"bebop_verify": [1, 2]}}\n',
    "verify-empty": b'{"step": 1, "meta_info": {"bebop_verify": [{}]}}\n',
    "verify-overlap": b'{"step": 1, "meta_info": {"bebop_verify": [{"accepted": 1, "overlap": 3}]}}\n',
    "verify-texts": b'{"step": 1, "meta_info": {"bebop_verify": [{"accepted": 1, "overlap": ["a"]}]}}\n',
    "verify-infinite": b'{"step": 1, "meta_info": {"bebop_verify": [{"accepted": Infinity, "overlap": [0.5]}]}}\n',
    "verify-nan": b'{"step": 1, "meta_info": {"bebop_verify": [{"accepted": NaN, "overlap": [0.5]}]}}\n',
    "verify-ragged": b'{"step": 1, "meta_info": {"bebop_verify": [{"accepted": 1, "overlap": [0.5, 0.5], "Hp": [1]}]}}\n',
    "vllm-partial": b'{"step": 1, "vllm:spec_decode_num_drafts": 5}\n',
    "vllm-text": b'{"step": 1, "vllm:spec_decode_num_drafts": "x", "vllm:spec_decode_num_draft_tokens": 1, '
    b'"vllm:spec_decode_num_accepted_tokens": 1}\n',
    "vllm-list": b'{"step": 1, "vllm:spec_decode_num_drafts": [1], "vllm:spec_decode_num_draft_tokens": 1, '
    b'"vllm:spec_decode_num_accepted_tokens": 1}\n',
    "vllm-infinite": b'{"step": 1, "vllm:spec_decode_num_drafts": Infinity, "vllm:spec_decode_num_draft_tokens": 1, '
    b'"vllm:spec_decode_num_accepted_tokens": 1}\n',
    "vllm-positions": b'{"step": 1, "vllm:spec_decode_num_drafts": 5, "vllm:spec_decode_num_draft_tokens": 5, '
    b'"vllm:spec_decode_num_accepted_tokens": 1, "vllm:spec_decode_num_accepted_tokens_per_pos": 3}\n',
    "drift-columns": b'{"step": 1, "unit": [1], "reached": []}\n',
    "drift-ragged": b'{"step": 1, "unit": [1, 2], "reached": [[1], [1, 2]]}\n',
    "drift-unit": b'{"step": 1, "unit": 7, "reached": []}\n',
    "drift-bank": b'{"step": 1, "unit": [], "reached": [], "bank": 7}\n',
    "drift-sweep": b'{"step": 1, "unit": [], "reached": [], "sweep": {"bank": 1}}\n',
    "drift-health": b'{"step": 1, "unit": [], "reached": [], "health": {"colour": "red"}}\n',
}

GOOD_STEP = b'{"step": 1, "reward/mean": 0.5}\n'
# metrics.jsonl of a run, for report and view.
METRICS: dict[str, bytes] = {
    "bom": b"\xef\xbb\xbf" + GOOD_STEP,
    "nul": b"\0\0\n" + GOOD_STEP,
    "latin": b'{"step": 1, "task": "caf\xe9"}\n' + GOOD_STEP,
    "deep": b'{"step": ' + DEEP + b"\n" + GOOD_STEP,
    "digits": b'{"step": ' + b"9" * 5000 + b"}\n" + GOOD_STEP,
    "list": b"[1, 2]\n" + GOOD_STEP,
    "null": b"null\n" + GOOD_STEP,
    "number": b"3\n" + GOOD_STEP,
    "stepless": b'{"reward/mean": 1}\n' + GOOD_STEP,
    "text-step": b'{"step": "1"}\n' + GOOD_STEP,
    "half-step": b'{"step": 1.5}\n' + GOOD_STEP,
    "true-step": b'{"step": true}\n' + GOOD_STEP,
    "blank": b"\n" + GOOD_STEP,
    "wide-step": b'{"step": 1' + b"0" * 400 + b"}\n" + GOOD_STEP,
    "torn": b'{"step": 1',
}

# Other files of a run whose metrics.jsonl is in order: name -> (file, contents).
RUN_FILES: dict[str, tuple[str, bytes]] = {
    "config-torn": ("config.yaml", b"a: ["),
    "config-latin": ("config.yaml", b"a: caf\xe9\n"),
    "config-nul": ("config.yaml", b"a: \0\n"),
    "config-python": ("config.yaml", b"!!python/object/apply:os.getcwd []\n"),
    "config-deep": ("config.yaml", b"[" * 5000),
    "drift-garbage": ("drift.jsonl", b"garbage\nmore\n"),
    "drift-latin": ("drift.jsonl", b"\xff\xfe\n"),
    "drift-list": ("drift.jsonl", b"[]\n[]\n"),
    "drift-columns": ("drift.jsonl", LOGS["drift-columns"]),
    "store-garbage": ("trajectories.sqlite", b"garbage " * 100),
    "store-empty": ("trajectories.sqlite", b""),
    "store-torn": ("trajectories.sqlite", b"SQLite format 3\0" + b"\0" * 50),
}

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
    "nan": _tensors(lambda state: {k: v * float("nan") for k, v in state.items()}),
    "folder": lambda folder: ((folder / "model.safetensors").unlink(), (folder / "model.safetensors").mkdir())[1],
    "shard": _index,
    "pickle": lambda folder: (folder / "model.safetensors").rename(folder / "pytorch_model.bin") and None,
    "mtp-shape": _tensors(lambda state: {k: v[:1].contiguous() if "mtp" in k else v for k, v in state.items()}),
    "mtp-part": _tensors(lambda state: {k: v for k, v in state.items() if "mtp" not in k or "norm" in k}),
    "no-tokenizer": lambda folder: (folder / "tokenizer.json").unlink(),
}

CONFIG_FILE = b"trainer: {steps: 3}\n"
# Runs that are to be resumed: name -> their files.
RESUMED: dict[str, Mapping[str, bytes]] = {
    "overrides-torn": {"overrides.json": b'["trainer.st'},
    "overrides-empty": {"overrides.json": b""},
    "overrides-object": {"overrides.json": b'{"trainer.steps": 3}'},
    "overrides-number": {"overrides.json": b"7"},
    "overrides-numbers": {"overrides.json": b"[1, 2]"},
    "overrides-latin": {"overrides.json": b'["task.name=caf\xe9"]'},
    "overrides-surrogate": {"overrides.json": b'["task.name=\\ud800"]'},
    "overrides-deep": {"overrides.json": DEEP},
    "overrides-grammar": {"overrides.json": b'["trainer.lr={"]'},
    "overrides-nul": {"overrides.json": b"\0\0\0"},
    "config-missing": {"overrides.json": b"[]"},
    "config-torn": {"overrides.json": b"[]", "config.yaml": b"a: ["},
    "config-list": {"overrides.json": b"[]", "config.yaml": b"- a\n"},
    "config-deep": {"overrides.json": b"[]", "config.yaml": b"[" * 5000},
    "config-latin": {"overrides.json": b"[]", "config.yaml": b"a: caf\xe9\n"},
    "config-date": {"overrides.json": b"[]", "config.yaml": b"a: 2026-99-99\n"},
    "config-python": {"overrides.json": b"[]", "config.yaml": b"!!python/object/apply:os.getcwd []\n"},
    "config-empty": {"overrides.json": b"[]", "config.yaml": b""},
    "config-other": {"overrides.json": b"[]", "config.yaml": b"trainer: 7\n"},
    "reward": {"overrides.json": b'["task.reward=reward.py:f"]'},
    "address": {"overrides.json": b'["runtime.address=10.0.0.1:6379"]'},
    "temp": {"overrides.json": b'["runtime.temp_dir=/elsewhere"]'},
    "urls": {"overrides.json": b'["rollout=sglang", "rollout.sglang.urls=[http://10.0.0.1:1]"]'},
    "trusting": {"overrides.json": b'["runtime.trust=true", "task.reward=reward.py:f"]'},
    "origin": {"overrides.json": b'["task.reward=reward.py:f"]', "origin.json": b"[]"},
    "origin-torn": {"overrides.json": b'["task.reward=reward.py:f"]', "origin.json": b"{"},
    "origin-deep": {"overrides.json": b'["task.reward=reward.py:f"]', "origin.json": DEEP},
    "origin-latin": {"overrides.json": b'["task.reward=reward.py:f"]', "origin.json": b"\xff"},
    "adapted": {"overrides.json": b'["task.reward=reward.py:f"]'},
    "out": {"overrides.json": b'["out=/elsewhere"]'},
    "step-empty": {"checkpoints/step_000001": b""},
}
