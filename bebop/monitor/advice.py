"""Which decoding system and how many drafts would pay, with intervals."""

import numpy as np

from bebop.config import Costs
from bebop.monitor.estimate import Estimate
from bebop.monitor.window import Measure, Rate, Window


def boundary(window: Window) -> Estimate:
    """Mean overlap minus mean p(argmax q): rejection sampling accepts more iff above 0 (TV < 1 - p(argmax q))."""
    return window.gap("overlap", "target_only")


def length_gain(window: Window, current: int, costs: Costs, rate: Rate = "accepted") -> tuple[int, Estimate]:
    """The number of drafts with the best expected speed, and its relative gain over ``current`` drafts.

    Speed of K drafts: (1 + sum of P_k) / (1 + K (draft + verify)), P_k the chance that position k is accepted. One
    position beyond those that were drafted is considered, at the rate of the last.
    """
    rates = [window.value(Measure(position=k, rate=rate)) for k in range(1, min(current, window.drafts) + 1)]
    rates = [r for r in rates if r.known]
    if not rates:
        return current, Estimate.unknown(len(window.replicates))
    rates.append(rates[-1])
    reach = [rates[0]]
    for r in rates[1:]:
        reach.append(reach[-1] * r)
    points = np.cumsum([r.point for r in reach]) + 1
    draws = np.cumsum([r.draws for r in reach], axis=0) + 1  # [K + 1, B]
    spent = 1 + np.arange(1, len(reach) + 1) * (costs.draft + costs.verify)
    now = min(current, len(reach)) - 1
    best = int(np.argmax(points / spent))
    scale = spent[now] / spent[best]
    return best + 1, Estimate(
        point=float(points[best] / points[now] * scale - 1), draws=draws[best] / draws[now] * scale - 1
    )
