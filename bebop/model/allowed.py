"""What a model may ask of attention and of positions: a list of what is known to be right, everything else is refused.

The contexts of ``bebop.model.attention`` compute plain causal attention over the whole text and nothing else. A model
that needs more would run, and give wrong numbers without a word: caps and windows are keyword arguments that can be
ignored, masks are not even made for attention functions that transformers does not know. ``bebop.model.parity`` then
holds the model against Hugging Face's own forward; here is refused what no short text would show.
"""

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from bebop.errors import UserError

# Keyword arguments of transformers' attention functions that change nothing, whatever they are ...
IGNORED = ("position_ids", "cache_position", "use_cache")
# ... and the only values that change nothing of others; None is one for all of them.
NEUTRAL = {"dropout": 0.0, "is_causal": True, "output_attentions": False}
# Frequencies that depend on nothing. Left out: dynamic and longrope, whose frequencies follow the longest text of a
# pass: a packed row would change with its neighbours, and a cached key would keep what is no longer true.
ROPE_TYPES = ("default", "linear", "llama3", "yarn", "proportional")
LAYER_TYPES = ("full_attention",)
# Settings with one of these in their name limit or change what attention sees, often far beyond a short text ...
REACH = re.compile(
    r"window|chunk|sink(?!horn)|alibi|softcap|cross_att|bidirectional|index(er)?_|kv_lora|kv_shared|is_encoder|local_att"
)
# ... except for these, which say what a window would be if a layer had one: layer_types and the calls decide.
NO_REACH = ("max_window_layers", "sliding_window_pattern", "_sliding_window_pattern", "chunk_size_feed_forward")


def refuse_call(module: nn.Module, mask: Tensor | None, settings: Mapping[str, Any]) -> None:
    """Raise ``UserError`` if a call of the attention function asks for anything but causal attention."""
    if mask is not None:
        settings = {**settings, "attention_mask": mask}
    if not getattr(module, "is_causal", True):
        settings = {**settings, "is_causal": False}
    for name, value in settings.items():
        neutral = value is None or name in IGNORED or (name in NEUTRAL and value == NEUTRAL[name])
        if not neutral:
            shown = " (a tensor)" if isinstance(value, Tensor) else f"={value}"
            raise UserError(f"the model's attention asks for {name}{shown}, which bebop's does not have")


def refuse_config(config: PreTrainedConfig, path: str) -> None:
    """Raise ``UserError`` if a model's settings name what bebop's attention does not have; reads no weights."""
    text = config.get_text_config()
    problem = _layer_type(text) or _rope_type(text) or _reach(text)
    if problem is not None:
        raise UserError(f"model.path={path!r}, a {config.model_type} model: {problem}")


def _layer_type(config: PreTrainedConfig) -> str | None:
    strange = sorted(set(getattr(config, "layer_types", None) or ()) - {*LAYER_TYPES})
    return f"layer_types {', '.join(strange)} is not possible: {', '.join(LAYER_TYPES)} is" if strange else None


def _rope_type(config: PreTrainedConfig) -> str | None:
    given = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    per_layer = [value for value in given.values() if isinstance(value, Mapping)]
    for rope in per_layer or [given]:
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind not in ROPE_TYPES:
            return f"rope_type={kind!r} is not possible: {', '.join(ROPE_TYPES)} are"
    return None


def _reach(config: PreTrainedConfig) -> str | None:
    settings = {name: value for name, value in config.to_dict().items() if REACH.search(name) and name not in NO_REACH}
    if settings.get("use_sliding_window") is False or getattr(config, "layer_types", None):
        settings.pop("sliding_window", None)  # of no layer, or of none by the list of layer types
    setting = next((f"{name}={value!r}" for name, value in settings.items() if value), None)
    return (
        f"{setting} is not possible: bebop's attention sees the whole text, each layer its own keys"
        if setting
        else None
    )
