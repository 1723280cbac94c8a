"""A target with an EAGLE-3 drafter in its public layout, for every engine that drafts with one."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from bebop.config.job import JobConfig, ModelConfig
from bebop.model.attention import ATTENTION
from bebop.model.backbone import Policy
from bebop.model.checkpoint import save_policy
from bebop.systems.eagle3.layout import write
from bebop.systems.eagle3.network import Eagle3Network, taps_of
from tests.builders import letters
from tests.served_models import VOCAB, job

DRAFTED = (0, 2, 3, 4, 5, 7, 8, 9, 10)  # tokens that can be drafted; 1, 6 and the last cannot
LAYERS = 8


def target(seed: int = 0, layers: int = LAYERS) -> Policy:
    """A random Qwen2 model of so many layers, without an MTP head."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=1,
        num_key_value_heads=1, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=VOCAB - 1, pad_token_id=None, initializer_range=0.2, attn_implementation=ATTENTION,
    )  # fmt: skip
    backbone = Qwen2ForCausalLM(config).eval()
    backbone.config.architectures = ["Qwen2ForCausalLM"]
    with torch.no_grad():
        backbone.lm_head.weight.normal_(0, 0.3)
    return Policy(backbone=backbone, tokenizer=letters(VOCAB), mtp=None, layout="mimo")


def drafter(tokens: tuple[int, ...] = DRAFTED, seed: int = 1, layers: int = LAYERS, **other: Any) -> Eagle3Network:
    """A random drafter for it; what programs could read otherwise is unusual."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        settings: dict[str, Any] = {
            "hidden_size": 32, "intermediate_size": 40, "heads": 2, "kv_heads": 1, "head_dim": 32,
            "vocab_size": VOCAB, "draft_vocab_size": len(tokens), "taps": taps_of(layers),
            "rope": {"rope_type": "default", "rope_theta": 3e4}, "max_positions": 256, "norm_eps": 1e-3,
        }  # fmt: skip
        network = Eagle3Network(**settings | other)
        for name, parameter in network.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3)
        network.choose(torch.tensor(tokens))
    return network.eval().requires_grad_(False)


def folders(root: Path, tokens: tuple[int, ...] = DRAFTED, **other: Any) -> tuple[Path, Path]:
    """Write both; return the folders of the target and of the drafter."""
    save_policy(target(), root / "target")
    write(drafter(tokens, **other), LAYERS, root / "drafter", torch.float32)
    return root / "target", root / "drafter"


def eagle3_job(model: Path, part: Path, system: str = "eagle3", drafts: int = 2) -> JobConfig:
    """Return a job that decodes with a drafter."""
    made = job(model, system)
    return dataclasses.replace(
        made,
        model=ModelConfig(path=str(model), device="cpu", parts={"eagle3": str(part)}),
        decoding=dataclasses.replace(made.decoding, draft_tokens=drafts),
    )
