"""Random models of many families on bebop's attention, and the one line in which what is refused ends."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bebop.errors import UserError
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from tests.builders import letters

SIZES = {
    "vocab_size": 12, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": 11, "pad_token_id": None, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5, "shared_expert_intermediate_size": 16,
}  # fmt: skip
MAMBA = {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
FULL = {"layer_types": ["full_attention"] * 2}
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
    "short_factor": [1.0] * 4, "long_factor": [4.0] * 4,
}  # fmt: skip


def rope(kind: str, **settings: object) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **settings}}


def slow(*case: object) -> Any:
    """A case for the slow tests: a family more, whose import takes most of the time."""
    return pytest.param(*case, marks=pytest.mark.slow)


def made(kind: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Policy:
    """A random model of a family, on bebop's attention, whatever the list says about it."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **settings})
    backbone = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).to(dtype).eval()
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.dim() == 1:  # norms and biases that are 1 or 0 would hide a mistake
                parameter += 0.2 * torch.randn_like(parameter)
    return Policy(backbone=backbone, tokenizer=letters(12), mtp=None, layout="mimo")


def refused(action: Callable[[], object]) -> str:
    """The one line that an action ends in."""
    with pytest.raises(UserError) as error:
        action()
    assert "\n" not in str(error.value)
    return str(error.value)
