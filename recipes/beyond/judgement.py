"""The rules of README.md as functions of intervals."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from bebop.intervals import Interval, across_seeds
from recipes.common.record import Finding, Verdict, verdict, within

CLOSE = 0.05  # accepted drafts: an estimator that is as close as that to the counts agrees with them
SMALL = 0.02  # a bias within that is none
Biases = Mapping[tuple[str, str], Interval]  # (head, estimator) -> estimate minus counts


def joint(verdicts: Sequence[Verdict]) -> Verdict:
    """One verdict for several heads: confirmed if all are, refuted if one is."""
    if "refuted" in verdicts:
        return "refuted"
    return "confirmed" if set(verdicts) == {"confirmed"} else "undecided"


def biased(interval: Interval) -> Verdict:
    """Confirmed if the interval excludes 0, refuted if it lies within +-``SMALL``, else undecided."""
    if interval.excludes(0.0):
        return "confirmed"
    return "refuted" if within(interval, SMALL) == "confirmed" else "undecided"


def inside_gain(temperatures: Sequence[float], lengths: ArrayLike) -> Interval:
    """What the best draft temperature strictly between 0 and 1 gains over the better of both, over seeds.

    ``lengths`` [seeds, temperatures]. It is chosen on the other seeds and judged on the one left out: a maximum of
    noise would gain where it is chosen. The better end is taken on the seed itself, which errs against the claim.
    """
    table, grid = np.asarray(lengths, float), np.asarray(temperatures, float)
    inner, ends = np.flatnonzero((grid > 0) & (grid < 1)), np.flatnonzero((grid == 0) | (grid == 1))
    gains = []
    for seed in range(len(table)):
        rest = np.delete(table, seed, 0).mean(0)
        chosen = inner[rest[inner].argmax()]
        gains.append(table[seed, chosen] - table[seed, ends].max())
    return across_seeds(gains)


def estimators(biases: Biases, heads: Sequence[str]) -> list[Finding]:
    """Which estimates agree with the engine's counts."""

    def told(name: str) -> str:
        return ", ".join(f"{head}: {biases[head, name]}" for head in heads)

    sound = ("drafted paths, unbiased", "text, unbiased, where cycles began")
    short = ("mean overlaps multiplied", "overlaps multiplied along drafted paths", "overlaps multiplied along text")
    return [
        Finding(
            claim="beyond",
            statement=f"An estimate of E[A] agrees with the engine's counts: {name}.",
            rule=f"confirmed if the difference lies within {CLOSE} drafts for every head, refuted if outside for one",
            verdict=joint([within(biases[head, name], CLOSE) for head in heads]),
            evidence=f"Difference {told(name)}.",
        )
        for name in sound
    ] + [
        Finding(
            claim="beyond",
            statement=f"A shortcut to E[A] is biased: {name}.",
            rule=f"confirmed if the difference excludes 0 for every head, refuted if it lies within {SMALL} for one",
            verdict=joint([biased(biases[head, name]) for head in heads]),
            evidence=f"Difference {told(name)}.",
        )
        for name in short
    ]


def difference(statement: str, gain: Interval, unit: str = "tokens of accept length", more: str = "") -> Finding:
    """A claim that something is larger."""
    return Finding(
        claim="beyond",
        statement=statement,
        rule="confirmed if the interval of the difference lies above 0, refuted if below",
        verdict=verdict(gain),
        evidence=f"Difference {gain} {unit}.{more}",
    )
