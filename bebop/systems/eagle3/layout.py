"""Public layout of EAGLE-3 drafters, as vLLM and SGLang load them: ``LlamaForCausalLMEagle3``.

Weights have the network's own names. ``d2t`` holds the offset from a draft id to its token, ``t2d`` marks the tokens
with a draft id. Engines read the tapped layers from config.json in different ways:

- without an entry both engines read the input of layers 2, L/2 and L - 3;
- ``eagle_aux_hidden_state_layer_ids`` at the top counts the layers that were passed; only vLLM reads it;
- in ``eagle_config`` it names the layers whose output is read, as ``taps`` do, for SGLang. vLLM interprets these
  numbers as layers that were passed, unless the top has some. So a drafter with other layers is written with both.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from bebop.errors import UserError
from bebop.model.attention import ROPE_TYPES
from bebop.model.backbone import Policy
from bebop.systems.eagle3.network import Eagle3Network

ARCHITECTURE = "LlamaForCausalLMEagle3"
ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Settings that change what is computed, and the only values that this network has.
NEUTRAL = {
    "norm_before_fc": False,
    "fc_norm": False,
    "use_aux_norm": False,
    "norm_output": False,
    "logit_scale": 1.0,
    "num_hidden_layers": 1,
    "parallel_drafting": False,
    "hidden_act": "silu",
}
Settings = dict[str, Any]


class Eagle3Folder:
    """Drafter in a folder of the public layout, used like a part that ``bebop.adapt`` wrote."""

    @staticmethod
    def settings(folder: Path) -> Settings:
        """Return its config.json; raise ``UserError`` if it is no EAGLE-3 drafter, or computes something else."""
        return read_settings(folder)

    @staticmethod
    def load(folder: Path, policy: Policy) -> nn.Module:
        """Return the drafter in a folder; raise ``UserError`` if it does not fit the model."""
        target = policy.backbone.config
        found, name = read_settings(folder), f"model.parts.eagle3={str(folder)!r} is not possible"
        for key in ("hidden_size", "vocab_size"):
            if found[key] != getattr(target, key):
                raise UserError(
                    f"{name}: it is of a model with {key} {found[key]}, this one has {getattr(target, key)}"
                )
        weights = read_weights(folder)
        own = {
            "hidden_size": found["hidden_size"],
            "intermediate_size": found["intermediate_size"],
            "heads": found["num_attention_heads"],
            "kv_heads": found.get("num_key_value_heads") or found["num_attention_heads"],
            "head_dim": found.get("head_dim") or found["hidden_size"] // found["num_attention_heads"],
            "vocab_size": found["vocab_size"],
            "draft_vocab_size": found.get("draft_vocab_size") or found["vocab_size"],
            "taps": taps(found, target.num_hidden_layers),
            "rope": rope(found),
            "max_positions": target.max_position_embeddings,
            "norm_eps": found.get("rms_norm_eps", 1e-6),
            "own_embedding": "embed_tokens.weight" in weights,
            "norm_before_residual": bool(found.get("norm_before_residual", False)),
            "attention_bias": bool(found.get("attention_bias", False)),
        }
        network = Eagle3Network(**own)
        own_map = network.draft_vocab_size < network.vocab_size
        state = {} if own_map else {"d2t": network.d2t, "t2d": network.t2d}
        state |= {key: tensor for key, tensor in weights.items() if own_map or key not in ("d2t", "t2d")}
        if "t2d" not in state and "d2t" in state:
            state["t2d"] = _mask(state["d2t"], network.vocab_size)
        try:
            network.load_state_dict(state)
        except RuntimeError as error:
            raise UserError(f"{name}: {' '.join(str(error).split())[:200]}") from error
        _check_map(network, name)
        return network

    @staticmethod
    def write(part: nn.Module, layers: int, folder: Path, dtype: torch.dtype) -> None:
        """Write a drafter of a target with ``layers`` layers, its weights as ``dtype``."""
        assert isinstance(part, Eagle3Network)
        write(part, layers, folder, dtype)

    @staticmethod
    def weights(folder: Path) -> dict[str, Tensor]:
        """Return the tensors of a folder under the network's names; the integer tensors are the token maps."""
        return read_weights(folder)


def _mask(d2t: Tensor, vocab_size: int) -> Tensor:
    """Return a mask [V] of the tokens with a draft id."""
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[(d2t + torch.arange(len(d2t))).clamp(0, vocab_size - 1)] = True
    return mask


def _check_map(network: Eagle3Network, name: str) -> None:
    """Raise ``UserError`` unless draft ids map to distinct tokens of the model."""
    tokens = network.tokens
    if int(tokens.min()) < 0 or int(tokens.max()) >= network.vocab_size or len(tokens.unique()) < len(tokens):
        raise UserError(f"{name}: its d2t names a token twice, or one beyond 0..{network.vocab_size - 1}")


def read_settings(folder: Path) -> Settings:
    """Return a drafter's config.json; raise ``UserError`` if it is none, or needs features that the network lacks."""
    name = f"model.parts.eagle3={str(folder)!r} is not possible"
    try:
        found: Settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        whole = found["architectures"][0] in ARCHITECTURES and all(
            isinstance(found[key], int)
            for key in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        whole = False
    if not whole:
        raise UserError(f"{name}: give a .safetensors file of bebop.adapt, or a folder with a {ARCHITECTURE}")
    inner = found.get("eagle_config") or {}
    for key, value in NEUTRAL.items():
        given = inner.get(key, found.get(key))
        if given is not None and given != value:
            raise UserError(f"{name}: its config.json has {key}={given!r}, and only {value!r} is known")
    if found.get("target_hidden_size", found["hidden_size"]) != found["hidden_size"]:
        raise UserError(
            f"{name}: its states are {found['hidden_size']} wide, the target's {found['target_hidden_size']}"
        )
    if (kind := rope(found).get("rope_type", "default")) not in ROPE_TYPES:
        raise UserError(f"{name}: rope_type={kind!r}; {', '.join(ROPE_TYPES)} are possible")
    if (part := rope(found).get("partial_rotary_factor", 1.0)) != 1.0:
        raise UserError(f"{name}: partial_rotary_factor={part!r}, and only 1.0 is known")
    return found


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return a drafter's weights under the network's names; raise ``UserError`` if they cannot be read."""
    weights: dict[str, Tensor] = {}
    files = sorted(folder.glob("*.safetensors"))
    try:
        for file in files:
            weights |= load_file(file)
        if not files:
            for file in sorted(folder.glob("*.bin")):
                weights |= torch.load(file, map_location="cpu", weights_only=True)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise UserError(f"the weights in {folder} cannot be read: {error}") from error
    if not weights:
        raise UserError(f"model.parts.eagle3={str(folder)!r} is not possible: it holds no weights")
    renamed = {name.removeprefix("model.").replace("layers.0.", "midlayer."): t for name, t in weights.items()}
    if "t2d" in renamed:
        renamed["t2d"] = renamed["t2d"].bool()
    return renamed


def taps(found: Settings, layers: int) -> list[int]:
    """Return the layers whose output the drafter reads, from its settings and the number of the target's layers."""
    if passed := found.get(LAYER_IDS):
        return [int(number) - 1 for number in passed]
    if named := (found.get("eagle_config") or {}).get(LAYER_IDS):
        return [int(number) for number in named]
    return usual(layers)


def usual(layers: int) -> list[int]:
    """Return the layers whose output engines read if config.json names none."""
    return [1, layers // 2 - 1, layers - 4]


def rope(found: Settings) -> dict[str, Any]:
    """Return ``rope_parameters``, from settings with that name or the two older names."""
    if given := found.get("rope_parameters"):
        return dict(given)
    scaling = dict(found.get("rope_scaling") or {})
    kind = scaling.pop("type", "default")
    return {"rope_type": kind, "rope_theta": found.get("rope_theta", 10_000.0), **scaling}


# ---- writing


def export(policy: Policy, part: nn.Module, folder: Path, mask_token: int | None = None) -> str:
    """Write config.json and model.safetensors of ``part``; return a message about them.

    Args:
        policy: the target that the part was made for.
        part: the network; its weights are written in bfloat16, as trained parts are stored.
        folder: created if missing.
        mask_token: an option of other parts; it must be None.
    """
    assert isinstance(part, Eagle3Network)
    if mask_token is not None:
        raise UserError(f"--mask-token={mask_token} is not possible: an EAGLE-3 drafter has no MASK")
    write(part, policy.backbone.config.num_hidden_layers, folder, torch.bfloat16)
    share = f"{part.draft_vocab_size} of {part.vocab_size} tokens"
    text = f"{folder}: drafts from {share}, layers {list(part.taps)} of the target\n"
    if part.draft_vocab_size < part.vocab_size:
        text += (
            "SGLang verifies sampled drafts of a whole vocabulary alone: adapt with options.draft_vocab=null for it\n"
        )
    return text


def write(part: Eagle3Network, layers: int, folder: Path, dtype: torch.dtype) -> None:
    """Write a drafter of a target with ``layers`` layers, its weights as ``dtype``."""
    folder.mkdir(parents=True, exist_ok=True)
    own = part.config
    settings: Settings = {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": own.hidden_size,
        "intermediate_size": own.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": own.num_attention_heads,
        "num_key_value_heads": own.num_key_value_heads,
        "head_dim": own.head_dim,
        "hidden_act": "silu",
        "attention_bias": own.attention_bias,
        "rms_norm_eps": own.rms_norm_eps,
        "rope_parameters": dict(own.rope_parameters),
        "max_position_embeddings": own.max_position_embeddings,
        "vocab_size": part.vocab_size,
        "draft_vocab_size": part.draft_vocab_size,
        "norm_before_residual": part.norm_before_residual,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if list(part.taps) != usual(layers):
        settings |= {LAYER_IDS: [tap + 1 for tap in part.taps], "eagle_config": {LAYER_IDS: list(part.taps)}}
    weights = {name: t.detach().cpu() for name, t in part.state_dict().items()}
    weights = {name: t.to(dtype) if t.is_floating_point() else t for name, t in weights.items()}
    if part.draft_vocab_size == part.vocab_size:  # engines then use draft ids as tokens
        del weights["d2t"], weights["t2d"]
    save_file({name: t.contiguous() for name, t in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
