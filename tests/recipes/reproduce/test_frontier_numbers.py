"""From the frontier's chunks to the numbers of its rules: planted shifts, slopes and speeds come out again."""

import dataclasses

import numpy as np
import pytest

from bebop.systems import SYSTEMS
from recipes.reproduce.frontier import analysis, arms
from recipes.reproduce.frontier.arms import ARMS, Arm
from recipes.reproduce.frontier.charts import GAP, spread
from recipes.reproduce.frontier.findings import BATCHES
from recipes.reproduce.frontier.jobs import Everything, Timed, Watched
from recipes.reproduce.frontier.witness import COLUMNS
from tests.recipes.reproduce.test_names import missing

PROMPTS, CHUNKED = 120, 4


def made(arm: Arm, numbers: np.random.Generator, shift: float = 0.0, success: float = 0.5) -> Watched:
    """Answers of 50 tokens whose sampled total variation has the mean ``shift`` beyond the computed one."""
    tokens = np.full(PROMPTS, 50.0)
    spent = 0.0 if arm.exact else 50 * 0.1 * (arm.epsilon or 0.3)
    sums = {name: np.full(PROMPTS, 40.0) for name in COLUMNS}
    sums["computed"] = np.full(PROMPTS, spent)
    sums["witness"] = spent + 50 * shift + numbers.normal(0, 0.1, PROMPTS)
    sums["overlap"] = np.full(PROMPTS, 30.0)
    sums["accepted"] = 30.0 + spent + numbers.normal(0, 0.1, PROMPTS)
    right = (np.arange(PROMPTS) < success * PROMPTS).astype(float)
    return Watched(
        success=right, tokens=tokens, asked=tokens, passes=tokens, truncated=0 * tokens, sums=sums,
        answers=(1,) * PROMPTS, operations=np.ones(CHUNKED), emitted=np.ones(CHUNKED),
    )  # fmt: skip


def everything(speeds: dict[str, float], shifts: dict[str, float], right: dict[str, float]) -> Everything:
    """Results in which arms have these speeds over plain, shifts and shares of right answers."""
    numbers = np.random.default_rng(3)
    timed = {
        batch: {
            arm.name: [
                Timed(processor=machine / speeds.get(arm.name, 1.0), wall=2.0, tokens=100, answers=(1,) * 30)
                for machine in (1.0, 1.3, 0.8, 1.1)
            ]
            for arm in ARMS
        }
        for batch in BATCHES
    }
    watched = {arm.name: made(arm, numbers, shifts.get(arm.name, 0), right.get(arm.name, 0.5)) for arm in ARMS}
    return Everything(timed=timed, watched=watched)


def test_the_names_are_those_of_the_rules() -> None:
    results = everything({}, {}, {})
    names = {**analysis.rule_numbers(results), **analysis.facts(results)}
    assert missing("frontier", names) == set()
    assert missing("frontier", names.keys() - {"pad over planted"}) == {"pad over planted"}  # the test can fail
    assert len(analysis.table(results)) == len(ARMS) == len({arm.name for arm in ARMS})


def test_every_system_has_an_arm() -> None:
    assert {arm.system for arm in ARMS} == {*SYSTEMS}
    assert all(len(analysis.family(name)) == len(options) for name, options in arms.SWEPT.items())
    assert {arm.system for arm in analysis.EXACT_ARMS} == {name for name, row in SYSTEMS.items() if row.exact}


def test_one_system_that_is_not_exact_is_found() -> None:
    found = analysis.rule_numbers(everything({}, {}, {}))
    assert found["exact arms that differ"].value == 0 and found["farthest exact"].value < 0.005
    assert found["planted arms that miss"].value == found["pad arms that miss"].value == 0
    shifted = everything({}, {"bebop_block": -0.008, "planted 0.2": 0.01}, {})
    found = analysis.rule_numbers(shifted)
    assert found["exact arms that differ"].value == 1 and found["planted arms that miss"].value == 1
    assert analysis.farthest(shifted)[0].name == "bebop_block"
    assert found["farthest exact"].value == pytest.approx(0.008, abs=5e-4)
    assert found["farthest exact"].low > 0.005  # the interval is turned with the value
    assert analysis.facts(shifted)["exact arms that differ, which"] == "bebop_block"


def test_slopes_are_those_of_the_sums() -> None:
    results = everything({}, {}, {})
    parts = [results.watched[arm.name] for arm in analysis.family("planted")]
    for over in (analysis.sampled_on_computed, analysis.gained_on_spent):
        number = analysis.slope(over, parts)
        assert number.low < 0 < number.high and number.high - number.low < 0.1
    halved = [dataclasses.replace(one, sums={**one.sums, "computed": one.sums["computed"] / 2}) for one in parts]
    assert analysis.slope(analysis.sampled_on_computed, halved).low > 0.9  # a formula that gives half
    assert analysis.slope(analysis.gained_on_spent, halved).low > 0.9


def test_answers_are_compared_at_equal_total_variation() -> None:
    spent = {arm.name: 0.1 * (arm.epsilon or 0) for arm in analysis.family("planted")}
    right = {name: 0.6 - 4 * value for name, value in spent.items()} | {"bebop": 0.6, "pad 0.1": 0.58}
    results = everything({}, {}, right)
    by_tau = analysis.at_equal_variation(results)
    assert {*by_tau} == {arm.name for arm in analysis.family("pad")}  # at .03 each, between epsilon .2 and .5
    assert by_tau["pad 0.1"].mean() == pytest.approx(0.58 - (0.6 - 4 * 0.03), abs=0.01)
    strong = dataclasses.replace(
        results.watched["pad 0.7"], sums={**results.watched["pad 0.7"].sums, "computed": np.full(PROMPTS, 9.0)}
    )
    beyond = Everything(timed=results.timed, watched={**results.watched, "pad 0.7": strong})
    assert "pad 0.7" not in analysis.at_equal_variation(beyond)


def test_speed_is_compared_within_chunks_and_with_the_best() -> None:
    results = everything({"block": 2.0, "pipo": 2.2, "planted 0.5": 3.0}, {}, {"planted 0.5": 0.1})
    assert analysis.times_plain(results, Arm(system="block"), 1).value == pytest.approx(2.0)
    found = analysis.rule_numbers(results)
    for batch in BATCHES:
        assert found[f"inexact over exact, batch {batch}"].value == pytest.approx(0.5)
        assert found[f"cheap over exact, batch {batch}"].value == pytest.approx(0.1)  # the rule that errs most is dear
    assert analysis.changed(results) == f"batch 1: 0 of {len(ARMS) * PROMPTS}, batch 32: 0 of {len(ARMS) * PROMPTS}"


def test_labels_lie_apart_and_inside() -> None:
    places = spread([1.0, 1.01, 1.02, 2.9, 2.95], 0.5, 3.0)
    assert places == sorted(places) and min(np.diff(places)) >= 2.5 * GAP - 1e-9
    assert places[0] > 0.5 and places[-1] < 3.0
