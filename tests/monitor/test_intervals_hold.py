"""Intervals of merged windows: those of several steps hold the truth as often as they say, and not by being wide."""

import numpy as np
import pytest

from bebop.monitor.estimate import Estimate
from bebop.monitor.records import StepRecords
from bebop.monitor.window import Measure, Window
from tests.cases import slow_but
from tests.monitor.synthetic import Truth, constant, step_records

STEADY = Truth(entropy=constant(0.5), mismatch=constant(0), noise=0.25)


def steps(seed: int, count: int, prompts: int, answers: int) -> list[StepRecords]:
    rng = np.random.default_rng([71, seed])
    return [step_records(STEADY, step, rng, prompts=prompts, answers=answers) for step in range(count)]


def merged(seed: int, count: int, prompts: int) -> Estimate:
    """The accept length over ``count`` steps."""
    windows = [Window.of(r, draws=200, seed=seed) for r in steps(seed, count, prompts, answers=1)]
    return sum(windows[1:], windows[0]).value(Measure())


def test_intervals_of_few_prompts_in_several_steps_hold() -> None:
    values = [merged(seed, count=4, prompts=3) for seed in range(150)]
    assert 0.915 <= np.mean([v.low <= STEADY.level <= v.high for v in values]) <= 0.985


@pytest.mark.parametrize("seeds", slow_but([60], [60, 300]))
def test_errors_of_merged_steps_are_as_large_as_what_they_speak_of(seeds: int) -> None:
    """Not those of one of the steps: four steps have half the error of one."""
    values = [merged(seed, count=4, prompts=12) for seed in range(seeds)]
    scatter = np.std([v.point for v in values])
    assert 0.85 < np.mean([v.error for v in values]) / scatter < 1.2


def test_steps_of_one_prompt_each_have_no_interval() -> None:
    """There is nothing to tell the scatter of prompts from."""
    assert np.isfinite(merged(0, count=3, prompts=1).point) and not merged(0, count=3, prompts=1).known
    assert merged(0, count=3, prompts=2).known


def test_answers_to_one_prompt_count_as_one() -> None:
    """Copies of an answer add nothing: the interval is that of the answers without them."""
    records = steps(0, 1, prompts=12, answers=1)[0]
    copies = records.select(np.repeat(np.arange(12), 4))  # type: ignore[arg-type]
    copies = copies.relabelled(copies.unit)
    single, fourfold = (Window.of(r, draws=400).value(Measure()) for r in (records, copies))
    assert fourfold.point == single.point and 0.9 < fourfold.error / single.error < 1.1
