"""What a model may not ask of attention and positions is refused by name, before its weights are read."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from bebop.model.allowed import refuse_call, refuse_config
from tests.model.families import EXPERTS, FULL, LINEAR, LONG, SIZES, refused, rope

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("llama", rope("dynamic", factor=2.0), "rope_type='dynamic'"),
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}, "rope_type='longrope'"),
    ("mistral", {"sliding_window": 8}, "sliding_window=8"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}, "sliding_attention"),
    ("gemma2", {}, "sliding_attention"),
    ("gemma2", FULL, "final_logit_softcapping=30.0"),
    ("gemma2", {**FULL, "final_logit_softcapping": None}, "attn_logit_softcapping=50.0"),
    ("gemma3_text", {}, "sliding_attention"),
    ("cohere2", {}, "sliding_attention"),
    ("gpt_oss", EXPERTS, "sliding_attention"),
    ("olmo3", {}, "sliding_attention"),
    ("llama4_text", EXPERTS, "chunked_attention"),
    ("qwen3_next", {**EXPERTS, **LINEAR}, "linear_attention"),
    ("minicpm3", {}, "kv_lora_rank"),
    ("falcon_h1", {}, "hybrid"),
]


@pytest.mark.parametrize(("kind", "settings", "word"), WRONG)
def test_what_is_not_right_is_refused_by_name(kind: str, settings: dict[str, Any], word: str) -> None:
    line = refused(lambda: refuse_config(AutoConfig.for_model(kind, **{**SIZES, **settings}), "DIR"))
    assert word in line and kind in line and "model.path='DIR'" in line


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ({"sliding_window": 7}, "sliding_window=7"),
        ({"softcap": 30.0}, "softcap=30.0"),
        ({"s_aux": torch.zeros(4)}, "s_aux (a tensor)"),
        ({"position_bias": torch.zeros(4)}, "position_bias (a tensor)"),
        ({"block_indices": torch.zeros(4)}, "block_indices (a tensor)"),
        ({"dropout": 0.1}, "dropout=0.1"),
        ({"is_causal": False}, "is_causal=False"),
        ({"never_heard_of": 1}, "never_heard_of=1"),
    ],
)
def test_a_call_may_ask_for_nothing_else(setting: dict[str, Any], shown: str) -> None:
    module, usual = torch.nn.Identity(), {"dropout": 0.0, "position_ids": torch.zeros(1), "sliding_window": None}
    refuse_call(module, None, {**usual, "use_cache": False, "is_causal": True, "output_attentions": False})
    assert shown in refused(lambda: refuse_call(module, None, {**usual, **setting}))


def test_a_mask_and_a_module_that_looks_ahead_are_refused() -> None:
    module = torch.nn.Identity()
    assert "attention_mask" in refused(lambda: refuse_call(module, torch.zeros(1), {}))
    module.is_causal = False
    assert "is_causal=False" in refused(lambda: refuse_call(module, None, {}))
