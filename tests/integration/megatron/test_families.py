"""Each known family of models is the same on megatron-core: hidden states, and a step of its head."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from bebop.config.job import HeadConfig, ModelConfig
from bebop.megatron_job.parallel import ParallelConfig, Place, joined
from bebop.model.attention import ATTENTION, CausalContext
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, save_policy
from bebop.model.mtp import MTPHead
from bebop.trainer.chains import chain_rows
from bebop.trainer.head_backend import FSDPBackend
from bebop.trainer.heads import HeadTrainer
from bebop.trainer.objectives import Sampling
from tests.builders import letters
from tests.integration.megatron.builders import VOCAB, rows, trainer

EXPERTS = {"num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
GLM = {"n_shared_experts": 2, "routed_scaling_factor": 1.5, "attention_bias": True, "head_dim": 16}
FAMILIES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen2, tied": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3, wide heads": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "rope_theta": 1e6}),
    "qwen3 with experts": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**EXPERTS, "norm_topk_prob": True}),
    "qwen3, weights not normed": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**EXPERTS, "norm_topk_prob": False}),
    "qwen3, first dense": (Qwen3MoeConfig, Qwen3MoeForCausalLM, {**EXPERTS, "mlp_only_layers": [0]}),
    "glm4 with experts": (Glm4MoeConfig, Glm4MoeForCausalLM, {**EXPERTS, **GLM, "use_qk_norm": True}),
}

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.2, "tie_word_embeddings": False, "attn_implementation": ATTENTION,
}  # fmt: skip


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with joined(ParallelConfig(), "cpu") as found:
        yield found


def make(family: str) -> Any:
    """A random model of a family."""
    config, kind, settings = FAMILIES[family]
    torch.manual_seed(0)
    backbone = fill(kind(config(**{**SIZES, **settings})).eval())
    with torch.no_grad():
        for parameter in backbone.parameters():
            if parameter.dim() == 1:  # norms and biases that are 1 or 0 would hide a mistake
                parameter += 0.2 * torch.randn_like(parameter)
    return backbone


def fill(module: Any) -> Any:
    """Draw experts, which begin as what the memory held, and routers, which a head begins at 0."""
    for name, tensor in module.state_dict().items():
        if "experts." in name or "mlp.gate." in name:
            tensor.normal_(0, 0.2)
    return module


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("layout", ["qwen3_next", None])
def test_states_and_a_step_of_the_head(family: str, layout: str | None, tmp_path: Path, place: Place) -> None:
    """``layout`` None: the checkpoint has no head, and both begin the same one."""
    backbone = make(family)
    mtp = None if layout is None else fill(MTPHead(backbone, zero_first=False))
    save_policy(Policy(backbone=backbone, tokenizer=letters(VOCAB), mtp=mtp, layout=layout or "mimo"), tmp_path)
    policy = load_policy(ModelConfig(path=str(tmp_path), device="cpu", init_mtp=True))
    megatron = trainer(tmp_path, ParallelConfig(), place, objective="tv")
    token_ids = chain_rows(rows(0), 1).token_ids
    positions = torch.arange(token_ids.shape[1]).expand_as(token_ids)
    with torch.no_grad():
        wanted = policy.hidden(token_ids, positions, CausalContext())
    found = megatron.backend.pipeline.states(token_ids)
    torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
    assert policy.mtp is not None
    with torch.no_grad():
        heads = (policy.mtp, megatron.backend.head)
        embeddings = policy.embed(token_ids)
        one, other = (head(embeddings, wanted, positions, CausalContext()) for head in heads)
    torch.testing.assert_close(other, one, rtol=0, atol=2e-5)
    head = HeadConfig(objective="tv", depth=3, lr=2e-3, lr_warmup_steps=3, max_tokens=60)
    reference = HeadTrainer(FSDPBackend(policy, Sampling(temperature=0.9)), head)
    for step in range(2):
        assert megatron.update(rows(step)) == pytest.approx(reference.update(rows(step)), rel=1e-4)
    found, wanted = megatron.weights(), reference.weights()
    assert found.keys() == wanted.keys() and all(found[name].shape == wanted[name].shape for name in wanted)
