"""The backbone's hidden states of some text: as the backbone is frozen they are computed once, where they fit."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy
from bebop.trainer.chains import TokenRow, chain_rows


@torch.no_grad()
def backbone_states(policy: Policy, rows: Sequence[TokenRow], batch: int = 32) -> list[Tensor]:
    """Final, normed hidden states [L, d] of each row; rows of like length are computed together."""
    states: dict[int, Tensor] = {}
    order = sorted(range(len(rows)), key=lambda i: len(rows[i].token_ids))
    for start in range(0, len(order), batch):
        part = order[start : start + batch]
        ids = chain_rows([rows[i] for i in part], 1, policy.device).token_ids
        hidden = policy.hidden(ids, torch.arange(ids.shape[1], device=ids.device).expand_as(ids), CausalContext())
        states |= {i: hidden[place, : len(rows[i].token_ids)].clone() for place, i in enumerate(part)}
    return [states[i] for i in range(len(rows))]


def size_of_states(policy: Policy, rows: Sequence[TokenRow]) -> int:
    """Bytes that ``backbone_states`` would take."""
    tokens = sum(len(row.token_ids) for row in rows)
    return tokens * int(policy.backbone.config.hidden_size) * policy.backbone.dtype.itemsize
