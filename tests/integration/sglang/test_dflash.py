"""What ``bebop.export`` writes of a block drafter, in SGLang's own classes: it is loaded whole, and drafts are ours.

DFLASH itself needs CUDA. Here run its models, its loader and those of its worker's functions that hold no kernel
(``draft_dflash``); the marked test at the end runs all of it where there is a GPU.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from bebop.config.job import DecodingConfig, ModelConfig
from bebop.model.attention import ATTENTION, SlotContext
from bebop.model.backbone import Policy, tapped
from bebop.model.checkpoint import save_policy
from bebop.rollout.sglang.backend import INTERPRETER
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems.block.dflash import ARCHITECTURE, MASK_FILE, TARGETS, export
from bebop.systems.block.network import BlockDraftNetwork
from bebop.trajectory import Completion
from tests.builders import letters
from tests.goodness_of_fit import p_value
from tests.integration.sglang.builders import engine
from tests.served_models import PROMPT, answers, ask, job, joint_distribution, logprobs
from tests.tree import ROOT

pytest.importorskip("sglang")  # where the file is named, its folder's conftest leaves out nothing

VOCAB, TEXT = 14, [1, 2, 3, 4, 5, 6, 7]


def policy(heads: int = 4) -> Policy:
    """A random Qwen3 target with a drafter; everything that both programs could read otherwise is unusual."""
    torch.manual_seed(0)
    shared = max(1, heads // 2)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=heads,
        num_key_value_heads=shared, head_dim=8, max_position_embeddings=512, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=11, pad_token_id=None, initializer_range=0.2, attn_implementation=ATTENTION,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    backbone = Qwen3ForCausalLM(config).eval()
    backbone.config.architectures = ["Qwen3ForCausalLM"]
    network = BlockDraftNetwork(
        hidden_size=32, intermediate_size=40, heads=heads, kv_heads=shared, head_dim=16, taps=(2, 0), block=5,
        rope_theta=3e4, norm_eps=1e-3,
    )  # fmt: skip
    with torch.no_grad():
        backbone.lm_head.weight.normal_(0, 0.5)
        backbone.lm_head.weight[12:] = 0  # no greedy answer has what is no token
        torch.manual_seed(1)  # so that the drafts of one block differ
        for name, parameter in network.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return Policy(
        backbone=backbone,
        tokenizer=letters(12),
        mtp=None,
        layout="mimo",
        parts={"block": network.bfloat16().float().eval()},
    )


@torch.no_grad()
def ours(own: Policy) -> tuple[Tensor, list[int]]:
    """States [b, d] of a block whose newest token is the last of the text, and greedy drafts."""
    network, model = own.parts["block"], own.backbone
    assert isinstance(network, BlockDraftNetwork)
    *before, anchor = TEXT
    count, block = len(before), network.block
    stock = Qwen3ForCausalLM(Qwen3Config.from_dict({**model.config.to_dict(), "attn_implementation": "eager"})).eval()
    stock.load_state_dict(model.state_dict())
    with tapped(stock.model.layers, network.taps) as states:
        stock(torch.tensor([before]))
    cache = SlotContext(len(network.layers), 1, 32, network.kv_heads, network.head_dim, network.mask)
    places = torch.arange(count)[None]
    cache.place(places, 0)
    network.read(states, places, cache)
    cache.place(
        count + torch.arange(block)[None], 32, (torch.tensor([count]), torch.ones(1, block, block, dtype=torch.bool))
    )
    slots = network.slots(own.embed(torch.tensor([anchor])), block)
    found = network(slots, count + torch.arange(block)[None], cache)[0]
    return found, own.logits(found[1:]).argmax(-1).tolist()


def planted(folder: Path, name: str) -> Path:
    """A copy of an exported drafter with a fault."""
    other = folder.with_name(name)
    shutil.copytree(folder, other)
    config, weights = json.loads((other / "config.json").read_text()), load_file(other / "model.safetensors")
    if name == "shifted":
        config["dflash_config"]["target_layer_ids"] = [1, 2]
    if name == "swapped":
        weights["fc.weight"] = torch.cat(weights["fc.weight"].chunk(2, 1)[::-1], 1)
    if name == "rotated":
        config["rope_parameters"]["rope_theta"] = 1e4
    if name == "short":
        weights.pop("layers.1.self_attn.k_norm.weight")
    if name == "maskless":
        (other / MASK_FILE).unlink()
    (other / "config.json").write_text(json.dumps(config))
    save_file(weights, other / "model.safetensors")
    return other


FAULTS = ("maskless", "shifted", "swapped", "rotated", "short")


@pytest.fixture(scope="module")
def own() -> Policy:
    return policy()


@pytest.fixture(scope="module")
def results(own: Policy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What SGLang makes of an exported drafter, and of others with a fault each."""
    root = tmp_path_factory.mktemp("dflash")
    save_policy(own, root / "target")
    export(own, own.parts["block"], root / "drafter")
    names = [*FAULTS, "drafter"]  # maskless first: MASK stays in the target once it was merged
    folders = [str(planted(root / "drafter", name)) for name in FAULTS] + [str(root / "drafter")]
    module = "tests.integration.sglang.draft_dflash"
    command = [sys.executable, "-m", module, str(root / "target"), json.dumps(TEXT), *folders]
    run = subprocess.run(
        command, cwd=ROOT, env={**os.environ, **INTERPRETER}, capture_output=True, text=True, timeout=200
    )
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line[7:]) for line in run.stdout.splitlines() if line.startswith("RESULT ")]
    return dict(zip(names, lines, strict=True))


def test_every_weight_has_its_place_and_every_place_a_weight(results: dict[str, dict[str, Any]]) -> None:
    found = results["drafter"]
    assert found["class"] == ARCHITECTURE and found["unset"] == []
    assert sorted(found["needed"]) == sorted(found["own"]) != []  # each key of ours, or something would stay unset
    assert results["short"]["unset"] == ["layers.1.self_attn.k_norm.weight"]


def test_settings_are_read_as_they_were_meant(own: Policy, results: dict[str, dict[str, Any]]) -> None:
    found, network = results["drafter"], own.parts["block"]
    assert isinstance(network, BlockDraftNetwork)
    assert found["layers"] == sorted(network.taps) and found["block"] == network.block
    assert found["mask"] == 12 and found["both_ways"]


def test_drafts_are_those_of_bebop(own: Policy, results: dict[str, dict[str, Any]]) -> None:
    states, tokens = ours(own)
    found = {name: torch.tensor(result["states"]) for name, result in results.items()}
    assert results["drafter"]["tokens"] == tokens and len(set(tokens)) > 1
    assert float((found["drafter"] - states).abs().max()) < 1e-4
    for fault in ("maskless", "shifted", "swapped", "rotated"):
        assert float((found[fault] - states).abs().max()) > 1e-2, fault


def test_targets_that_hand_out_their_layers() -> None:
    """``TARGETS`` is true of SGLang's classes, and what is refused cannot."""
    for kind in (*TARGETS, "qwen2", "mimo"):
        entry = import_module(f"sglang.srt.models.{kind}").EntryClass
        classes = entry if isinstance(entry, list) else [entry]
        assert {hasattr(one, "set_dflash_layers_to_capture") for one in classes} == {kind in TARGETS}, kind


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small target with a drafter, as folders."""
    folder = tmp_path_factory.mktemp("served")
    own = policy(heads=1)
    save_policy(own, folder / "target")
    export(own, own.parts["block"], folder / "drafter")
    return folder


def follows(found: Sequence[Completion], folder: Path) -> None:
    """Second and third tokens have the target's distribution; the same counts reject a hotter one.

    Only where what stands before is a token: MASK, which this target may sample, has another row here and there.
    """
    for width in (2, 3):
        ids = np.stack([c.token_ids[:width] for c in found if len(c.token_ids) >= width and max(c.token_ids[:2]) < 12])
        for temperature, right in ((1.0, True), (1.6, False)):
            joint = joint_distribution(folder, PROMPT, temperature, VOCAB)[:12, :12]
            expected = joint.sum((2,) if width == 2 else (0, 1))
            counts = np.zeros(expected.shape)
            np.add.at(counts, tuple(ids.T) if width == 2 else ids[:, 2], 1)
            p = p_value(counts, expected)
            assert p > 1e-4 if right else width == 3 or p < 1e-6, (width, temperature, p)


@pytest.mark.gpu  # SGLang's DFLASH needs CUDA
def test_the_whole_of_dflash_on_a_gpu(root: Path) -> None:
    """Answers, cycles and log-probs with the first weights, and with others. Not run yet: there was no GPU."""
    own, target = policy(heads=1), root / "target"
    decoding = DecodingConfig(system="block_target_only", draft_tokens=4)
    config = dataclasses.replace(job(target), model=ModelConfig(path=str(target), device="cuda"), decoding=decoding)
    with engine(config, draft=str(root / "drafter")) as sglang:
        sampled = [c for _ in range(40) for c in answers(sglang, ask(50, 3))]
        before = answers(sglang, ask(2, 30, temperature=0.0))
        wanted = answers(TorchEngine(own, decoding, slots=4, max_length=120), ask(2, 30, temperature=0.0))
        with torch.no_grad():
            for parameter in own.backbone.parameters():
                parameter.mul_(1 + 0.2 * torch.randn_like(parameter))
        sglang.load_weights({name: weight.detach() for name, weight in own.weights().items()}, 1)
        after = answers(sglang, ask(2, 30, temperature=0.0))
        then = answers(TorchEngine(own, decoding, slots=4, max_length=120), ask(2, 30, temperature=0.0))
    for found, expected in ((before, wanted), (after, then)):
        assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in expected]
        assert [c.stats.cycles for c in found] == [c.stats.cycles for c in expected]  # each draft was the same
        assert [c.stats.accepted.tolist() for c in found] == [c.stats.accepted.tolist() for c in expected]
        assert all(0 < c.stats.accepted.sum() for c in found)
    for one in [c for c in sampled if c.token_ids.max() < 12][:5]:
        np.testing.assert_allclose(one.logprobs, logprobs(target, PROMPT, one.token_ids.tolist()), atol=1e-4)
    follows(sampled, target)
