"""From runs to tables and findings, by the rules in README.md."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from bebop.intervals import Interval, across_seeds
from recipes.common.record import Finding, Verdict, verdict
from recipes.common.study import SEEDS
from recipes.top_k.arms import MODES, SIZES, SKIP, STARTS, Results, labels
from recipes.top_k.curves import numbers


def row(results: Results, start: str, label: str) -> dict[str, Any]:
    """A line of the table: means over seeds with intervals."""
    found = [results[start, label, seed] for seed in SEEDS]
    line: dict[str, Any] = {"tokens": label}
    line |= {"accept length": across_seeds([f.sampled for f in found])}
    line |= {"greedy drafts": across_seeds([f.greedy for f in found])}
    summaries = [numbers(f.curves, SKIP) for f in found if f.curves is not None]
    return line | {name: across_seeds([s[name] for s in summaries]) for name in (summaries[0] if summaries else {})}


def gain(results: Results, start: str, label: str) -> Interval:
    """Accept length of the whole vocabulary minus that of ``label``; the seeds are paired."""
    return across_seeds([results[start, "all", s].sampled - results[start, label, s].sampled for s in SEEDS])


def more_spread(results: Results, start: str, label: str, name: str = "loss spread") -> Interval:
    """How much more a number of the curves is than with the whole vocabulary; the seeds are paired."""
    pairs = [(results[start, label, s].curves, results[start, "all", s].curves) for s in SEEDS]
    return across_seeds([numbers(a, SKIP)[name] - numbers(b, SKIP)[name] for a, b in pairs if a and b])


def every(intervals: Sequence[Interval]) -> Verdict:
    """Confirmed if each interval lies above 0, refuted if one lies below 0, else undecided."""
    found = {verdict(interval) for interval in intervals}
    if found == {"confirmed"}:
        return "confirmed"
    return "refuted" if "refuted" in found else "undecided"


def listing(intervals: Mapping[str, Interval]) -> str:
    """For a sentence: ``K = 4, full 0.1 [0.0, 0.2]; ...``."""
    return "; ".join(f"{name} {interval}" for name, interval in intervals.items())


def findings(results: Results) -> list[Finding]:
    """What the numbers say by the rules in README.md."""
    cut = [label for label in labels() if label.startswith("K")]
    judged = []
    for start in STARTS:
        gains = {label: gain(results, start, label) for label in cut}
        judged.append(
            Finding(
                claim="Fig 14b",
                statement=f"From the {start} head, TV on the whole vocabulary beats TV on the K largest draft logits.",
                rule="confirmed if all four intervals of the gain lie above 0, refuted if one lies below 0",
                verdict=every(list(gains.values())),
                evidence=f"Gain in accept length over {listing(gains)}.",
            )
        )
    smallest = {f"{start} head, {mode}": (start, f"K = {SIZES[0]}, {mode}") for start, mode in product(STARTS, MODES)}
    spreads = {name: more_spread(results, *where) for name, where in smallest.items()}
    judged.append(
        Finding(
            claim="Fig 14b",
            statement="With few tokens the training curve has spikes, as the set of tokens changes between steps.",
            rule=f"confirmed if with K = {SIZES[0]} all four intervals of the added spread of the loss lie above 0",
            verdict=every(list(spreads.values())),
            evidence=f"Added spread of the step-to-step change of the log loss: {listing(spreads)}.",
        )
    )
    return judged
