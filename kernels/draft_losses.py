"""Draft losses, one table row each; every implementation reads them (eager, compiled, Triton, split vocabulary).

A loss compares a draft distribution q with a target distribution p, row by row. Two things determine it: its value and
its gradient into the draft's logits. The value of a row depends on the overlap alpha = sum min(p, q), a divergence D
and the target's entropy H(p). The gradient is the same sum of two parts for all losses, with coefficients per row
(times the temperature):

    tv * q (S - 1[q <= p])  +  own * (gradient of D),    S = the sum of q over the tokens with q <= p

=========  ===============================  ==================================================
kind       loss                             T * gradient
=========  ===============================  ==================================================
tv         1 - alpha                        q (S - 1[q <= p])
ce         H(p) + KL(p||q)                  q - p
hard_ce    -log q[label]                    q - 1[token = label]
kl         KL(p||q)                         q - p
rkl        KL(q||p)                         q (log q - log p - KL(q||p))
jsd        (KL(p||m) + KL(q||m)) / 2        q (log q - log m - KL(q||m)) / 2; m = (p + q) / 2
nla        -log alpha                       that of tv / alpha
hybrid     w KL(p||q) + (1 - w) (1 - alpha) w (q - p) + (1 - w) that of tv; w = exp(-eta alpha), held fixed
=========  ===============================  ==================================================

tv, nla and hybrid: SPEC 1.2; jsd: Lin, "Divergence measures based on the Shannon entropy", 1991.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop.errors import UserError

# q, log q, p, log p, and where the label is; all [R, V] of a part of the vocabulary. The last is None without labels.
Terms = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor]
# As ``Terms``, followed by the row's divergence and its second sum [R, 1].
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor], Tensor]
Coefficient = Callable[[Tensor, Tensor | float], Tensor]  # alpha [R], eta -> [R]


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """A sum over the vocabulary and its gradient into the draft's logits, times the temperature."""

    terms: Terms  # [R, V], summed to D [R]
    gradient: Gradient  # [R, V]
    second: Terms | None = None  # a second sum that the gradient, or the caller, needs
    labels: bool = False  # whether it looks at one token of the data; the second sum is then log p of it
    bounded: bool = True  # whether it stays finite where p = 0 < q, as in a truncated target


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLoss:
    """A draft loss: ``value`` is a function of (alpha, D, H(p), eta), all [R].

    ``tv`` and ``own`` are the coefficients of the gradients of TV and of the divergence.
    """

    value: Callable[[Tensor, Tensor, Tensor, Tensor | float], Tensor]
    divergence: Divergence | None = None
    tv: Coefficient | None = None  # None: 0
    own: Coefficient | None = None  # None: 0


def one(alpha: Tensor, eta: Tensor | float) -> Tensor:
    """Return the coefficient 1 for each row [R]; ``gradient`` skips the multiplication by it."""
    return torch.ones_like(alpha)


def inverse(alpha: Tensor, eta: Tensor | float) -> Tensor:
    """Return 1 / alpha; 0 where no token is shared, or so little that the inverse would overflow."""
    return torch.where(alpha > torch.finfo(alpha.dtype).tiny, 1 / alpha, 0)


def fading(alpha: Tensor, eta: Tensor | float) -> Tensor:
    """Return the weight of the divergence in ``hybrid``: it fades as the overlap grows."""
    return (-eta * alpha).exp()


def masked(where: Tensor | None, values: Tensor) -> Tensor:
    """Return ``values`` [R, V] at the label and 0 elsewhere."""
    assert where is not None, "this loss needs labels"
    return torch.where(where, values, 0)


def middle(q: Tensor, p: Tensor) -> Tensor:
    """Return log m of the mixture m = (p + q) / 2; -inf where it has no mass."""
    return (p + q).log() - math.log(2)  # half of the smallest number would be 0


KL = Divergence(
    terms=lambda q, q_log, p, p_log, hit: torch.where(p > 0, p * (p_log - q_log), 0),
    gradient=lambda q, q_log, p, p_log, hit, total, second: q - p,
)
REVERSE_KL = Divergence(
    terms=lambda q, q_log, p, p_log, hit: torch.where(q > 0, q * (q_log - p_log), 0),
    gradient=lambda q, q_log, p, p_log, hit, total, second: torch.where(q > 0, q * (q_log - p_log - total), 0),
    bounded=False,
)
LABEL = Divergence(
    terms=lambda q, q_log, p, p_log, hit: -masked(hit, q_log),
    second=lambda q, q_log, p, p_log, hit: masked(hit, p_log),
    gradient=lambda q, q_log, p, p_log, hit, total, second: q - masked(hit, torch.ones_like(q)),
    labels=True,
)
JENSEN_SHANNON = Divergence(
    terms=lambda q, q_log, p, p_log, hit: (
        (torch.where(p > 0, p * (p_log - middle(q, p)), 0) + torch.where(q > 0, q * (q_log - middle(q, p)), 0)) / 2
    ),
    second=lambda q, q_log, p, p_log, hit: torch.where(q > 0, q * (q_log - middle(q, p)), 0),
    gradient=lambda q, q_log, p, p_log, hit, total, second: (
        torch.where(q > 0, q * (q_log - middle(q, p) - second), 0) / 2
    ),
)

LOSSES = {
    "tv": DraftLoss(value=lambda alpha, d, h, eta: 1 - alpha, tv=one),
    "ce": DraftLoss(divergence=KL, value=lambda alpha, d, h, eta: d + h, own=one),
    "hard_ce": DraftLoss(divergence=LABEL, value=lambda alpha, d, h, eta: d, own=one),
    "kl": DraftLoss(divergence=KL, value=lambda alpha, d, h, eta: d, own=one),
    "rkl": DraftLoss(divergence=REVERSE_KL, value=lambda alpha, d, h, eta: d, own=one),
    "jsd": DraftLoss(divergence=JENSEN_SHANNON, value=lambda alpha, d, h, eta: d, own=one),
    "nla": DraftLoss(value=lambda alpha, d, h, eta: -alpha.log(), tv=inverse),
    "hybrid": DraftLoss(
        divergence=KL,
        value=lambda alpha, d, h, eta: fading(alpha, eta) * d + (1 - fading(alpha, eta)) * (1 - alpha),
        tv=lambda alpha, eta: 1 - fading(alpha, eta),
        own=fading,
    ),
}


def loss_named(kind: str) -> DraftLoss:
    """Return the entry of ``LOSSES`` with this name; raise ``UserError`` that lists the names if there is none."""
    if kind not in LOSSES:
        raise UserError(f"unknown kind of draft loss {kind!r}; known are {', '.join(LOSSES)}")
    return LOSSES[kind]


def needs_labels(kind: str) -> bool:
    """Return whether a loss needs the label of each row, one token of the data."""
    divergence = LOSSES[kind].divergence
    return divergence is not None and divergence.labels


def gradient(loss: DraftLoss, tv: Tensor | None, own: Tensor | None, alpha: Tensor, eta: Tensor | float) -> Tensor:
    """Return T * d loss / d logits [R, V] from the parts [R, V] that the loss has; alpha is [R]."""
    parts = []
    for coefficient, part in ((loss.own, own), (loss.tv, tv)):
        if coefficient is not None:
            assert part is not None
            parts.append(part if coefficient is one else coefficient(alpha, eta)[:, None] * part)
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]
