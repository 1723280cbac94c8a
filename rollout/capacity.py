"""Checks whether requests of a length fit a model and a device, before anything of that size is allocated."""

from typing import Any

import torch

from bebop.errors import UserError
from bebop.model.memory import bytes_per_token, memory_of


def check_positions(settings: Any, length: int, name: str = "rollout.max_length", of: str = "the model") -> None:
    """Raise ``UserError`` unless a model (its Hugging Face configuration) has positions for ``length`` tokens."""
    limit = getattr(settings.get_text_config(), "max_position_embeddings", None)
    if limit is not None and length > limit:
        raise UserError(f"{name}={length} is not possible: {of} has {limit} positions")


GRAPHS = 4  # tensors of the size of a cycle's logits in fp32 that are there at once: logits, p, q and a residual


def bytes_of_graphs(slots: int, drafts: int, vocabulary: int, device: torch.device) -> int:
    """Return an estimate of the bytes in the pool of CUDA graphs; 0 on other devices.

    It counts the widest cycle's numbers over the vocabulary [S, K + 1, V]. All graphs share the pool and one runs at a
    time, so narrower ones add little. Not measured on a GPU yet; the log gives the real size of the pool.
    """
    return GRAPHS * slots * (drafts + 1) * vocabulary * 4 if device.type == "cuda" else 0


def check_memory(
    settings: Any,
    slots: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device,
    section: str = "rollout",
    tokens: int | None = None,
    more: int = 0,
    draft: Any = None,
) -> None:
    """Raise ``UserError`` if keys and values of ``slots`` requests of ``length`` tokens exceed the device's memory.

    Args:
        settings: the model's Hugging Face configuration.
        slots: requests at a time.
        length: tokens of each.
        dtype: of keys and values.
        device: that holds them; its whole memory counts.
        section: name of the settings that the numbers come from.
        tokens: tokens in the pages of the cache, where these are fewer than all requests need.
        more: bytes of CUDA graphs beside them.
        draft: the configuration of a draft model with as many entries.
    """
    token = bytes_per_token(settings, dtype) + (0 if draft is None else bytes_per_token(draft, dtype))
    if tokens is not None and tokens < slots * length:
        taken, there = tokens * token + more, memory_of(device)
        if taken > there:
            beside = f" with {more / 1e9:.0f} GB of CUDA graphs" if more else ""
            raise UserError(
                f"rollout.torch.cache_tokens={tokens} is not possible: keys and values{beside} take "
                f"{taken / 1e9:.0f} GB, {device} has {there / 1e9:.0f} GB"
            )
        return
    wanted, there = slots * length * token + more, memory_of(device)
    if wanted > there:
        beside = f" with {more / 1e9:.0f} GB of CUDA graphs" if more else ""
        sizes = f"keys and values of {slots} times {length} tokens{beside} take {wanted / 1e9:.0f} GB"
        raise UserError(
            f"{section}.slots={slots} with {section}.max_length={length} is not possible: {sizes}, {device} has "
            f"{there / 1e9:.0f} GB; lower one of them"
        )


def check_pool(tokens: int | None, length: int, paged: bool) -> None:
    """Raise ``UserError`` unless pages for ``tokens`` exist and hold a request of ``length`` tokens."""
    if tokens is None:
        return
    if not paged:
        raise UserError(
            f"rollout.torch.cache_tokens={tokens} is not possible: the cache has no pages; give "
            "rollout.torch.paged_cache=true"
        )
    if tokens < length:
        raise UserError(
            f"rollout.torch.cache_tokens={tokens} is not possible: give rollout.max_length={length} or more, so that "
            "every request fits"
        )


def check_parked(limit: int, device: torch.device) -> None:
    """Raise ``UserError`` if the limit for parked caches exceeds the device's whole memory."""
    if limit > (there := memory_of(device)):
        raise UserError(f"rollout.parked_bytes={limit} is not possible: {device} has {there} bytes")
