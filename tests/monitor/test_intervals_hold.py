"""Intervals of merged windows: those of several steps hold the truth as often as they say, and not by being wide."""

import numpy as np

from bebop.monitor.records import StepRecords
from bebop.monitor.window import Measure, Window
from tests.monitor.synthetic import Truth, constant, step_records

STEADY = Truth(entropy=constant(0.5), mismatch=constant(0), noise=0.25)


def steps(seed: int, count: int, prompts: int, answers: int) -> list[StepRecords]:
    rng = np.random.default_rng([71, seed])
    return [step_records(STEADY, step, rng, prompts=prompts, answers=answers) for step in range(count)]


def covered(count: int, prompts: int, answers: int = 1, seeds: int = 300, shared: bool = False) -> float:
    """Share of intervals of ``count`` merged steps that hold the truth; ``shared``: every step resampled alike."""
    held = 0
    for seed in range(seeds):
        windows = [Window.of(r, draws=200, seed=seed if not shared else 0) for r in steps(seed, count, prompts, answers)]
        value = sum(windows[1:], windows[0]).value(Measure())
        held += value.low <= STEADY.level <= value.high
    return held / seeds


def test_intervals_of_few_prompts_in_several_steps_hold() -> None:
    assert 0.915 <= covered(count=4, prompts=3) <= 0.985


def test_answers_to_one_prompt_count_as_one() -> None:
    """Copies of an answer add nothing: the interval is that of the answers without them."""
    records = steps(0, 1, prompts=12, answers=1)[0]
    copies = records.select(np.repeat(np.arange(12), 4))  # type: ignore[arg-type]
    copies = copies.relabelled(copies.unit)
    single, fourfold = (Window.of(r, draws=400).value(Measure()) for r in (records, copies))
    assert fourfold.point == single.point and 0.9 < fourfold.error / single.error < 1.1
