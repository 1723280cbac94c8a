"""Names of MTP weights in families of checkpoints, and the map to and from ``MTPHead``.

====================  ==========================================  =====================
layout                keys                                        projection reads
====================  ==========================================  =====================
``mimo``              ``model.mtp_layers.0.*``                    hidden, then embedding
``qwen3_next``        ``mtp.*`` (Qwen3-Next, Qwen3.5)             embedding, then hidden
``deepseek``          ``model.layers.L.*`` (DeepSeek-V3, GLM)     embedding, then hidden
====================  ==========================================  =====================

(Orders as in SGLang's ``mimo_mtp.py``, ``qwen3_next_mtp.py`` and ``deepseek_nextn.py``.) In memory the order is always
embedding, then hidden.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.errors import UserError

STACKED = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)")
SINGLE = re.compile(r"(.*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Names of MTP weights in a family of checkpoints; ``{L}`` is the number of backbone layers."""

    prefix: str
    names: dict[str, str]  # name in MTPHead -> name after the prefix, for all but the decoder layer
    layer: str  # prefix of the decoder layer's own names
    hidden_first: bool  # whether the projection reads the hidden state before the embedding
    zero_first: bool  # whether the embedding at position 0 is served as zero


LAYOUTS: dict[str, Layout] = {
    "mimo": Layout(
        prefix="model.mtp_layers.0.",
        names={
            "token_norm": "token_layernorm",
            "hidden_norm": "hidden_layernorm",
            "project": "input_proj",
            "final_norm": "final_layernorm",
        },
        layer="",
        hidden_first=True,
        zero_first=True,
    ),
    "qwen3_next": Layout(
        prefix="mtp.",
        names={
            "token_norm": "pre_fc_norm_embedding",
            "hidden_norm": "pre_fc_norm_hidden",
            "project": "fc",
            "final_norm": "norm",
        },
        layer="layers.0.",
        hidden_first=False,
        zero_first=False,
    ),
    "deepseek": Layout(
        prefix="model.layers.{L}.",
        names={"token_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "final_norm": "shared_head.norm"},
        layer="",
        hidden_first=False,
        zero_first=True,
    ),
}

# The layout of a fresh head by the kind of model: the one in which servers look for the family's head. Others: mimo.
FRESH = {
    "qwen3_next": "qwen3_next", "qwen3_5_text": "qwen3_next", "qwen3_5_moe_text": "qwen3_next",
    "deepseek_v3": "deepseek", "glm4_moe": "deepseek",
}  # fmt: skip
# Copies of the backbone's embedding and language-model head, which DeepSeek's MTP layers hold.
TABLES = ("embed_tokens.weight", "shared_head.head.weight")


def to_layout(head: dict[str, Tensor], layout: Layout, layers: int, stored: Collection[str] = ()) -> dict[str, Tensor]:
    """Return the weights of an ``MTPHead`` under the names (and in the column order) of a layout.

    Experts are separate weights, except for names in ``stored``: the names of the checkpoint that the head came from.
    """
    named = _renamed(head, layout, layers)
    stacked = {name: tensor for name, tensor in named.items() if name in stored}
    return stacked | split_experts({name: tensor for name, tensor in named.items() if name not in stacked})


def _renamed(head: dict[str, Tensor], layout: Layout, layers: int) -> dict[str, Tensor]:
    prefix = layout.prefix.format(L=layers)
    out = {}
    for name, tensor in head.items():
        part, rest = name.split(".", 1)
        if part == "layer":
            out[prefix + layout.layer + rest] = tensor
            continue
        if part == "project" and layout.hidden_first:
            tensor = _swap_halves(tensor)
        out[f"{prefix}{layout.names[part]}.{rest}"] = tensor
    return out


def from_layout(given: dict[str, Tensor], layout: Layout, layers: int, wanted: list[str]) -> dict[str, Tensor]:
    """Return the inverse of ``to_layout`` for the names in ``wanted``; raise ``UserError`` for a missing weight."""
    names = _renamed({name: torch.empty(2, 2) for name in wanted}, layout, layers)
    given, head = join_experts(given), {}
    for own, theirs in zip(wanted, names, strict=True):
        if theirs not in given:
            raise UserError(f"the checkpoint's MTP layer lacks {theirs}; there are {', '.join(sorted(given)[:4])}, ...")
        tensor = given[theirs]
        head[own] = _swap_halves(tensor) if own.startswith("project.") and layout.hidden_first else tensor
    return head


def _swap_halves(weight: Tensor) -> Tensor:
    first, second = weight.chunk(2, dim=1)
    return torch.cat([second, first], 1)


# ---- experts: transformers stacks them in two tensors a layer, most checkpoints hold three matrices per expert


def split_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split stacked ``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I] into the experts' matrices.

    All other weights are unchanged.
    """
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        parsed = STACKED.fullmatch(name)
        if parsed is None:
            out[name] = tensor
            continue
        place, kind = parsed.groups()
        for expert, matrix in enumerate(tensor):
            parts = {"down_proj": matrix} if kind == "down_proj" else dict(
                zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            )  # fmt: skip
            out |= {f"{place}.{expert}.{part}.weight": piece for part, piece in parts.items()}
    return out


def join_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the inverse of ``split_experts``."""
    out: dict[str, Tensor] = {}
    single: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in state.items():
        parsed = SINGLE.fullmatch(name)
        if parsed is None:
            out[name] = tensor
        else:
            single[parsed[1], parsed[3]][int(parsed[2])] = tensor
    for (place, kind), matrices in single.items():
        numbers = sorted(matrices)
        if kind == "down_proj":
            out[f"{place}.down_proj"] = torch.stack([matrices[e] for e in numbers])
        elif kind == "gate_proj":
            ups = single[place, "up_proj"]
            out[f"{place}.gate_up_proj"] = torch.stack([torch.cat([matrices[e], ups[e]]) for e in numbers])
    return out
