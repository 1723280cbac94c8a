"""The loss of a chain of drafts, from what each of its steps gives: the product of acceptances, and its unbiased form.

Steps are [N, K]: K steps of N anchors. Those from an anchor's first masked step on do not count, whatever they hold.
"""

import torch
from torch import Tensor


def counted(mask: Tensor) -> Tensor:
    """The steps [N, K] before the first masked one."""
    return mask.bool().cumprod(-1).bool()


def product_loss(loss: Tensor, alpha: Tensor, valid: Tensor) -> Tensor:
    """1 - sum_j alpha_1 ... alpha_j / K_eff (SPEC Eq. 13), averaged over anchors; all [N, K], 0 where not ``valid``.

    ``loss`` are the TV losses 1 - alpha, which carry the gradient.
    """
    value = _mean(alpha.cumprod(-1).sum(-1), valid)  # alpha is 0 from the first masked step on, and so is the product
    # The value is that of the formula, the gradient that of the weighted TV losses: the bracket is 0.
    return value + (e2e_weights(alpha, valid) * (loss - loss.detach())).sum() / _anchors(valid)


def corrected_loss(loss: Tensor, draft_log: Tensor, target_log: Tensor, valid: Tensor) -> Tensor:
    """The unbiased form for data y ~ p (SPEC 1.3).

    Step j counts alpha_j times the product of min(1, q(y) / p(y)) over the steps before it. ``draft_log`` and
    ``target_log`` are the logarithms of q(y) and p(y) [N, K]; gradients flow through ``loss``, the TV losses, and
    ``draft_log``.
    """
    # Clamped before the exponential: the derivative of a ratio above 1 is 0. p(y) = 0 cannot be data: it counts as 1.
    known = valid & (target_log > -torch.inf)
    ratio = torch.where(known, draft_log - target_log, 0).clamp_max(0).exp()
    return _mean((_before(ratio) * (1 - loss) * valid).sum(-1), valid)


def e2e_weights(alpha: Tensor, mask: Tensor) -> Tensor:
    """w_k [N, K] of SPEC Eq. 13: minus the derivative of an anchor's loss by alpha_k; it scales step k's TV gradient.

    w_k = P R_k / K_eff, with P the product of alpha before k and R_k = 1 + alpha_(k+1) R_(k+1): no division by an
    alpha, which may be 0. Steps from the first masked one on have weight 0. alpha and mask are [N, K].
    """
    valid = counted(mask)
    alpha = torch.where(valid, alpha, 0)
    rest = torch.ones_like(alpha)
    for k in range(alpha.shape[-1] - 2, -1, -1):
        rest[:, k] = 1 + alpha[:, k + 1] * rest[:, k + 1]
    return _before(alpha) * rest * valid / valid.sum(-1, keepdim=True).clamp_min(1)


def _before(factors: Tensor) -> Tensor:
    """Products [N, K] of the factors before each step; 1 at the first."""
    return torch.cat((torch.ones_like(factors[:, :1]), factors[:, :-1]), -1).cumprod(-1)


def _anchors(valid: Tensor) -> Tensor:
    """Anchors that have a step, at least 1."""
    return valid.any(-1).sum().clamp_min(1)


def _mean(accepted: Tensor, valid: Tensor) -> Tensor:
    """1 - accepted / K_eff, averaged over the anchors that have a step; 0 where none has."""
    length = valid.sum(-1)
    return torch.where(length > 0, 1 - accepted / length.clamp_min(1), 0).sum() / _anchors(valid)
