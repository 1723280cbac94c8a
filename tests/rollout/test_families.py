"""The engine runs what transformers runs: other families of dense causal models, with a fresh MTP head."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from bebop.config import DecodingConfig
from bebop.errors import UserError
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.mtp import MTPHead, init_from_backbone
from bebop.rollout.torch_engine import TorchEngine, generate
from tests.builders import letters, requests

SIZES = {
    "vocab_size": 12, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.4,
    "bos_token_id": None, "eos_token_id": 11, "pad_token_id": None,
}  # fmt: skip


def family(name: str, **settings: object) -> Policy:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **{**SIZES, **settings})
    backbone = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION).eval()
    head = MTPHead(backbone).eval()
    init_from_backbone(head, backbone)
    return Policy(backbone=backbone, tokenizer=letters(12), mtp=head, layout="mimo")


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "olmo2", "granite"])
def test_greedy_answers_equal_hugging_face_generate(name: str) -> None:
    policy = family(name, sliding_window=None)
    system = DecodingConfig(system="bebop")
    prompts = [[1, 2, 3, 4], [5, 6]]
    answers = generate(
        TorchEngine(policy, system, slots=2, max_length=64), requests(prompts, temperature=0.0, max_new_tokens=16)
    )
    stock = AutoModelForCausalLM.from_config(copy.deepcopy(policy.backbone.config), attn_implementation="eager")
    stock.load_state_dict(policy.backbone.state_dict())
    stock.generation_config.eos_token_id = None
    for prompt, answer in zip(prompts, answers, strict=True):
        out = stock.eval().generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
        assert answer.token_ids.tolist() == out[0, len(prompt) :].tolist()


def test_a_sliding_window_is_refused() -> None:
    policy = family("mistral", sliding_window=8)
    engine = TorchEngine(policy, DecodingConfig(system="autoregressive"), slots=1, max_length=64)
    with pytest.raises(UserError, match="sliding_window=8"):
        generate(engine, requests([[1, 2, 3]], max_new_tokens=4))
