"""Arms of the real study, read from its evaluation: the heads of a loss, one per seed, and their numbers for the rules.

An arm may lack seeds, or all of its heads. Numbers that cannot be measured are left out, and the rules that need them
are not tested. Two arms are compared over the seeds that both have.
"""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from bebop.adaptation.probe import Probe
from bebop.errors import UserError
from bebop.metrics.intervals import NORMAL_95, Interval
from bebop.trainer.objectives import Sampling
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.real.effects import Effect, Statistic, contrast, single
from recipes.reproduce.real.evaluation import Evaluated, read_chains
from recipes.reproduce.real.heads import DONE, done
from recipes.reproduce.real.runs import SHARED, HeadRun, all_runs

PLAIN = Sampling()
FRESH = "fresh-"  # prefix of runs from the fitted start
T = TypeVar("T")
Arm = dict[int, T]  # by seed, in order


def runs_of(name: str, fresh: bool = False) -> list[HeadRun]:
    """Return the runs of a loss in the order of their seeds, from the shared head or from the fitted start.

    The name ``shared`` gives the run of the shared head itself.
    """
    own = [run for run in all_runs() if (run.name == SHARED if name == SHARED else run.objective == name)]
    kept = [run for run in own if run.name.startswith(FRESH) == fresh and (run.name == SHARED) == (name == SHARED)]
    return sorted(kept, key=lambda run: run.seed)


def stem(at: str) -> str:
    """Return a head's file name without its ending: best, or that of a mark such as step 100."""
    kind, _, count = at.partition(" ")
    return f"{kind}-{float(count):05.0f}" if count else kind


def evaluated(
    place: Path, name: str, at: str = "best", sampling: Sampling = PLAIN, split: str = "test", fresh: bool = False
) -> Arm[Path]:
    """Return the file of chains for each seed that has finished training and was evaluated."""
    found = {}
    for run in runs_of(name, fresh):
        path = Evaluated(head=run.name, file=f"{stem(at)}.safetensors", sampling=sampling, split=split).path(place)
        if done(run, place) and path.is_file():
            found[run.seed] = path
    return found


def heads(
    place: Path, name: str, at: str = "best", sampling: Sampling = PLAIN, split: str = "test", fresh: bool = False
) -> Arm[Probe]:
    """Return the chains of each seed; ``at``: "best" or a mark, such as "step 100" or "second 120"."""
    return {seed: read_chains(path) for seed, path in evaluated(place, name, at, sampling, split, fresh).items()}


def common(*arms: Arm[T]) -> list[list[T]]:
    """Return the values of several arms for the seeds that all of them have, in the order of the seeds."""
    seeds = sorted(set.intersection(*(set(one) for one in arms)))
    return [[one[seed] for seed in seeds] for one in arms]


def same_chains(probes: Iterable[Probe]) -> None:
    """Check that all heads were evaluated on the same chains, as every comparison assumes.

    Raises:
        UserError: They were not.
    """
    listed = list(probes)
    for other in listed[1:]:
        if not (np.array_equal(listed[0].row, other.row) and np.array_equal(listed[0].place, other.place)):
            raise UserError(
                "the heads were not all looked at on the same chains: remove the folder evaluation and run again "
                "python -m recipes.reproduce.real --stage evaluation"
            )


def looked_at(place: Path, probes: Sequence[Probe], names: Sequence[str] = ("the study",)) -> None:
    """Check that a study has evaluated heads, all on the same chains.

    Raises:
        UserError: None of its heads was evaluated, or not all on the same chains.
    """
    if not probes:
        raise UserError(
            f"{place / 'evaluation'} holds no head of {', '.join(names)}: run first "
            "python -m recipes.reproduce.real --stage heads evaluation"
        )
    same_chains(probes)


def flat_curves(place: Path, name: str, fresh: bool = False) -> list[bool]:
    """Return for each head of an arm whether its validation curve was flat at the end of its run."""
    seeds = evaluated(place, name, fresh=fresh)
    folders = [run.folder(place) for run in runs_of(name, fresh) if run.seed in seeds]
    return [bool(json.loads((folder / DONE).read_text())["flat"]) for folder in folders]


@dataclass(slots=True)
class Measured:
    """Numbers and facts of a study, by the names that its rules use."""

    numbers: dict[str, Number] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    def add(self, name: str, effect: Effect | None) -> None:
        """Add an effect and its size.

        Leaves out None, and effects without an interval, which takes two seeds.
        """
        if effect is None or not math.isfinite(effect.low):
            return
        self.numbers[name] = effect.number()
        self.facts[f"size of {name}"] = told_size(effect.size)

    def arm(self, name: str, statistics: Arm[Statistic]) -> None:
        """Add a number of one arm, and "NAME, seeds": the same over seeds alone, for the noise floor."""
        self.add(name, of_arm(statistics))
        if name in self.numbers:
            self.numbers[f"{name}, seeds"] = over_seeds(seed_values(statistics))

    def difference(self, name: str, first: Arm[Statistic], second: Arm[Statistic]) -> None:
        """Add the first arm minus the second, over the seeds of both."""
        self.add(name, of_difference(first, second))

    def curves(self, place: Path, name: str, fresh: bool = False) -> None:
        """Add the share of flat validation curves as "NAME, flat", and a sentence about it as "curves of NAME".

        Heads from the fitted start are named "fresh NAME".
        """
        flat = flat_curves(place, name, fresh)
        label = f"fresh {name}" if fresh else name
        if flat:
            share = sum(flat) / len(flat)
            self.numbers[f"{label}, flat"] = Number(value=share, low=share, high=share)
            self.facts[f"curves of {label}"] = f"{sum(flat)} of {len(flat)} validation curves of {label} flat"


def each(heads: Arm[T], what: Callable[[T], Statistic]) -> Arm[Statistic]:
    """Return a number of every head of an arm."""
    return {seed: what(one) for seed, one in heads.items()}


def of_arm(statistics: Arm[Statistic]) -> Effect | None:
    """Return the effect of a number over an arm; None without heads."""
    return single([*statistics.values()], lambda one: one) if statistics else None


def of_difference(first: Arm[Statistic], second: Arm[Statistic]) -> Effect | None:
    """Return the difference of two arms over the seeds of both; None without common seeds."""
    ours, theirs = common(first, second)
    return contrast(ours, theirs) if ours else None


def seed_values(statistics: Arm[Statistic]) -> Sequence[float]:
    """Return the number of each seed."""
    return [float(one(np.ones((1, len(one.sums))))[0]) for one in statistics.values()]


def told_size(size: float) -> str:
    """Return an effect in units of the noise floor, in words."""
    return f"{size:.1f} times what two seeds of one arm differ by"


def interval(effect: Effect | None) -> Interval:
    """Return an interval for tables and figures.

    With one seed it is over prompts alone; without an effect it is NaN.
    """
    if effect is None:
        return Interval(math.nan, math.nan, math.nan)
    if math.isfinite(effect.low):
        return Interval(effect.value, effect.low, effect.high)
    half = NORMAL_95 * effect.prompt_error
    return Interval(effect.value, effect.value - half, effect.value + half)
