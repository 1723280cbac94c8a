"""Initial weights of a fresh head: a copy of the backbone's last layer behind one of several input projections.

The last layer was trained on the output of the layer before it. The projection decides how much of that training the
head can still use. ``fitted`` solves for the closest projection by least squares over text. It takes one pass over some
ten thousand tokens and no training.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from bebop.model.attention import CausalContext
from bebop.model.backbone import Policy, tapped
from bebop.model.mtp import MTPHead, init_from_backbone
from bebop.trainer.chains import TokenRow

RIDGE = 1e-3  # relative to the mean square of the inputs; keeps directions that the text lacks at 0

Start = Callable[[Policy, Sequence[TokenRow]], None]


def last_layer(policy: Policy, rows: Sequence[TokenRow]) -> None:
    """Start as ``bebop.adapt`` does: half of the token's embedding plus half of the hidden state."""
    init_from_backbone(_head(policy), policy.backbone)


@torch.no_grad()
def passing(policy: Policy, rows: Sequence[TokenRow]) -> None:
    """Pass the hidden state through and ignore the token at first: the head begins as the target one token late."""
    last_layer(policy, rows)
    weight = _head(policy).project.weight
    size = len(weight)
    weight.zero_()
    weight[:, size:] = torch.eye(size)


@torch.no_grad()
def fitted(policy: Policy, rows: Sequence[TokenRow]) -> None:
    """Fit the projection by least squares to the last layer's input one token later."""
    last_layer(policy, rows)
    head = _head(policy)
    inputs, outputs = _pairs(policy, rows)
    head.project.weight.copy_(least_squares(inputs, outputs))


STARTS: Mapping[str, Start] = {"last": last_layer, "passing": passing, "fitted": fitted}


def least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return the matrix [d, e] that maps inputs [n, e] to outputs [n, d] with least squared error and a small ridge."""
    x, y = inputs.double(), outputs.double()
    square = x.T @ x
    square.diagonal().add_(RIDGE * float(square.diagonal().mean()))
    return torch.linalg.solve(square, x.T @ y).T.to(inputs.dtype)


def _pairs(policy: Policy, rows: Sequence[TokenRow]) -> tuple[Tensor, Tensor]:
    """Return the projection's inputs at position t [n, 2d] and the last layer's inputs at t + 1 [n, d].

    Both are divided by the root mean square of the latter, because the last layer's first norm removes this scale. The
    first two tokens of a text are left out: their states are many times as large as all others.
    """
    head, layers = _head(policy), policy.backbone.get_decoder().layers
    inputs, outputs = [], []
    with tapped(layers, (len(layers) - 2,)) as kept:
        for row in rows:
            ids = torch.tensor([row.token_ids], device=policy.device)
            hidden = policy.hidden(ids, torch.arange(ids.shape[1], device=ids.device)[None], CausalContext())[0]
            given = kept[len(layers) - 2][0, 2:]
            read = torch.cat([head.token_norm(policy.embed(ids[0, 2:])), head.hidden_norm(hidden[1:-1])], -1)
            scale = given.pow(2).mean(-1, keepdim=True).rsqrt()
            inputs.append(read * scale)
            outputs.append(given * scale)
    return torch.cat(inputs), torch.cat(outputs)


def _head(policy: Policy) -> MTPHead:
    assert policy.mtp is not None
    return policy.mtp
