"""Chains of drafts in text as Megatron's loops hand it on: tokens and a mask, side by side or packed end to end."""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from bebop.trainer.chains import ChainRows


def masked_rows(token_ids: Tensor, answer: Tensor, depth: int, most: int = 0, seed: int = 0) -> ChainRows:
    """Chains of right-padded rows [B, L] whose drafted tokens all lie where ``answer`` [B, L] holds.

    For a prompt and an answer these are the chains of ``chain_rows``; a hole (what a tool wrote) ends a chain.

    ``most``: at most as many anchors a row, drawn by ``seed``; 0 for all. Attention of later steps takes
    anchors times length numbers a head, which for 64 K tokens is too much for all anchors.
    """
    length = token_ids.shape[1]
    held = torch.nn.functional.pad(answer.bool(), (0, depth + 1))
    ahead = torch.stack([held[:, step + 1 : step + 1 + length] for step in range(1, depth + 1)], -1)
    steps = ahead.long().cumprod(-1).sum(-1)  # [B, L]
    rank = (steps > 0).double()
    if most:
        numbers = torch.Generator().manual_seed(seed)  # on the CPU: ranks that share rows must draw the same
        rank = rank * (1 + torch.rand(rank.shape, generator=numbers).to(rank.device))
    count = max(1, int((steps > 0).sum(1).max()))
    count = min(count, most) if most else count
    anchors = rank.sort(stable=True, dim=1, descending=True).indices[:, :count].sort(1).values
    return ChainRows(
        token_ids=token_ids,
        lengths=torch.full((len(token_ids),), length, device=token_ids.device),
        anchors=anchors,
        steps=steps.gather(1, anchors),
    )


def side_by_side(packed: Tensor, starts: Tensor) -> Tensor:
    """Rows laid end to end [T, ...] that begin at ``starts`` [B + 1] (the last is their end) -> [B, L, ...]."""
    bounds = starts.tolist()
    return pad_sequence([packed[a:b] for a, b in pairwise(bounds)], batch_first=True)
