"""Models of many families against Hugging Face's own forward: what is right passes, what is not is one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from bebop.config.job import ModelConfig
from bebop.model import attention as attention_module
from bebop.model import checkpoint
from bebop.model.attention import ATTENTION, CausalContext, PackedContext, SlotContext, refuse_call, refuse_config
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, require_known, save_policy
from bebop.model.parity import check_parity
from tests.builders import bare_policy
from tests.cases import slow_but
from tests.model.families import EXPERTS, FULL, LINEAR, LONG, MAMBA, SIZES, made, refused, rope, slow

# ---- what is known to be right

RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "head_dim": 16}),
    ("llama", rope("linear", factor=4.0)),
    (
        "llama",
        rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    ("llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    ("qwen2", {}),
    ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    ("qwen3", {}),
    ("qwen3", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    ("qwen3_moe", EXPERTS),
    ("qwen3_next", {**EXPERTS, **LINEAR, **FULL}),
    ("mistral", {"sliding_window": None}),
    slow("mixtral", {**EXPERTS, "sliding_window": None}),
    ("olmo2", {}),
    ("granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.7, "embedding_multiplier": 3.0}),
    ("phi3", {}),
    slow("gemma", {}),
    slow("gemma3_text", FULL),
    slow("glm4", {}),
    slow("smollm3", {"no_rope_layers": [1, 0]}),
    slow("starcoder2", {}),
    slow("gpt_neox", {"num_key_value_heads": 4}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), RIGHT)
def test_what_is_right_passes(kind: str, settings: dict[str, Any]) -> None:
    policy = made(kind, **settings)
    refuse_config(policy.backbone.config, kind)
    check_parity(policy, kind)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "olmo2"])
def test_bfloat16_passes(kind: str) -> None:
    check_parity(made(kind, torch.bfloat16), kind)


# ---- refused by what comes out, the list put aside

SILENT: list[tuple[str, dict[str, Any], str]] = [
    ("granite", {"logits_scaling": 8.0}, "packed rows"),  # behind the language-model head
    slow("cohere", {"logit_scale": 0.5}, "packed rows"),
    ("gemma2", {**FULL, "attn_logit_softcapping": None, "final_logit_softcapping": 5.0}, "packed rows"),
    ("gemma2", {**FULL, "attn_logit_softcapping": 1.0, "final_logit_softcapping": None}, "packed rows"),
    ("mistral", {"sliding_window": 8}, "packed rows"),
    ("gpt_oss", {**EXPERTS, **FULL}, "packed rows"),  # sinks
    ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 64}, "packed rows"),
    ("qwen3_next", {**EXPERTS, **LINEAR, "layer_types": ["linear_attention", "full_attention"]}, "no plain attention"),
    ("falcon_h1", MAMBA, "packed rows"),  # a state beside attention, in every layer
    slow("diffllama", {}, "no plain attention"),  # attends twice
    slow("bert", {"is_decoder": False}, "packed rows"),  # looks ahead
    slow("minicpm3", {}, "does not run"),  # keys and values of other sizes than the cache
]


@pytest.mark.parametrize(("kind", "settings", "word"), SILENT)
def test_what_no_list_names_is_caught(
    kind: str, settings: dict[str, Any], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "refuse_call", lambda *_: None)
    policy = made(kind, **settings)
    line = refused(lambda: check_parity(policy, "DIR"))
    assert word in line and kind in line


# ---- planted faults

ATTEND = {c: c.attend for c in (PackedContext, CausalContext, SlotContext)}


def unscaled(self: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    return ATTEND[type(self)](self, layer, query, key, value, 1.1 * scaling)


def one_group(self: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    return ATTEND[type(self)](self, layer, query, key[:, :1].expand_as(key), value, scaling)


def late_layer(self: Any, layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> Tensor:
    return ATTEND[type(self)](self, layer, query, key, value * (1.1 if layer == 1 else 1.0), scaling)


# A tenth more or less is within the rounding of bfloat16 on a random model.
FAULTS = [(fault, torch.float32) for fault in (unscaled, one_group, late_layer)] + [(one_group, torch.bfloat16)]


CAUGHT = [(context, *fault) for fault in FAULTS for context in ATTEND]


# Each fault is quick in one context, and each context with one fault or two.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "fault", "dtype"), slow_but([CAUGHT[0], CAUGHT[4], CAUGHT[8], CAUGHT[11]], CAUGHT, several=True)
)
def test_a_fault_of_a_context_is_caught(
    fault: Any, context: Any, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = made("llama", dtype)
    check_parity(policy, "DIR")
    monkeypatch.setattr(context, "attend", fault)
    words = {PackedContext: "packed rows", CausalContext: "padded rows", SlotContext: "slots"}
    assert words[context] in refused(lambda: check_parity(policy, "DIR"))


def test_faults_of_places_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = made("llama")
    place, hidden, made_up = SlotContext.place, Policy.hidden, PackedContext.__init__
    with monkeypatch.context() as fault:  # every query sees one entry too many

        def ahead(self: SlotContext, at: Tensor, used: int) -> None:
            place(self, at + 1, used)
            bias = self.bias
            place(self, at, used)
            self.bias = bias

        fault.setattr(SlotContext, "place", ahead)
        assert "slots" in refused(lambda: check_parity(policy, "DIR"))
    with monkeypatch.context() as fault:  # positions begin anew with every pass

        def anew(self: Policy, ids: Tensor, at: Tensor, context: Any) -> Tensor:
            return hidden(self, ids, at - at[:, :1], context)

        fault.setattr(Policy, "hidden", anew)
        assert "slots" in refused(lambda: check_parity(policy, "DIR"))
    with monkeypatch.context() as fault:  # two rows taken for one

        def joined(self: PackedContext, lengths: Tensor) -> None:
            made_up(self, torch.cat([lengths[:2].sum()[None], lengths[2:]]))

        fault.setattr(PackedContext, "__init__", joined)
        assert "packed rows" in refused(lambda: check_parity(policy, "DIR"))


# ---- at load time


def saved(policy: Policy, folder: Path) -> ModelConfig:
    save_policy(policy, folder)
    return ModelConfig(path=str(folder), device="cpu")


def test_a_checkpoint_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    config = saved(made("mistral", sliding_window=8), tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for load in (load_policy, require_known):
        line = refused(lambda load=load: load(config))
        assert "sliding_window=8" in line and line.count("model.path") == 1


def test_check_false_skips_the_passes_and_not_the_list(tmp_path: Path) -> None:
    config = saved(made("granite", logits_scaling=8.0), tmp_path / "silent")
    assert "model.check=false" in refused(lambda: load_policy(config))
    load_policy(ModelConfig(path=config.path, device="cpu", check=False))
    config = saved(made("mistral", sliding_window=8), tmp_path / "named")
    refused(lambda: load_policy(ModelConfig(path=config.path, device="cpu", check=False)))


def test_a_checkpoint_is_checked_once_a_process_and_again_when_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, calls = saved(bare_policy(), tmp_path), []

    def counted(policy: Policy, path: str) -> None:
        calls.append(path)
        check_parity(policy, path)

    monkeypatch.setattr(checkpoint, "check_parity", counted)
    for _ in range(3):
        load_policy(config)
    assert len(calls) == 1
    load_policy(ModelConfig(path=config.path, device="cpu", dtype="bfloat16"))
    settings = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**settings, "note": "changed"}))
    load_policy(config)
    assert len(calls) == 3


def test_the_check_leaves_no_trace() -> None:
    policy = bare_policy()
    before, state = policy.weights(), torch.get_rng_state()
    copies = {name: weight.clone() for name, weight in before.items()}
    check_parity(policy, "DIR")
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(policy.weights()[name], weight) for name, weight in copies.items())
    assert policy.backbone.config._attn_implementation == ATTENTION
    assert not any(module._forward_hooks for module in policy.backbone.modules())
    assert all(parameter.requires_grad for parameter in policy.backbone.parameters())


# ---- What a model may not ask of attention and positions is refused by name, before its weights are read

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
