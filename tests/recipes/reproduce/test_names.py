"""What a study computes has the names that its rules ask for: one too few would show after hours, as 'not measured'."""

from importlib import import_module

import pytest

from bebop.metrics.intervals import Interval, across_seeds
from recipes.reproduce.beyond import cold
from recipes.reproduce.beyond.estimators import ESTIMATORS
from recipes.reproduce.beyond.heads import ENGINE, GRID, WATCHED
from recipes.reproduce.beyond.heads import HeadResult as BeyondResult
from recipes.reproduce.record import rules_of
from recipes.reproduce.study import SEEDS
from tests.recipes.reproduce.synthetic import check_names

ONE = Interval(1.0, 0.9, 1.1)


def test_drift(monkeypatch: pytest.MonkeyPatch) -> None:
    study = import_module("recipes.reproduce.drift.analysis")
    monkeypatch.setattr(study, "slopes", lambda *_: [1.0] * 3)
    monkeypatch.setattr(study, "run_row", lambda _: {"entropy first": 0.2, "entropy last": 0.1})
    monkeypatch.setattr(study, "mismatch", lambda *_: (0.0, 0.0, 0.0))
    monkeypatch.setattr(study, "ends", lambda *_: (1.0, 1.0))
    monkeypatch.setattr(study, "updates", lambda *_: across_seeds([1.0, 1.1, 1.2]))

    class Run:
        def __init__(self, direction: str) -> None:
            self.direction = direction

    check_names("drift", study.numbers([Run(d) for d in study.DIRECTIONS for _ in SEEDS]))


def test_beyond() -> None:
    study = import_module("recipes.reproduce.beyond.analysis")
    shown = {"on_text": dict.fromkeys(GRID, 1.0), "engine": dict.fromkeys(ENGINE, 1.0)}
    head = BeyondResult(accept_length=1.0, overlap=1.0, truncated={"engine": 1.0, "text": 1.0}, **shown)
    heads = {(name, s): head for name in (*WATCHED, study.CORRECTED, study.TRUNCATED) for s in SEEDS}
    curves = {(way, s): {0: 1.0, 10: 2.0} for way in cold.WAYS for s in SEEDS}
    biases = {(name, e): ONE for name in WATCHED for e in ESTIMATORS if e != "counts"}
    by_name = study.numbers(heads, heads, curves, biases)
    check_names("beyond", {**by_name, **study.facts(heads, (1.0, 1.2), (100, 84))})


def test_a_name_that_is_not_computed_is_noticed() -> None:
    names = [part.number for rule in rules_of("drift") for group in rule.any_of for part in group]
    with pytest.raises(AssertionError, match="end RS"):
        check_names("drift", names)
