"""Experts, stacked in memory and one by one on disk."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from bebop.config import ModelConfig
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, save_policy
from bebop.model.experts import join_experts, split_experts
from bebop.model.mtp import MTPHead
from tests.builders import letters

SIZES = {
    "vocab_size": 12, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "layer_types": ["full_attention"] * 2,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 11, "pad_token_id": None,
}  # fmt: skip


def test_experts_are_split_and_joined() -> None:
    state = {
        "l.mlp.experts.gate_up_proj": torch.arange(2 * 6 * 4.0).view(2, 6, 4),
        "l.mlp.experts.down_proj": torch.arange(2 * 4 * 3.0).view(2, 4, 3),
        "l.mlp.gate.weight": torch.ones(2, 4),
    }
    apart = split_experts(state)
    assert len(apart) == 2 * 3 + 1
    assert torch.equal(apart["l.mlp.experts.1.gate_proj.weight"], state["l.mlp.experts.gate_up_proj"][1, :3])
    assert torch.equal(apart["l.mlp.experts.1.up_proj.weight"], state["l.mlp.experts.gate_up_proj"][1, 3:])
    again = join_experts(apart)
    assert again.keys() == state.keys() and all(torch.equal(again[name], state[name]) for name in state)
    assert join_experts(state) == state and split_experts({"a": state["l.mlp.gate.weight"]}).keys() == {"a"}


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5_moe_text"])
def test_a_mixture_of_experts_is_read_back(tmp_path: Path, kind: str) -> None:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES)
    backbone = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    head = MTPHead(backbone).eval()
    with torch.no_grad():
        for parameter in head.parameters():  # experts begin as what the memory held
            parameter.normal_()
    policy = Policy(backbone=backbone, tokenizer=letters(12), mtp=head, layout="qwen3_next")
    save_policy(policy, tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        assert "mtp.layers.0.mlp.experts.2.down_proj.weight" in opened.keys()
    again = load_policy(ModelConfig(path=str(tmp_path), device="cpu"), need_head=True)
    before, after = policy.weights(mtp=True), again.weights(mtp=True)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    # A folder that has them stacked, as some of these have, keeps them so: the backbone's and the head's.
    (tmp_path / "model.safetensors").rename(tmp_path / "apart")
    stacked = join_experts(load_file(tmp_path / "apart"))
    save_file(stacked, tmp_path / "model.safetensors", metadata={"format": "pt"})
    save_policy(load_policy(ModelConfig(path=str(tmp_path), device="cpu"), need_head=True), tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors").keys() == stacked.keys()
