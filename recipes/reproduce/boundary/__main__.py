"""``python -m recipes.reproduce.boundary``: on which side of the boundary six losses put positions; see README.md."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce.boundary.charts import draw
from recipes.reproduce.boundary.probing import HEADS, Key, run
from recipes.reproduce.boundary.sides import Quantity, Sides
from recipes.reproduce.cli import start
from recipes.reproduce.measured import Number, of
from recipes.reproduce.record import begin, keep
from recipes.reproduce.study import HELD_OUT, SEEDS, TASKS, Arm, everywhere, prepare, results_folder
from recipes.reproduce.temperature.slopes import EDGES, bin_names

HERE = results_folder(Path(__file__).parent)
SHOWN: tuple[Quantity, ...] = ("sampled_wins", "clear_sampled", "clear_greedy", "sampled", "greedy", "best", "switch")

Results = Mapping[Key, Sides]


def main() -> None:
    """Sample, train, probe, judge, draw, write."""
    started = begin("boundary")
    everywhere(prepare, SEEDS, "text")
    keys = [(name, seed) for seed in SEEDS for name in HEADS]
    results = dict(zip(keys, everywhere(run, keys, "boundary"), strict=True))
    tables = {
        "All positions": [line(results, name) for name in HEADS],
        "By task": [line(part(results, task=t), name) | {"task": t} for t in TASKS for name in ("ce", "e2e_tv")],
        "By position": [
            line(part(results, position=k), n) | {"position": k} for k in (1, 2, 3) for n in ("ce", "e2e_tv")
        ],
        "By the target's entropy": [
            line(part(results, bin=j), name) | {"entropy": label, "positions": count(results, name, j)}
            for j, label in enumerate(bin_names())
            for name in ("ce", "e2e_tv")
        ],
    }
    figures = draw(results, HEADS, HERE / "figures")
    plan = {**asdict(Arm(objective="", seed=0)), "prompts": HELD_OUT, "seeds": SEEDS}
    keep(HERE, started, rule_numbers(results), tables, figures, plan)


def rule_numbers(results: Results) -> dict[str, Number]:
    """What the rules speak of."""
    return {
        f"{name}, {what}": of(interval, len(SEEDS)) for name in HEADS for what, interval in over(results, name).items()
    }


def part(results: Results, task: str | None = None, position: int | None = None, bin: int | None = None) -> Results:
    """The positions of a task, of a draft position, or of a bin of the target's entropy."""

    def chosen(sides: Sides) -> Sides:
        kept = np.ones(len(sides.sampled), bool)
        kept &= True if task is None else sides.task == task
        kept &= True if position is None else sides.position == position
        kept &= True if bin is None else np.digitize(sides.entropy, EDGES) == bin
        return sides.only(kept)

    return {key: chosen(sides) for key, sides in results.items()}


def over(results: Results, name: str) -> dict[str, Interval]:
    """Numbers of a head over seeds; ``worth_...`` is what a choice adds to the better of the two fixed ones."""
    heads = [results[name, seed] for seed in SEEDS]
    means = {of: np.array([f.mean(of) for f in heads]) for of in SHOWN}
    fixed = np.maximum(means["sampled"], means["greedy"])
    means_of: dict[str, Any] = {str(of): values for of, values in means.items()}
    means_of["advantage"] = means["sampled"] - means["greedy"]
    means_of |= {"worth_best": means["best"] - fixed, "worth_switch": means["switch"] - fixed}
    return {of: across_seeds(values) for of, values in means_of.items()}


def line(results: Results, name: str) -> dict[str, Any]:
    """A line of a table: shares and acceptances over seeds, and the advantage bootstrapped over all answers."""
    labels = {
        "sampled_wins": "sampled wins", "clear_sampled": "by > 0.01", "clear_greedy": "greedy wins by > 0.01",
        "sampled": "always sampled", "greedy": "always greedy", "best": "the better one",
        "switch": "switch on draft entropy", "advantage": "sampled - greedy",
    }  # fmt: skip
    intervals = over(results, name)
    every = [results[name, seed] for seed in SEEDS]
    answers = {"answer": np.concatenate([f.answer + 10**6 * i for i, f in enumerate(every)])}
    columns = {c: np.concatenate([getattr(f, c) for f in every]) for c in Sides.__slots__ if c != "answer"}
    pooled = Sides(**answers, **columns).advantage()
    return {"head": name} | {label: intervals[of] for of, label in labels.items()} | {"(bootstrap)": pooled}


def count(results: Results, name: str, bin: int) -> int:
    """Positions in a bin, of all seeds."""
    return sum(len(part(results, bin=bin)[name, seed].sampled) for seed in SEEDS)


if __name__ == "__main__":
    start(main, __doc__)
