"""Folders that ``save_policy`` writes, through the loaders of SGLang's models: every parameter of theirs is filled."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.checkpoint import save_policy
from bebop.model.mtp import MTPHead
from bebop.rollout.sglang.backend import INTERPRETER
from tests.builders import letters

SIZES = {
    "vocab_size": 12, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "bos_token_id": None, "eos_token_id": 11, "pad_token_id": None,
}  # fmt: skip
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "full_attention_interval": 2}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
}  # fmt: skip
FAMILIES: dict[
    str, tuple[str, dict[str, Any], str, str]
] = {  # model type, settings, layout of the head, SGLang's draft
    "mimo": ("qwen2", {}, "mimo", "MiMoMTP"),
    "qwen3_next": ("qwen3_next", HYBRID | EXPERTS, "qwen3_next", "Qwen3NextForCausalLMMTP"),
    "qwen3_5": ("qwen3_5_text", HYBRID, "qwen3_next", "Qwen3_5ForCausalLMMTP"),
    "qwen3_5_moe": ("qwen3_5_moe_text", HYBRID | EXPERTS, "qwen3_next", "Qwen3_5ForCausalLMMTP"),
}


def write(folder: Path, kind: str, settings: dict[str, Any], layout: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **settings})
    backbone = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    backbone.config.architectures = [type(backbone).__name__]  # as every checkpoint has it
    head = MTPHead(backbone).eval()
    with torch.no_grad():
        for parameter in head.parameters():  # experts begin as what the memory held
            parameter.normal_()
    save_policy(Policy(backbone=backbone, tokenizer=letters(12), mtp=head, layout=layout), folder)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], dict[str, Any]]:
    root = tmp_path_factory.mktemp("families")
    for name, (kind, settings, layout, _) in FAMILIES.items():
        write(root / name, kind, settings, layout)
    script = Path(__file__).with_name("load_checkpoints.py")
    command = [sys.executable, str(script), *[str(root / name) for name in FAMILIES]]
    run = subprocess.run(command, env={**os.environ, **INTERPRETER}, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    return {(Path(line["folder"]).name, line["draft"]): line for line in lines}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_parameter_of_sglang_is_filled(results: dict[tuple[str, bool], dict[str, Any]], family: str) -> None:
    target, draft = results[family, False], results[family, True]
    assert draft["class"] == FAMILIES[family][3]
    assert target["unset"] == [] and draft["unset"] == []
    assert sorted(draft["needed"]) == sorted(draft["own"]) != []  # each key of ours, or something would stay unset
