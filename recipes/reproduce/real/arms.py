"""Arms of the real study from the files of its evaluation: the heads of a loss, one a seed, and what rules say of them.

An arm may lack seeds, or all of its heads. What cannot be measured is left out of the numbers, and the rules that ask
for it are not tested. Two arms are compared over the seeds that both have.
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
FRESH = "fresh-"  # what names of runs from the fitted start begin with
T = TypeVar("T")
Arm = dict[int, T]  # by seed, in order


def runs_of(name: str, fresh: bool = False) -> list[HeadRun]:
    """The runs of a loss in the order of their seeds, from the shared head or from the fitted start; ``shared``: that
    head's own."""
    own = [run for run in all_runs() if (run.name == SHARED if name == SHARED else run.objective == name)]
    kept = [run for run in own if run.name.startswith(FRESH) == fresh and (run.name == SHARED) == (name == SHARED)]
    return sorted(kept, key=lambda run: run.seed)


def stem(at: str) -> str:
    """The file of a head without its ending: best, or of a mark as the rules call it, such as step 100."""
    kind, _, count = at.partition(" ")
    return f"{kind}-{float(count):05.0f}" if count else kind


def evaluated(
    place: Path, name: str, at: str = "best", sampling: Sampling = PLAIN, split: str = "test", fresh: bool = False
) -> Arm[Path]:
    """Where the chains of each seed are that has ended and was looked at."""
    found = {}
    for run in runs_of(name, fresh):
        path = Evaluated(head=run.name, file=f"{stem(at)}.safetensors", sampling=sampling, split=split).path(place)
        if done(run, place) and path.is_file():
            found[run.seed] = path
    return found


def heads(
    place: Path, name: str, at: str = "best", sampling: Sampling = PLAIN, split: str = "test", fresh: bool = False
) -> Arm[Probe]:
    """The chains of each seed; ``at``: "best" or a mark, such as "step 100" or "second 120"."""
    return {seed: read_chains(path) for seed, path in evaluated(place, name, at, sampling, split, fresh).items()}


def common(*arms: Arm[T]) -> list[list[T]]:
    """What several arms have of the seeds that all of them have, in the order of the seeds."""
    seeds = sorted(set.intersection(*(set(one) for one in arms)))
    return [[one[seed] for seed in seeds] for one in arms]


def same_chains(probes: Iterable[Probe]) -> None:
    """``UserError`` unless all heads were looked at on the same chains, as all comparisons take for granted."""
    listed = list(probes)
    for other in listed[1:]:
        if not (np.array_equal(listed[0].row, other.row) and np.array_equal(listed[0].place, other.place)):
            raise UserError(
                "the heads were not all looked at on the same chains: remove the folder evaluation and run again "
                "python -m recipes.reproduce.real --stage evaluation"
            )


def looked_at(place: Path, probes: Sequence[Probe], names: Sequence[str] = ("the study",)) -> None:
    """What every study begins with.

    Raises:
        UserError: None of its heads was looked at, or not all on the same chains.
    """
    if not probes:
        raise UserError(
            f"{place / 'evaluation'} holds no head of {', '.join(names)}: run first "
            "python -m recipes.reproduce.real --stage heads evaluation"
        )
    same_chains(probes)


def flat_curves(place: Path, name: str, fresh: bool = False) -> list[bool]:
    """Whether the validation curve of each head of an arm was flat at the end of its run."""
    seeds = evaluated(place, name, fresh=fresh)
    folders = [run.folder(place) for run in runs_of(name, fresh) if run.seed in seeds]
    return [bool(json.loads((folder / DONE).read_text())["flat"]) for folder in folders]


@dataclass(slots=True)
class Measured:
    """Numbers and facts as rules ask for them."""

    numbers: dict[str, Number] = field(default_factory=dict)
    facts: dict[str, object] = field(default_factory=dict)

    def add(self, name: str, effect: Effect | None) -> None:
        """An effect, and its size; None and one without an interval, which takes two seeds, are left out."""
        if effect is None or not math.isfinite(effect.low):
            return
        self.numbers[name] = effect.number()
        self.facts[f"size of {name}"] = told_size(effect.size)

    def arm(self, name: str, statistics: Arm[Statistic]) -> None:
        """A number of one arm, and "NAME, seeds": that over its seeds alone, for the noise floor."""
        self.add(name, of_arm(statistics))
        if name in self.numbers:
            self.numbers[f"{name}, seeds"] = over_seeds(seed_values(statistics))

    def difference(self, name: str, first: Arm[Statistic], second: Arm[Statistic]) -> None:
        """The first arm minus the second, over the seeds of both."""
        self.add(name, of_difference(first, second))

    def curves(self, place: Path, name: str, fresh: bool = False) -> None:
        """ "NAME, flat" and "curves of NAME"; "fresh NAME" for heads from the fitted start."""
        flat = flat_curves(place, name, fresh)
        label = f"fresh {name}" if fresh else name
        if flat:
            share = sum(flat) / len(flat)
            self.numbers[f"{label}, flat"] = Number(value=share, low=share, high=share)
            self.facts[f"curves of {label}"] = f"{sum(flat)} of {len(flat)} validation curves of {label} flat"


def each(heads: Arm[T], what: Callable[[T], Statistic]) -> Arm[Statistic]:
    """A number of every head of an arm."""
    return {seed: what(one) for seed, one in heads.items()}


def of_arm(statistics: Arm[Statistic]) -> Effect | None:
    """A number of an arm; None without a head."""
    return single([*statistics.values()], lambda one: one) if statistics else None


def of_difference(first: Arm[Statistic], second: Arm[Statistic]) -> Effect | None:
    """The difference of two arms over the seeds of both; None without one."""
    ours, theirs = common(first, second)
    return contrast(ours, theirs) if ours else None


def seed_values(statistics: Arm[Statistic]) -> Sequence[float]:
    """The number of each seed."""
    return [float(one(np.ones((1, len(one.sums))))[0]) for one in statistics.values()]


def told_size(size: float) -> str:
    """An effect in units of the noise floor, in words."""
    return f"{size:.1f} times what two seeds of one arm differ by"


def interval(effect: Effect | None) -> Interval:
    """For tables and figures, where one seed counts as well: then over prompts alone."""
    if effect is None:
        return Interval(math.nan, math.nan, math.nan)
    if math.isfinite(effect.low):
        return Interval(effect.value, effect.low, effect.high)
    half = NORMAL_95 * effect.prompt_error
    return Interval(effect.value, effect.value - half, effect.value + half)
