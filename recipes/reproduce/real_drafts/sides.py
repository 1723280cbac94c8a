"""Sampled against greedy drafts, as statistics of one head's chains that a bootstrap over prompts can weigh.

All are over the existing steps of all contexts and positions. A sampled draft is accepted with the overlap, a greedy
one with p(argmax q).
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from bebop.adaptation.probe import Probe
from recipes.reproduce.boundary.sides import CLEAR, switched
from recipes.reproduce.real.effects import Statistic, by_prompt, mean_of, prompts

Array = NDArray[np.float64]
DRAFTS = {"sampled": "overlap", "greedy": "target_only"}


def acceptance(drafts: str) -> Callable[[Probe], Statistic]:
    """Return the statistic of the mean acceptance of a kind of draft."""
    return lambda chains: mean_of(chains, chains.numbers[DRAFTS[drafts]])


def margin(chains: Probe) -> Array:
    """Return acceptance of sampled minus greedy drafts at every step [n, K]; NaN where there is none."""
    found: Array = chains.numbers["overlap"] - chains.numbers["target_only"]
    return found


def share(chains: Probe, beyond: Callable[[Array], NDArray[np.bool_]]) -> Statistic:
    """Return the share of positions whose margin satisfies ``beyond``."""
    found = margin(chains)
    return mean_of(chains, np.where(np.isfinite(found), beyond(found), np.nan))


SHARES: dict[str, Callable[[Probe], Statistic]] = {
    "sampled wins": lambda chains: share(chains, lambda m: m > 0),
    "clear sampled": lambda chains: share(chains, lambda m: m > CLEAR),
    "clear greedy": lambda chains: share(chains, lambda m: m < -CLEAR),
}


def kinds_won(chains: Probe) -> Statistic:
    """Return the share of kinds of prompts for which sampled drafts have the higher mean acceptance."""
    kinds = np.unique(chains.task)
    found = margin(chains)
    columns = [np.where((chains.task == kind)[:, None] & np.isfinite(found), found, 0) for kind in kinds]
    drawn = [np.where((chains.task == kind)[:, None] & np.isfinite(found), 1.0, 0) for kind in kinds]

    def number(sums: Array) -> Array:
        total, count = np.split(sums, 2, 1)
        won: Array = ((total > 0) & (count > 0)).sum(1) / (count > 0).sum(1)
        return won

    return Statistic(by_prompt(chains, [*columns, *drawn]), number)


def worth(chains: Probe, chosen: Array) -> Statistic:
    """Return the gain of a choice by position over the better of the two fixed kinds of draft.

    ``chosen`` [n, K] is the acceptance of the choice.
    """
    known = np.isfinite(margin(chains))
    columns = (chosen, chains.numbers["overlap"], chains.numbers["target_only"])
    sums = by_prompt(chains, [known.astype(float), *(np.where(known, column, 0) for column in columns)])
    return Statistic(sums, lambda s: s[:, 1] / s[:, 0] - np.maximum(s[:, 2], s[:, 3]) / s[:, 0])


def better(chains: Probe) -> Array:
    """Return acceptance of the better kind of draft at every step [n, K]: the upper bound of every choice."""
    found: Array = np.maximum(chains.numbers["overlap"], chains.numbers["target_only"])
    return found


def switch(chains: Probe) -> Array:
    """Return acceptance at every step [n, K] of a switch on the draft's entropy: greedy drafts up to a bound.

    Even and odd prompts form two halves, and each half uses the bound fitted on the other. The bounds stay fixed when
    prompts are resampled.
    """
    known = np.isfinite(margin(chains))
    prompt = np.broadcast_to(prompts(chains)[:, None], known.shape)
    names = ("draft_entropy", "overlap", "target_only")
    entropy, sampled, greedy = (chains.numbers[name][known] for name in names)
    found = np.full(known.shape, np.nan)
    found[known] = switched(prompt[known], entropy, sampled, greedy)
    return found


WORTHS: dict[str, Callable[[Probe], Statistic]] = {
    "worth best": lambda chains: worth(chains, better(chains)),
    "worth switch": lambda chains: worth(chains, switch(chains)),
}
