"""Harness of declared studies: it measures each arm with each seed, judges, draws figures and stores results.

A study declares its arms, a function that measures one arm with one seed, and the rules (``rules.py``). The harness
does the rest: processes, resumption of a stopped study, named numbers, tables, figures and ``results.json``.
Invariants:

- A number is an average over seeds of one weighted sum of arms, so arms of one seed are paired.
- Every number that a rule asks for is computed, because the rule holds the quantities themselves.
- Each arm of each seed is stored as soon as it is measured: a stopped study resumes there.

Studies of the real model use ``recipes.reproduce.real`` instead, because their numbers are over prompts as well.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce import rule_hash
from recipes.reproduce.claims import MODELS
from recipes.reproduce.cli import start
from recipes.reproduce.measured import Number, over_seeds
from recipes.reproduce.record import begin, keep
from recipes.reproduce.rules import Declared, Quantity
from recipes.reproduce.study import SEEDS, everywhere, once, results_folder

R = TypeVar("R")
Value = Callable[[Any], Any]  # the measurement of one arm with one seed -> a number
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Results(Generic[R]):
    """Measurements of every arm with every seed: ``results["ce", 0]``."""

    found: Mapping[tuple[str, int], R]
    seeds: Sequence[int]

    @property
    def arms(self) -> list[str]:
        """Return all arms in order."""
        return list(dict.fromkeys(arm for arm, _ in self.found))

    def __getitem__(self, key: tuple[str, int]) -> R:
        return self.found[key]

    def of(self, arm: str) -> list[R]:
        """Return the measurements of an arm, in the order of seeds."""
        return [self.found[arm, seed] for seed in self.seeds]

    def mean(self, arm: str, value: Value) -> Interval:
        """Return the mean of a number of an arm over seeds, with its interval, for tables and figures."""
        return across_seeds([value(one) for one in self.of(arm)])

    def row(self, arm: str, columns: Mapping[str, Value]) -> dict[str, Interval]:
        """Return the cells of one table row: the mean of each column's number of an arm over seeds."""
        return {label: self.mean(arm, value) for label, value in columns.items()}

    def interval(self, quantity: Quantity) -> Interval:
        """Return the interval of a quantity over seeds, for tables and figures."""
        number = self.number(quantity)
        return Interval(number.value, number.low, number.high)

    def number(self, quantity: Quantity) -> Number:
        """Return a rule's quantity, averaged over seeds."""

        def value(seed: int) -> float:
            terms = [one.weight * one.value(self.found[one.arm, seed]) for one in quantity.terms]
            return float(sum(terms))

        return over_seeds([value(seed) for seed in self.seeds])


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure of a study: its file name, its caption, and the function that draws it at a path."""

    file: str
    caption: str
    draw: Callable[[Results[Any], Path], None]


def rows(
    results: Results[Any], columns: Mapping[str, Value], arms: Iterable[str] | None = None, head: str = "arm"
) -> list[Row]:
    """Return a table with one row per arm; the column ``head`` holds the arm's name."""
    return [{head: arm, **results.row(arm, columns)} for arm in (results.arms if arms is None else arms)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """Declaration of a study; its module is ``study.py`` in the folder of its name."""

    name: str
    paper: str  # the parts of the paper: "Table 2 and Figs 4, 5, 1b, 10"
    model: str  # a key of ``claims.MODELS``
    arms: Mapping[str, Any]  # label -> first argument of ``measure``
    measure: Callable[[Any, int], Any]  # arm and seed -> the measurement for rules, tables and figures
    rules: tuple[Declared, ...]
    seeds: Sequence[int] = SEEDS
    prepare: Sequence[Callable[[int], object]] = ()  # make inputs that the arms of a seed share; once per seed
    stats: Sequence[Quantity] = ()  # stored in addition to the quantities of the rules
    tables: Callable[[Results[Any]], Mapping[str, Sequence[Row]]] = field(default=lambda _: {})
    figures: Sequence[Figure] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    facts: Callable[[Results[Any]], Mapping[str, object]] = field(default=lambda _: {})  # rules only quote these

    def numbers(self, results: Results[Any]) -> dict[str, Number]:
        """Return all numbers by name: those of the rules and those of ``stats``.

        A smoke run has fewer arms. Numbers of absent arms are left out, and rules that ask for them are not tested.
        """
        asked = {one.name: one for rule in self.rules for one in rule.asks}
        quantities = {one.name: one for one in self.stats} | asked
        known = {n: one for n, one in quantities.items() if self.arms.keys() >= {t.arm for t in one.terms}}
        return {name: results.number(one) for name, one in known.items()}


def start_study(study: Study) -> None:
    """Run the command line of a study."""
    start(partial(run, study), f"{study.paper}, on {MODELS[study.model]}; what counts: README.md in its folder.")


def run(study: Study) -> None:
    """Measure all arms, judge, draw the figures and write ``results.json``."""
    started, folder = begin(study.name), results_folder(Path(__file__).parent / study.name)
    results = measured(study)
    figures = folder / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for one in study.figures:
        one.draw(results, figures / one.file)
    captions = {one.file: one.caption for one in study.figures}
    settings = {**study.settings, "seeds": study.seeds}
    keep(folder, started, study.numbers(results), study.tables(results), captions, settings, study.facts(results))


def measured(study: Study) -> Results[Any]:
    """Measure every arm with every seed in parallel processes; stored measurements are not repeated."""
    shared = [(study.name, place, seed) for place in range(len(study.prepare)) for seed in study.seeds]
    everywhere(_prepare, shared, f"{study.name}: what arms share")
    jobs = [(study.name, label, seed) for seed in study.seeds for label in study.arms]
    found = everywhere(_measure, jobs, study.name)
    return Results(found={job[1:]: one for job, one in zip(jobs, found, strict=True)}, seeds=study.seeds)


def of_name(name: str) -> Study:
    """Return the declaration of the study with this name."""
    study: Study = rule_hash.module(name).STUDY
    return study


def means(results: Results[Any], arms: Iterable[str], value: Value) -> list[float]:
    """Return the mean of each arm over seeds: a curve of a figure."""
    return [float(np.mean([value(one) for one in results.of(arm)])) for arm in arms]


def _prepare(job: tuple[str, int, int]) -> None:
    name, place, seed = job
    of_name(name).prepare[place](seed)


def _measure(job: tuple[str, str, int]) -> Any:
    """Measure one arm with one seed; the file name depends on the settings, so a changed study measures anew."""
    name, label, seed = job
    study = of_name(name)
    arm = study.arms[label]
    file = f"{''.join(c if c.isalnum() else '_' for c in label)}-{seed}"
    return once(name, file, (label, arm, seed, study.settings), lambda: study.measure(arm, seed))
