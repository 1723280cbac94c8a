"""E-values: the evidence of tokens against a claim, the shares of a fault that they exclude, and the shares they show.

A direction is a distribution r over a position's columns that depends on the past alone. It is the distribution that a
known kind of fault would mix into the claimed p. Under the claim

    e(share) = prod over positions of (1 + share * (r(x) / p(x) - 1))

has expectation 1 at every moment, because it is the likelihood ratio of (1 - share) p + share r against p. It ever
exceeds 1/alpha with probability at most alpha (Ville's inequality), at any stopping time. The same holds for a mixture
over shares with fixed weights, and for a mixture over directions with fixed weights that add up to at most 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

SHARES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.9)  # of tokens, mixed with equal weights
# A bound is a 95 % bound, as is usual, not one at the ledger's alpha. If it is wrong, a fault passes unseen. An actual
# fault lies in one direction, so the number of directions needs no further correction.
BOUND_ALPHA = 0.05
FOUND = 1.2816  # standard deviations: a normal variable exceeds its mean less so many with 90 %


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The evidence of one direction: ``Evidence(name="row_before", group="contamination", log_e=14.2, ...)``."""

    name: str  # row_before, hotter, ids, pit, ...; row_before@2: at place 2 of a decoding cycle
    group: str  # contamination, by_cycle, draft, shared_noise, ids, learned_tilt, pit, copies, reported
    log_e: float  # ln of its e-value, without its weight
    weight: float  # fixed share of the merged e-value
    share: float | None  # upper 95 % bound of the share of tokens drawn from this direction; None: not bounded
    tv: float | None  # the same as total variation per token

    @property
    def merged(self) -> float:
        """Return ln of its contribution to the merged e-value."""
        return self.log_e + math.log(self.weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visible:
    """The smallest fault towards a direction that the examined tokens show with probability 90 %."""

    name: str
    share: float  # share of tokens; 1: not even a share of 1 would show
    tv: float  # total variation per token
    needs: int | None = None  # tokens that show a fault of ``limit_tv``; None: no share of it moves that much


def log_mean_exp(logs: Array, axis: int = -1) -> Array:
    """Return ln of the mean of exp(logs)."""
    top = logs.max(axis=axis, keepdims=True)
    top = np.where(np.isfinite(top), top, 0.0)
    found: Array = np.squeeze(top, axis) + np.log(np.exp(logs - top).mean(axis=axis))
    return found


def log_sum_exp(logs: Array, axis: int = -1) -> Array:
    """Return ln of the sum of exp(logs)."""
    return log_mean_exp(logs, axis) + math.log(logs.shape[axis])


def share_bound(logs: Array, alpha: float = BOUND_ALPHA, shares: Sequence[float] | Array = SHARES) -> float:
    """Return an upper confidence bound of the share, from ln e(share) [len(shares)].

    The mixture gives half its weight to no fault, and half to the mixture over shares. A share s is rejected at level
    alpha once this mixture is 1/alpha times as likely as s: that quotient is a mixture of likelihood ratios against s.
    ln e is concave in the share. Between two shares of the grid it lies below the prolonged chords through the points
    on either side.

    The bounds of all moments are a confidence sequence: a true share s is rejected at any moment with probability at
    most alpha. The quotient is a martingale that starts at 1 if tokens come from (1 - s) p + s r (Ville). So a run may
    stop at any time, as soon as the bound is low enough.
    """
    mixture = float(log_sum_exp(np.asarray([0.0, float(log_mean_exp(logs))]))) - math.log(2)
    limit = mixture - math.log(1 / alpha)
    at, value = np.asarray([0.0, *shares]), np.asarray([0.0, *logs])
    kept = int(np.nonzero(value > limit)[0].max())  # a mixture is at most its largest part, so there is one
    if kept == len(at) - 1:
        return 1.0
    crossings = [float(at[kept + 1])]
    for a, b in ((kept - 1, kept), (kept + 1, kept + 2)):
        if a >= 0 and b < len(at) and value[b] < value[a]:
            slope = (value[b] - value[a]) / (at[b] - at[a])
            crossings.append(float(at[b] + (limit - value[b]) / slope))
    return max(min(crossings), float(at[kept]))


def visible_share(
    positions: float, growth: Array, square: Array, weight: float, alpha: float, shares: Sequence[float] = SHARES
) -> float:
    """Return the smallest share that ``positions`` positions show with a probability of about 90 %; 1: none.

    ``growth`` and ``square`` [len(shares)] are the means of ln(1 + share (r/p - 1)) and of its square under the fault
    itself. The direction alone has to reach ln 1/alpha plus its price: its weight, and the weight of one share among
    all. Its gain is positions * growth - 1.28 * sqrt(positions * variance). Between shares of the grid the result is
    interpolated linearly on a logarithmic scale.
    """
    need = math.log(1 / alpha) - math.log(weight) + math.log(len(shares))
    gain = positions * growth - FOUND * np.sqrt(np.maximum(positions * (square - growth**2), 0.0))
    enough = np.nonzero(gain >= need)[0]
    if not len(enough):
        return 1.0
    first = int(enough[0])
    if first == 0:
        return shares[0]
    low, high = max(float(gain[first - 1]), 0.0), float(gain[first])
    part = (need - low) / max(high - low, 1e-12)
    return float(math.exp((1 - part) * math.log(shares[first - 1]) + part * math.log(shares[first])))
