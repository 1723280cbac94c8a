"""Experts: transformers stacks them in two tensors a layer, most checkpoints hold three matrices for each."""

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

STACKED = re.compile(r"(.*\bexperts)\.(gate_up_proj|down_proj)")
SINGLE = re.compile(r"(.*\bexperts)\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight")


def split_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stacked ``gate_up_proj`` [E, 2I, H] and ``down_proj`` [E, H, I] as matrices of each expert; the rest as it is."""
    out: dict[str, Tensor] = {}
    for name, tensor in state.items():
        match = STACKED.fullmatch(name)
        if match is None:
            out[name] = tensor
            continue
        place, kind = match.groups()
        for expert, matrix in enumerate(tensor):
            parts = {"down_proj": matrix} if kind == "down_proj" else dict(
                zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True)
            )  # fmt: skip
            out |= {f"{place}.{expert}.{part}.weight": piece for part, piece in parts.items()}
    return out


def join_experts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of ``split_experts``."""
    out: dict[str, Tensor] = {}
    single: dict[tuple[str, str], dict[int, Tensor]] = defaultdict(dict)
    for name, tensor in state.items():
        match = SINGLE.fullmatch(name)
        if match is None:
            out[name] = tensor
        else:
            single[match[1], match[3]][int(match[2])] = tensor
    for (place, kind), matrices in single.items():
        numbers = sorted(matrices)
        if kind == "down_proj":
            out[f"{place}.down_proj"] = torch.stack([matrices[e] for e in numbers])
        elif kind == "gate_proj":
            ups = single[place, "up_proj"]
            out[f"{place}.gate_up_proj"] = torch.stack([torch.cat([matrices[e], ups[e]]) for e in numbers])
    return out
