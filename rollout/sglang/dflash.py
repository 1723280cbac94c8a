"""Block drafts in SGLang: its algorithm DFLASH on a drafter that ``python -m bebop.export`` wrote. No sglang needed.

Drafts are greedy and verified with p(draft), by a kernel that exists for CUDA alone: elsewhere SGLang would accept a
draft if it is the likeliest token, whatever the temperature. A server has one block size, for all of its requests.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from bebop.config.engines import SglangConfig
from bebop.config.job import DecodingConfig
from bebop.errors import UserError
from bebop.systems.block.dflash import TARGETS, read_mask, read_settings, refuse_other_target

EMBEDDING = "embed_tokens.weight"
EXACT = {"speculative_accept_threshold_single": 1.0, "speculative_accept_threshold_acc": 1.0}


def arguments(decoding: DecodingConfig, own: SglangConfig, folder: Path) -> dict[str, Any]:
    """Return the arguments of ``sglang.Engine`` for the target in ``folder``."""
    refuse_drafter(decoding, own, folder)
    return {
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": own.draft,
        "speculative_num_draft_tokens": decoding.limit + 1,
        **EXACT,
    }


def wanted(decoding: DecodingConfig) -> dict[str, tuple[Any, ...]]:
    """Return what a running server must say of itself: names, and the values that are right."""
    exact = {name: (value,) for name, value in EXACT.items()}
    return {**exact, "speculative_num_draft_tokens": (decoding.limit + 1,)}


def refuse_drafter(decoding: DecodingConfig, own: SglangConfig, folder: Path) -> None:
    """Raise ``UserError`` for a drafter that is not there, has other blocks or is another model's, and for a target
    whose layers SGLang does not hand out."""
    if own.draft is None:
        raise UserError(
            f"decoding.system={decoding.system} needs rollout.sglang.draft with SGLang: the folder that "
            "python -m bebop.export --out DIR writes"
        )
    name = f"rollout.sglang.draft={own.draft!r} is not possible"
    settings, target = read_settings(Path(own.draft)), json.loads((folder / "config.json").read_text())
    if (kind := target.get("model_type")) not in TARGETS:
        raise UserError(f"{name}: SGLang's DFLASH reads the layers of {', '.join(TARGETS)} models, this one is {kind}")
    refuse_other_target(settings, target, name)
    if (slots := settings["block_size"]) != decoding.limit + 1:
        raise UserError(
            f"decoding.draft_tokens={decoding.limit} is not possible with SGLang: the drafter's blocks have "
            f"{slots} slots, so decoding.draft_tokens={slots - 1}"
        )


def with_mask(weights: Mapping[str, Tensor], mask: tuple[int, Tensor]) -> dict[str, Tensor]:
    """Return the target's weights with the drafter's MASK in its row of the embedding, where it was at the start."""
    token, vector = mask
    changed = {}
    for name, tensor in weights.items():
        if name.endswith(EMBEDDING):
            tensor = tensor.detach().clone()
            tensor[token] = vector.to(tensor)
        changed[name] = tensor
    return changed


def mask_of(own: SglangConfig) -> tuple[int, Tensor] | None:
    """Return the id of MASK and its vector [d]; None without a drafter."""
    return None if own.draft is None else read_mask(Path(own.draft))
