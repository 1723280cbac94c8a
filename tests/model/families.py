"""Random models of many families on bebop's attention, and the one line in which what is refused ends."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from bebop.errors import UserError
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead
from bebop.systems.firp.network import PseudoStates
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


def mixture(dtype: torch.dtype = torch.float32, kind: str = "qwen3_moe", **settings: Any) -> Policy:
    """A random mixture of 8 experts, of which each token has 2, with an MTP head and the part of firp."""
    sizes = {"num_experts": 8, "num_local_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    policy = made(kind, dtype, **{"vocab_size": 24, "norm_topk_prob": True, **sizes, **settings})
    policy.tokenizer = letters(24)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        policy.backbone.lm_head.weight.normal_(0, 0.3)
        policy.mtp = MTPHead(policy.backbone).to(dtype).eval()
        firp = PseudoStates(hidden_size=32, layers=(1, 1, 2)).requires_grad_(False).eval()
        for parameter in [*policy.mtp.parameters(), *firp.parameters()]:
            if parameter.dim() >= 2:
                parameter.normal_(0, 0.25)
    policy.parts["firp"] = firp.to(dtype)
    return policy


@torch.no_grad()
def experts_of(source: Policy, tokens: Sequence[int]) -> NDArray[np.int64]:
    """The experts [N, R, k] that transformers' own model chooses for a text, those of a token in order."""
    config = copy.deepcopy(source.backbone.config)  # which a model writes to
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    model.load_state_dict(source.backbone.state_dict())
    model.to(source.backbone.dtype).eval()
    found: list[torch.Tensor] = []
    for module in model.modules():
        if type(module).__name__.endswith(("Router", "Gate")):
            module.register_forward_hook(lambda _module, _given, out: found.append(out[2].sort(-1).values))
    model(torch.tensor([[*tokens]]))
    return torch.stack(found, 1).numpy()


def refused(action: Callable[[], object]) -> str:
    """The one line that an action ends in."""
    with pytest.raises(UserError) as error:
        action()
    assert "\n" not in str(error.value)
    return str(error.value)
