"""Tables of the study on entropy."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from bebop.adaptation.probe import Probe
from bebop.metrics.intervals import Interval
from recipes.reproduce.real.arms import Arm, each, interval, of_arm
from recipes.reproduce.real.effects import Statistic, accept_length, mean_of
from recipes.reproduce.real.evaluation import TEMPERATURES
from recipes.reproduce.real.slopes import ENTROPY, TENTHS, correlation, over_points, tenth_points, told_by
from recipes.reproduce.real_entropy.analysis import DRAFTS, Looks, Results, entropy, slopes

Line = dict[str, Any]


def tables(results: Results) -> Mapping[str, list[Line]]:
    """Return all tables by title."""
    there = {head: looks for head, looks in results.items() if looks.plain}
    return {
        "Slopes of acceptance on the target's entropy, per nat": [
            {"head": head, "drafts": drafts}
            | {way: interval(of_arm(found)) for way, found in slopes(looks, drafts).items()}
            for drafts in DRAFTS
            for head, looks in there.items()
        ],
        "Means by temperature": [
            {"head": head, "temperature": t, **means(at(looks, k))}
            for head, looks in there.items()
            if looks.swept
            for k, t in enumerate(TEMPERATURES)
        ],
        "Tenths of all tokens by the target's entropy, temperature 1": [
            {"head": head, "tenth": j + 1, **tenth(looks, j)} for head, looks in there.items() for j in range(TENTHS)
        ],
        "Entropies of draft and target, temperature 1": [
            {"head": head, **sides(looks)} for head, looks in there.items()
        ],
    }


def at(looks: Looks, k: int) -> Arm[Probe]:
    """Return the chains at temperature number ``k``."""
    return {seed: sweep[k] for seed, sweep in looks.swept.items()}


def mean(arm: Arm[Probe], name: str) -> Interval:
    """Return the mean of a number over all contexts and positions."""
    return interval(of_arm(each(arm, lambda chains: mean_of(chains, chains.numbers[name]))))


def means(arm: Arm[Probe]) -> Line:
    """Return the means at one temperature: the points of the slopes over temperatures."""
    names = {"entropy": ENTROPY, "entropy of the draft": "draft_entropy", "sampled": "overlap", "greedy": "target_only"}
    return {label: mean(arm, name) for label, name in names.items()}


def in_tenth(looks: Looks, name: str, j: int) -> Interval:
    """Return the mean of a number over the steps in tenth ``j`` by the target's entropy."""

    def value(chains: Probe) -> Statistic:
        return over_points(tenth_points(chains, name)[:, 3 * j : 3 * j + 3], lambda _, y: y[:, 0])

    return interval(of_arm(each(looks.plain, value)))


def tenth(looks: Looks, j: int) -> Line:
    """Return a line of the table of tenths."""
    names = {"entropy": ENTROPY, "entropy of the draft": "draft_entropy", "sampled": "overlap", "greedy": "target_only"}
    return {label: in_tenth(looks, name, j) for label, name in names.items()}


def sides(looks: Looks) -> Line:
    """Return both entropies, their correlation, and R squared of acceptance on each."""
    every = looks.plain
    chains = sum(len(one.row) for one in every.values())
    return {
        "chains": chains // max(1, len(every)), "prompts": len(np.unique(next(iter(every.values())).row)),
        "seeds": len(every), "accept length": interval(of_arm(each(every, accept_length))),
        "draft": interval(of_arm(entropy(looks, "draft"))), "target": interval(of_arm(entropy(looks, "target"))),
        "correlation": interval(of_arm(each(every, lambda c: correlation(c, ENTROPY, "draft_entropy")))),
        "R2 of acceptance on the draft's": interval(of_arm(each(every, lambda c: told_by(c, "draft_entropy")))),
        "R2 on the target's": interval(of_arm(each(every, lambda c: told_by(c, ENTROPY)))),
    }  # fmt: skip
