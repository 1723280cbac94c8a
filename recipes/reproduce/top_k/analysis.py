"""From runs to tables, and to the numbers that the rules speak of."""

from typing import Any

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce.measured import Number, of, over_seeds
from recipes.reproduce.study import SEEDS
from recipes.reproduce.top_k.arms import SKIP, STARTS, Results, labels
from recipes.reproduce.top_k.curves import numbers


def row(results: Results, start: str, label: str) -> dict[str, Any]:
    """A line of the table: means over seeds with intervals."""
    runs = [results[start, label, seed] for seed in SEEDS]
    line: dict[str, Any] = {"tokens": label}
    line |= {"accept length": across_seeds([f.sampled for f in runs])}
    line |= {"greedy drafts": across_seeds([f.greedy for f in runs])}
    summaries = [numbers(f.curves, SKIP) for f in runs if f.curves is not None]
    return line | {name: across_seeds([s[name] for s in summaries]) for name in (summaries[0] if summaries else {})}


def gain(results: Results, start: str, label: str) -> Interval:
    """Accept length of the whole vocabulary minus that of ``label``; the seeds are paired."""
    return across_seeds([results[start, "all", s].sampled - results[start, label, s].sampled for s in SEEDS])


def more_spread(results: Results, start: str, label: str, name: str = "loss spread") -> Interval:
    """How much more a number of the curves is than with the whole vocabulary; the seeds are paired."""
    pairs = [(results[start, label, s].curves, results[start, "all", s].curves) for s in SEEDS]
    return across_seeds([numbers(a, SKIP)[name] - numbers(b, SKIP)[name] for a, b in pairs if a and b])


def rule_numbers(results: Results) -> dict[str, Number]:
    """What the rules speak of; see findings.py for the names."""
    by_name: dict[str, Number] = {}
    for start in STARTS:
        for label in labels():
            runs = [results[start, label, seed] for seed in SEEDS]
            by_name[f"{start}: length {label}"] = over_seeds([run.sampled for run in runs])
            if curves := [run.curves for run in runs if run.curves is not None]:
                by_name[f"{start}: spread {label}"] = over_seeds([numbers(c, SKIP)["loss spread"] for c in curves])
            if label.startswith("K"):
                by_name[f"{start}: all - {label}"] = of(gain(results, start, label), len(SEEDS))
                by_name[f"{start}: spread {label} - all"] = of(more_spread(results, start, label), len(SEEDS))
    return by_name
