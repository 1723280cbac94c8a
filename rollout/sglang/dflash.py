"""Block drafts in SGLang: its algorithm DFLASH with a drafter that ``python -m bebop.export`` wrote.

This module needs no sglang. Drafts are greedy and verified with p(draft), by a kernel that exists for CUDA alone.
Elsewhere SGLang would accept a draft if it is the likeliest token, whatever the temperature. A server has one block
size for all of its requests.
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
    """Return the settings that a running server must report: names with allowed values."""
    exact = {name: (value,) for name, value in EXACT.items()}
    return {**exact, "speculative_num_draft_tokens": (decoding.limit + 1,)}


def refuse_drafter(decoding: DecodingConfig, own: SglangConfig, folder: Path) -> None:
    """Raise ``UserError`` for a missing drafter, one of other block size or another model, or an unsupported target.

    A target is unsupported if SGLang does not expose its layers.
    """
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
    """Return the target's weights with the drafter's MASK vector in its row of the embedding, as at the start."""
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
