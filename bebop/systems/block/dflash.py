"""Block drafter in the layout of DFlash, as SGLang 0.5.23 loads it (``sglang/srt/models/dflash.py``, its worker).

vLLM 0.32 loads the same files, and keeps MASK apart from the target's embedding.

The network is the same: Qwen3 layers, ``fc`` and ``hidden_norm`` before the keys and values of the text, the newest
token in slot 0, positions that continue those of the text, no order within a block. Weights have our names.
Differences:

- ``target_layer_ids`` count layers whose output is read, as ``taps`` do. SGLang captures the *input* of a layer and
  adds the one itself, so it never sees the output of the last. Whatever the order there, ``fc`` receives the lowest
  layer first: its columns are written in that order.
- MASK is a parameter here and a row of the target's embedding there: SGLang writes the vector of ``mask_embedding.pt``
  into that row as it starts. The row must be of a token that no text has, and no row of the output matrix.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from bebop.errors import UserError
from bebop.model.backbone import Policy
from bebop.systems.block.network import BlockDraftNetwork

ARCHITECTURE = "DFlashDraftModel"
MASK_FILE = "mask_embedding.pt"
# Model types whose class in SGLang 0.5.23 has set_dflash_layers_to_capture; qwen2 and its derivatives lack it.
TARGETS = ("llama", "qwen3", "qwen3_moe")


def export(policy: Policy, part: nn.Module, folder: Path, mask_token: int | None = None) -> str:
    """Write config.json, model.safetensors and mask_embedding.pt of ``part``, and return a message about them.

    Args:
        policy: the target that the part was made for.
        part: the network; its weights are written in bfloat16, as trained parts are stored.
        folder: created if missing.
        mask_token: the id whose row of the embedding becomes MASK; None: the first id that is no token of the
        tokenizer.
    """
    assert isinstance(part, BlockDraftNetwork)
    refuse_target(policy, part)
    target = policy.backbone.config
    token = free_token(policy.tokenizer, target.vocab_size) if mask_token is None else mask_token
    if not 0 <= token < target.vocab_size:
        raise UserError(f"--mask-token={token} is not possible: the model has tokens 0..{target.vocab_size - 1}")
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to("cpu", torch.bfloat16) for name, tensor in part.state_dict().items()}
    mask = weights.pop("mask").clone()
    weights["fc.weight"] = lowest_first(weights["fc.weight"], part.taps)
    save_file({name: t.contiguous() for name, t in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    torch.save({"embedding": mask, "mask_token_id": token}, folder / MASK_FILE)
    (folder / "config.json").write_text(json.dumps(settings(part, target, token), indent=2) + "\n", encoding="utf-8")
    text = f"{folder}: blocks of {part.block}, layers {sorted(part.taps)} of the target, MASK is token {token}\n"
    if target.model_type not in TARGETS:
        text += f"SGLang 0.5.23 has DFLASH for {', '.join(TARGETS)} models; for {target.model_type} it will not start\n"
    return text


def settings(part: BlockDraftNetwork, target: PreTrainedConfig, mask_token: int) -> dict[str, Any]:
    """Return the config.json of a drafter; positions and vocabulary are the target's."""
    own = part.config
    return {
        "architectures": [ARCHITECTURE],
        "model_type": own.model_type,
        "dtype": "bfloat16",
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_hidden_layers": own.num_hidden_layers,
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.num_key_value_heads,
        "head_dim": own.head_dim,
        "hidden_act": own.hidden_act,
        "attention_bias": own.attention_bias,
        "rms_norm_eps": own.rms_norm_eps,
        "rope_parameters": dict(own.rope_parameters),
        "max_position_embeddings": target.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": False,
        "num_target_layers": target.num_hidden_layers,
        "block_size": part.block,
        "dflash_config": {"target_layer_ids": sorted(part.taps), "mask_token_id": mask_token},
    }


def lowest_first(fc: Tensor, taps: Sequence[int]) -> Tensor:
    """Return the weight [d, T d] of ``fc`` with its columns, which follow ``taps``, sorted by layer."""
    columns = fc.chunk(len(taps), 1)
    return torch.cat([columns[i] for i in sorted(range(len(taps)), key=lambda i: taps[i])], 1)


def refuse_target(policy: Policy, part: BlockDraftNetwork) -> None:
    """Raise ``UserError`` for a target that SGLang would decode differently."""
    last = policy.backbone.config.num_hidden_layers - 1
    if max(part.taps) >= last:
        raise UserError(
            f"the drafter reads layer {max(part.taps)}, and SGLang's DFLASH sees the output of layers 0..{last - 1}"
        )
    if policy.backbone.get_output_embeddings().weight is policy.backbone.get_input_embeddings().weight:
        raise UserError(
            "the model's output matrix is its embedding, into which SGLang writes the drafter's MASK: its completions "
            "would change; DFLASH needs a model with an output matrix of its own"
        )


def free_token(tokenizer: PreTrainedTokenizerBase, rows: int) -> int:
    """Return the first of ``rows`` ids that is no token; raise ``UserError`` if all are tokens."""
    taken = set(tokenizer.get_vocab().values())
    free = next((token for token in range(rows) if token not in taken), None)
    if free is None:
        raise UserError(f"each of the model's {rows} ids is a token: name one that no text has with --mask-token")
    return free


def read_settings(folder: Path) -> dict[str, Any]:
    """Return the config.json of an exported drafter; raise ``UserError`` if it is none."""
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        whole = found["architectures"] == [ARCHITECTURE] and {"target_layer_ids", "mask_token_id"} <= {
            *found["dflash_config"]
        }
    except (OSError, ValueError, KeyError, TypeError):
        whole = False
    if not whole:
        raise UserError(f"{str(folder)!r} is not a drafter that python -m bebop.export wrote")
    return found


def refuse_other_target(settings: Mapping[str, Any], target: Mapping[str, Any], name: str) -> None:
    """Raise ``UserError`` unless an exported drafter's settings match the target, by the config.json of both.

    ``name`` starts the message.
    """
    pairs = {"hidden_size": "hidden_size", "vocab_size": "vocab_size", "num_target_layers": "num_hidden_layers"}
    for theirs, ours in pairs.items():
        if settings[theirs] != target.get(ours):
            raise UserError(f"{name}: it is of a model with {ours} {settings[theirs]}, this one has {target.get(ours)}")


def read_mask(folder: Path) -> tuple[int, Tensor]:
    """Return the id of MASK and its vector [d]."""
    stored = torch.load(folder / MASK_FILE, map_location="cpu", weights_only=True)
    return int(stored["mask_token_id"]), stored["embedding"]
