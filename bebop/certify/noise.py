"""Distributions of tokens whose draw reuses random numbers of another draw in the same decoding cycle.

Exact verification needs three independent draws: the draft y from q, its acceptance test, and the token after a
rejection from the residual r. If one of them reuses the noise of another, its distribution changes. These functions
give the changed distribution in closed form. Rows are n, columns V; q and r are distributions in float64.

A draw by the Gumbel trick is argmax(ln q + g). With E = exp(-g), which is exponential, that is the winner of a race:
the token whose E / q is smallest. A draw by a uniform u is the token whose interval of the cumulated q holds u.
"""

import torch
from torch import Tensor

EMPTY = 1e-15  # a token of a smaller probability takes no part in a race


def same_gumbel(q: Tensor, r: Tensor, y: Tensor | None = None) -> Tensor:
    """Return the distribution [n, V] of argmax(ln r + g), given that argmax(ln q + g) came out as y [n].

    The winning time w of the race for y is exponential and independent of y. Given both, every other E is q w plus a
    fresh exponential variable. So in the second race token x starts late, at the time w q / r, and from then on arrives
    at rate r; y itself arrives at w q / r exactly. In units of w, with S(t) the sum of (r t - q)+ over all x but y:
    P(x) is the integral of r / (1 + S(t))^2 over t from q(x) / r(x) to q(y) / r(y), and y has the rest.

    Args:
        q: [n, V] distribution that y was drawn from.
        r: [n, V] distribution that the token should be drawn from.
        y: [n] the first token. None: any token that r gives no probability, as a residual gives none to a rejected
            draft; the distribution is the same for all of them.
    """
    start = torch.where(r > EMPTY, q / r.clamp_min(EMPTY), torch.inf)
    end = torch.full_like(q[:, :1], torch.inf)
    if y is not None:
        end = start.gather(1, y[:, None])
        start = start.scatter(1, y[:, None], torch.inf)
    start, order = start.sort(-1)
    there = torch.isfinite(start)
    rate = (r.gather(1, order) * there).cumsum(-1)  # of all that have started by then, and the sum of their q
    behind = (q.gather(1, order) * there).cumsum(-1)
    after = torch.cat([start[:, 1:], torch.full_like(end, torch.inf)], 1)

    def unfinished(time: Tensor) -> Tensor:
        """Return 1 / (1 + S) at times [n, V], each within the interval of its column; 0 at infinite times."""
        time = torch.minimum(time, end)
        known = torch.where(torch.isfinite(time), time, 0.0)
        return torch.where(torch.isfinite(time), 1 / (1 - behind + rate * known).clamp_min(EMPTY), 0.0)

    piece = torch.where(there, (unfinished(start) - unfinished(after)) / rate.clamp_min(EMPTY), 0.0).clamp_min(0)
    later = piece.flip(-1).cumsum(-1).flip(-1)  # a token takes part in its own interval and in all that follow
    found = torch.zeros_like(r).scatter(1, order, r.gather(1, order) * later)
    total = found.sum(-1, keepdim=True)
    if y is not None:
        return found.scatter_add(1, y[:, None], (1 - total).clamp_min(0))
    return torch.where(total > EMPTY, found / total.clamp_min(EMPTY), r)


def same_uniform(q: Tensor, r: Tensor, y: Tensor) -> Tensor:
    """Return the distribution [n, V] of the token that r's CDF has at u, given that q's CDF has y [n] there."""
    high, own = q.cumsum(-1).gather(1, y[:, None]), q.gather(1, y[:, None])
    upper = r.cumsum(-1)
    shared = torch.minimum(upper, high) - torch.maximum(upper - r, high - own)
    return shared.clamp_min(0) / own.clamp_min(EMPTY)


def same_uniform_rejected(q: Tensor, r: Tensor, rejected: Tensor) -> Tensor:
    """Return the mean of ``same_uniform`` [n, V] over rejected drafts; ``rejected`` [n, V] is their part of q."""
    upper, weight = q.cumsum(-1), rejected.cumsum(-1)
    at = torch.cat([torch.zeros_like(q[:, :1]), r.cumsum(-1)], 1)  # [n, V + 1] where r's tokens begin and end
    # The rejected part of u below each of these: that of whole tokens of q, and a share of the one it lies in.
    token = torch.searchsorted(upper, at).clamp_max(q.shape[1] - 1)
    own = q.gather(1, token)
    below = ((at - (upper.gather(1, token) - own)) / own.clamp_min(EMPTY)).clamp(0, 1)
    part = rejected.gather(1, token)
    rising = weight.gather(1, token) - part + below * part
    found = rising.diff(dim=-1).clamp_min(0)
    total = found.sum(-1, keepdim=True)
    return torch.where(total > EMPTY, found / total.clamp_min(EMPTY), r)


def accepted_by_own_uniform(p: Tensor, q: Tensor, before: Tensor) -> Tensor:
    """Return the probability that u q < p, where u also drew the token: u lies between ``before`` and ``before`` + q.

    All have the same shape; ``before`` is the probability of the tokens ahead of it under q.
    """
    ratio = p / q.clamp_min(EMPTY)
    return torch.where(q > EMPTY, ((ratio - before) / q.clamp_min(EMPTY)).clamp(0, 1), ratio.clamp(max=1))
