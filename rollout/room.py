"""Whether requests of a length fit a model and a device: asked before anything of that size is allocated."""

import os
from typing import Any

import torch

from bebop.errors import UserError


def check_positions(settings: Any, length: int, name: str = "rollout.max_length") -> None:
    """``UserError`` unless a model (its Hugging Face configuration) has positions for ``length`` tokens."""
    limit = getattr(settings.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise UserError(f"{name}={length} is not possible: the model has {limit} positions")


def check_memory(
    settings: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device, section: str = "rollout"
) -> None:
    """``UserError`` if keys and values of ``slots`` requests of ``length`` tokens exceed the device's whole memory.

    ``section``: of the settings that the numbers come from.
    """
    wanted, there = slots * length * bytes_per_token(settings, dtype), memory_of(device)
    if wanted > there:
        sizes = f"keys and values of {slots} times {length} tokens take {wanted / 1e9:.0f} GB"
        raise UserError(
            f"{section}.slots={slots} with {section}.max_length={length} is not possible: {sizes}, {device} has "
            f"{there / 1e9:.0f} GB; lower one of them"
        )


def check_parked(limit: int, device: torch.device) -> None:
    """``UserError`` if what may be parked exceeds the device's whole memory."""
    if limit > (there := memory_of(device)):
        raise UserError(f"rollout.parked_bytes={limit} is not possible: {device} has {there} bytes")


def bytes_per_token(settings: Any, dtype: torch.dtype) -> int:
    """Of the keys and values of all layers."""
    text = settings.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return int(2 * text.num_hidden_layers * heads * width * dtype.itemsize)


def memory_of(device: torch.device) -> int:
    """All memory of a device, used or not, in bytes."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
