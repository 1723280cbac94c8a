"""``python -m recipes.reproduce.temperature``: six losses, three seeds, six temperatures; see README.md."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce.cli import start
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.measured import of as number_of
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import DEPTH, HELD_OUT, SEEDS, TASKS, Arm, everywhere, results_folder
from recipes.reproduce.temperature.charts import draw
from recipes.reproduce.temperature.slopes import Points, points, slope_difference
from recipes.reproduce.temperature.sweep import ARMS, RULES, TEMPERATURES, HeadResult, Key, preparations, prepare, run

HERE = results_folder(Path(__file__).parent)
Results = Mapping[Key, HeadResult]


def main() -> None:
    """Sample, train, probe, judge, draw, write."""
    started = begin("temperature")
    everywhere(prepare, preparations(), "text")
    keys = [(arm, seed) for seed in SEEDS for arm in ARMS]
    results = dict(zip(keys, everywhere(run, keys, "temperature"), strict=True))
    tables = {
        "Slopes over temperatures, per nat": [swept(results, arm) for arm in ARMS],
        "Slopes between tokens and between answers at temperature 1, per nat": [plain(results, arm) for arm in ARMS],
        "Slopes between tokens by task, per nat": [tasks(results, arm, drafts) for drafts in RULES for arm in ARMS],
        "Means by temperature": [means(results, arm, t) for arm in ARMS for t in TEMPERATURES],
    }
    figures = draw(results, HERE / "figures")
    plan = {**asdict(Arm(objective="", seed=0)), "prompts": HELD_OUT, "seeds": SEEDS, "temperatures": TEMPERATURES}
    keep(HERE, started, numbers(results), tables, figures, plan)


def over(results: Results, arm: str, name: str, of: str = "", task: str | None = None) -> Interval:
    """A slope over seeds: over temperatures, or over the points of ``of`` at temperature 1."""
    return across_seeds([slope(results[arm, seed], name, of, task) for seed in SEEDS])


def rise(results: Results, a: str, b: str, name: str, of: str = "") -> Interval:
    """The slope of one arm minus that of another, paired by seed."""
    return across_seeds([slope(results[a, s], name, of) - slope(results[b, s], name, of) for s in SEEDS])


def slope(head: HeadResult, name: str, of: str = "", task: str | None = None) -> float:
    """One slope of one head."""
    return head.swept(name)[0] if not of else float(points(head.plain, name, of, task).slope()[0])


def pooled(results: Results, arm: str, name: str, of: str) -> Points:
    """The points of all seeds together, for a bootstrap over answers."""
    parts = [points(results[arm, seed].plain, name, of) for seed in SEEDS]
    return Points(**{f: np.concatenate([getattr(p, f) for p in parts]) for f in ("n", "x", "y", "xx", "xy")})


def swept(results: Results, arm: str) -> dict[str, Any]:
    """Slopes over temperatures, with how straight they are."""

    def at(name: str, k: int) -> Interval:
        return across_seeds([results[arm, s].swept(f"{name}/{k}", f"target_entropy/{k}")[0] for s in SEEDS])

    def straight(name: str) -> float:
        return float(np.mean([results[arm, s].swept(name)[1] for s in SEEDS]))

    line: dict[str, Any] = {"head": arm}
    for drafts, name in RULES.items():
        line |= {f"{drafts}": over(results, arm, name), f"R2, {drafts}": straight(name)}
    line |= {f"sampled, position {k}": at("overlap", k) for k in range(1, DEPTH + 1)}
    line["accept length, sampled"] = over(results, arm, "accept_length")
    return line | {"accept length, greedy": over(results, arm, "accept_greedy")}


def plain(results: Results, arm: str) -> dict[str, Any]:
    """Slopes at temperature 1: intervals over seeds, and bootstrapped over the answers of all seeds."""
    line: dict[str, Any] = {"head": arm}
    for of in ("tokens", "answers"):
        for drafts, name in RULES.items():
            line[f"{of}, {drafts}"] = over(results, arm, name, of)
        line[f"{of}, sampled (bootstrap)"] = pooled(results, arm, "overlap", of).interval()
        line[f"{of}, sampled, minus ce (bootstrap)"] = slope_difference(
            pooled(results, arm, "overlap", of), pooled(results, "ce", "overlap", of)
        )
    return line


def tasks(results: Results, arm: str, drafts: str) -> dict[str, Any]:
    """Slopes between tokens within each task."""
    line = {task: over(results, arm, RULES[drafts], "tokens", task) for task in TASKS}
    return {"drafts": drafts, "head": arm, **line}


def means(results: Results, arm: str, temperature: float) -> dict[str, Any]:
    """What the slopes are slopes of, and the two parts of the overlap."""
    names = {
        "entropy": "target_entropy", "accept length": "accept_length", "greedy drafts": "accept_greedy",
        "overlap": "overlap", "p(greedy draft)": "target_only",
        "alpha p>q": "alpha_p_gt_q", "alpha q>=p": "alpha_q_ge_p",
    }  # fmt: skip
    means = [results[arm, seed].means[temperature] for seed in SEEDS]
    return {"head": arm, "temperature": temperature} | {
        label: across_seeds([f[name] for f in means]) for label, name in names.items()
    }


def numbers(results: Results) -> dict[str, Number]:
    """What the rules speak of; see findings.py for the names."""
    ways = {"temperatures": "", "tokens": "tokens", "answers": "answers"}
    by_name: dict[str, Number] = {}
    for way, source in ways.items():
        for arm in ARMS:
            slopes = {drafts: over(results, arm, name, source) for drafts, name in RULES.items()}
            by_name |= {f"{arm}, {drafts}, {way}": number_of(slope, len(SEEDS)) for drafts, slope in slopes.items()}
            for base in [base for base in ("ce", "hard_ce") if base != arm]:
                by_name[f"{arm} - {base}, {way}"] = number_of(rise(results, arm, base, "overlap", source), len(SEEDS))
    for drafts, name in RULES.items():
        by_name[f"R squared, {drafts}"] = over_seeds([results["ce", s].swept(name)[1] for s in SEEDS])
    return by_name


if __name__ == "__main__":
    start(main, __doc__)
