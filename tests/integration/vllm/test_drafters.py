"""Drafters with weights of their own: a separate model of another shape, a block drafter (DFlash's files), EAGLE-3.

Tokens follow the target, before and after new weights of it. Greedy completions take as many cycles as in the embedded
engine, so the drafts are the same. What is measured of sampled drafts is what the embedded engine measures in the same
cycle, and drafts are draws from the distributions that verification takes for them.
"""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from bebop.config.job import DecodingConfig, JobConfig, ModelConfig
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.checkpoint import load_policy, save_policy
from bebop.rollout.engine import Request
from bebop.rollout.served_engine import ServedEngine
from bebop.rollout.torch_engine import TorchEngine
from bebop.systems.block.dflash import export
from bebop.systems.block.network import BlockDraftNetwork
from bebop.trajectory import MEASURED, SamplingParams
from tests.builders import letters
from tests.eagle3_models import eagle3_job, folders
from tests.goodness_of_fit import p_value
from tests.integration.vllm.builders import (
    ALPHA,
    RUNNER,
    assert_draws,
    engine,
    examined,
    fewer,
    recorded_drafts,
    verified_cycles,
)
from tests.integration.vllm.test_distributions import PROMPTS, SAMPLINGS, drawn, exact
from tests.served_models import PROMPT, VOCAB, answers, ask, job

DRAWS, MASK = 5000, VOCAB - 1
CLAIM = SamplingParams(temperature=0.7, max_new_tokens=32, stop_token_ids=(VOCAB - 1,))


def qwen3(seed: int, layers: int, width: int = 32, heads: int = 1, sharp: float = 0.3) -> Policy:
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=width, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=heads, head_dim=32, max_position_embeddings=256, tie_word_embeddings=False,
        bos_token_id=None, eos_token_id=VOCAB - 1, pad_token_id=None, initializer_range=0.2,
        attn_implementation=ATTENTION,
    )  # fmt: skip
    backbone = Qwen3ForCausalLM(config).eval()
    backbone.config.architectures = ["Qwen3ForCausalLM"]
    with torch.no_grad():
        backbone.lm_head.weight.normal_(0, sharp)
    return Policy(backbone=backbone, tokenizer=letters(VOCAB), mtp=None, layout="mimo")


def with_block(target: Policy, block: int = 4) -> Policy:
    """The target with a random drafter of blocks that reads its first two layers."""
    torch.manual_seed(1)
    network = BlockDraftNetwork(
        hidden_size=32, intermediate_size=40, heads=1, kv_heads=1, head_dim=32, taps=(1, 0), block=block
    )
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
    target.parts["block"] = network.bfloat16().float().eval()
    return target


def of_a_model(root: Path, system: str) -> tuple[Policy, JobConfig, dict[str, Any]]:
    """A draft model of another width, depth and number of heads."""
    target = qwen3(0, 2)
    save_policy(target, root / "target")
    target.draft = qwen3(5, 3, width=64, heads=2)
    save_policy(target.draft, root / "draft")
    return target, job(root / "target", system, root / "draft"), {}


def of_blocks(root: Path, system: str) -> tuple[Policy, JobConfig, dict[str, Any]]:
    """A drafter of blocks of four, of which two drafts are asked for."""
    target = with_block(qwen3(0, 3))
    with torch.no_grad():
        target.backbone.lm_head.weight[MASK] = 0  # no greedy completion has it: vLLM would draft from MASK in its place
    save_policy(target, root / "target")
    export(target, target.parts["block"], root / "drafter", mask_token=MASK)
    return target, job(root / "target", system), {"draft": str(root / "drafter")}


def of_eagle3(root: Path, system: str) -> tuple[Policy, JobConfig, dict[str, Any]]:
    """An EAGLE-3 drafter over nine of the twelve tokens."""
    config = eagle3_job(*folders(root), system)
    return load_policy(config.model, needs=("eagle3",)), config, {}


Making = Callable[[Path, str], tuple[Policy, JobConfig, dict[str, Any]]]


def as_the_embedded(served: ServedEngine, own: Policy, decoding: DecodingConfig) -> None:
    """Greedy completions are the same, in the same cycles."""
    asked = [
        dataclasses.replace(request, token_ids=(*request.token_ids, request.id + 1))
        for request in ask(4, fewer(30, 20), temperature=0.0)
    ]
    found, wanted = answers(served, asked), answers(TorchEngine(own, decoding, slots=4, max_length=120), asked)
    assert [c.token_ids.tolist() for c in found] == [c.token_ids.tolist() for c in wanted]
    for a, b in zip(found, wanted, strict=True):
        assert a.stats.accepted.tolist() == b.stats.accepted.tolist(), "other drafts"
        # The embedded engine counts the first token's cycle, which vLLM's prefill is.
        assert abs(a.stats.cycles - b.stats.cycles) <= 1


def measured_as_the_embedded(served: ServedEngine, own: Policy, decoding: DecodingConfig, *, sampled: bool) -> None:
    """Requests of other temperatures and lengths beside one another: the embedded engine goes on from the same text."""
    params = [SamplingParams(max_new_tokens=20 + i, temperature=(1.0, 0.6)[i % 2]) for i in range(fewer(12, 6))]
    requests = [Request(id=i, token_ids=(*PROMPT, *range(i % 4)), params=p) for i, p in enumerate(params)]
    if sampled:
        with recorded_drafts() as drafts:
            seen = verified_cycles(served, requests)
        assert_draws(drafts, least=2 * len(seen))
    else:
        seen = verified_cycles(served, requests)
    # vLLM drafts a block from MASK in the place of a last token that is MASK's.
    seen = [one for one in seen if one[1][-1] != MASK]
    assert len(seen) > 5 * len(requests)
    again = [
        Request(
            id=i,
            token_ids=(*request.token_ids, *written),
            params=dataclasses.replace(request.params, max_new_tokens=1),
        )
        for i, (request, written, _) in enumerate(seen)
    ]
    embedded = answers(TorchEngine(own, decoding, slots=64, max_length=120), again)
    for (_, _, verified), one in zip(seen, embedded, strict=True):
        assert verified.weight == 1 and one.stats.reached[0] == 1
        for name in MEASURED:
            assert abs(verified.measured[name][0] - getattr(one.stats, name)[0]) < 1e-3, name


def follows_the_target(served: ServedEngine, folder: Path) -> None:
    """By many draws of three tokens; with the second runner, which is slow here, by a certificate of fewer tokens."""
    if RUNNER == "v2":
        found = examined(served, load_policy(ModelConfig(path=str(folder), device="cpu")), CLAIM)
        assert found.structure == () and found.log_e < math.log(1 / ALPHA)
        found.require_pass()
        return
    for sampling in ("cool", "top-p"):
        counts = drawn(served, PROMPTS[0], SAMPLINGS[sampling], DRAWS)
        assert p_value(counts, exact(folder, PROMPTS[0], SAMPLINGS[sampling])) > 1e-4, (folder, sampling)


@pytest.mark.parametrize(
    ("made", "system"),
    [
        (of_a_model, "draft_model"),
        (of_blocks, "block"),
        (of_blocks, "block_target_only"),
        (of_eagle3, "eagle3"),
        (of_eagle3, "eagle3_target_only"),
    ],
)
def test_completions_follow_the_target_with_old_and_new_weights(made: Making, system: str, tmp_path: Path) -> None:
    own, config, settings = made(tmp_path, system)
    sampled = not system.endswith("target_only")
    with engine(config, **settings) as served:
        stats = []
        for folder in (tmp_path / "target", tmp_path / "new"):
            if folder.name == "new":
                torch.manual_seed(7)
                with torch.no_grad():
                    for parameter in own.backbone.parameters():
                        parameter.mul_(1 + 0.3 * torch.randn_like(parameter))
                save_policy(own, folder)
                served.load_weights({name: weight.detach() for name, weight in own.weights().items()}, 1)
            as_the_embedded(served, own, config.decoding)
            measured_as_the_embedded(served, own, config.decoding, sampled=sampled)
            if RUNNER == "v1" or folder.name == "new":
                follows_the_target(served, folder)
            found = answers(served, ask(fewer(30, 4), fewer(40, 30)))
            stats.append(sum((c.stats for c in found[1:]), found[0].stats))
    for one in stats:
        assert 0 < one.accepted[0] < one.reached[0]
        assert (one.draft_entropy > 0).all() == sampled, "drafts are draws, or they are not"
        passes = 1 if system.startswith("block") else config.decoding.limit
        assert one.draft_forwards == passes * one.cycles
