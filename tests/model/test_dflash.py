"""The layout of DFlash: names, settings, the order of tapped layers, MASK, and what cannot be written."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.systems.block.dflash import export, free_token, lowest_first, read_mask, read_settings
from bebop.systems.block.network import BlockDraftNetwork
from tests.builders import letters, tiny_policy

SIZES = {"hidden_size": 32, "intermediate_size": 48, "heads": 4, "kv_heads": 2, "head_dim": 8, "block": 4}


def drafter(taps: tuple[int, ...] = (0, 2), **settings: float) -> BlockDraftNetwork:
    torch.manual_seed(3)
    return BlockDraftNetwork(taps=taps, rope_theta=5e5, norm_eps=1e-5, **SIZES, **settings)  # type: ignore[arg-type]


def target(rows: int = 16) -> Policy:
    """Four layers, and more rows of the embedding than tokens."""
    policy = tiny_policy(rows, layers=4)
    policy.tokenizer = letters(12)
    return policy


def test_what_is_written(tmp_path: Path) -> None:
    policy, network = target(), drafter()
    assert "MASK is token 12" in export(policy, network, tmp_path)
    found = read_settings(tmp_path)
    wanted = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 4, "num_target_layers": 4,
        "dflash_config": {"target_layer_ids": [0, 2], "mask_token_id": 12}, "num_hidden_layers": 2, "head_dim": 8,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "max_position_embeddings": 512,
    }  # fmt: skip
    assert {name: found[name] for name in wanted} == wanted
    weights = load_file(tmp_path / "model.safetensors")
    state = network.bfloat16().state_dict()
    token, vector = read_mask(tmp_path)
    assert token == 12 and torch.equal(vector, state.pop("mask"))
    assert set(weights) == set(state) and all(torch.equal(weights[name], state[name]) for name in state)


def test_columns_go_with_their_layers() -> None:
    """``fc`` of states in the order of the taps is what was written, of states with the lowest layer first."""
    network = drafter(taps=(2, 0, 1)).double()
    states = {layer: torch.randn(5, 32, dtype=torch.float64) for layer in (0, 1, 2)}
    wanted = network.fc(torch.cat([states[layer] for layer in network.taps], -1))
    written = lowest_first(network.fc.weight, network.taps)
    assert torch.allclose(torch.cat([states[layer] for layer in (0, 1, 2)], -1) @ written.T, wanted)
    assert not torch.allclose(torch.cat([states[layer] for layer in (0, 1, 2)], -1) @ network.fc.weight.T, wanted)


def test_taps_are_written_lowest_first(tmp_path: Path) -> None:
    network = drafter(taps=(2, 0))
    export(target(), network, tmp_path)
    assert read_settings(tmp_path)["dflash_config"]["target_layer_ids"] == [0, 2]
    left, right = load_file(tmp_path / "model.safetensors")["fc.weight"].chunk(2, 1)
    assert torch.equal(torch.cat([right, left], 1), network.fc.weight.bfloat16())


def test_the_mask_is_a_row_that_no_text_has(tmp_path: Path) -> None:
    export(target(), drafter(), tmp_path, mask_token=14)
    assert read_mask(tmp_path)[0] == read_settings(tmp_path)["dflash_config"]["mask_token_id"] == 14
    with pytest.raises(UserError, match=r"--mask-token=16 is not possible: the model has tokens 0\.\.15"):
        export(target(), drafter(), tmp_path, mask_token=16)
    assert free_token(letters(12), 13) == 12
    with pytest.raises(UserError, match="--mask-token"):
        free_token(letters(12), 12)


def test_models_that_would_not_decode_as_here(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"layer 3, and SGLang's DFLASH sees the output of layers 0\.\.2"):
        export(target(), drafter(taps=(1, 3)), tmp_path)
    policy = target()
    policy.backbone.lm_head.weight = policy.backbone.get_input_embeddings().weight
    with pytest.raises(UserError, match="output matrix"):
        export(policy, drafter(), tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["{", "[]", '{"architectures": ["Qwen3ForCausalLM"]}', None])
def test_folders_that_hold_something_else(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(UserError, match=r"bebop\.export"):
        read_settings(tmp_path)


def test_what_sglang_does_not_host_is_said(tmp_path: Path) -> None:
    policy = target()
    assert "for qwen2 it will not start" in export(policy, drafter(), tmp_path)
    policy.backbone.config.model_type = "qwen3"
    assert "will not start" not in export(policy, drafter(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is False
