"""The benchmark of the certificate: readings are timed, and nothing is measured where there are none."""

import numpy as np
import pytest

from bebop.bench import certify
from bebop.bench.certify import written
from bebop.errors import UserError
from tests.benchmarks.test_monitor import config
from tests.monitor.test_certified import groups


@pytest.mark.slow
def test_a_reading_and_the_turns_have_a_row() -> None:
    timed, turns = certify.run(config(monitor={"certify_every": 2}), rounds=2)
    assert timed["part"] == "certificate, each 2 steps, timed" and timed["s/reading"] == 2 * timed["added s"] > 0
    assert timed["added %"] == pytest.approx(100 * timed["added s"] / timed["s/update"])
    assert 0 < timed["tokens/reading"] <= 4 * 12, "two answers of each group"
    assert turns["low %"] <= turns["added %"] <= turns["high %"]


def test_answers_are_those_of_the_version_that_is_named() -> None:
    [first, second] = written(groups(2, length=4), 3)
    assert np.array_equal(first.trajectories[0].completion.versions, [3, 3, 3, 3])
    assert np.array_equal(second.trajectories[0].completion.oldest, [3, 3, 3, 3, 3])
    assert [t.reward for t in first.trajectories] == [0, 1, 0, 1]


@pytest.mark.parametrize("more", [{"monitor": {"certify_every": 0}}, {"decoding": {"system": "pad"}}])
def test_nothing_to_measure_is_one_line(more: dict) -> None:
    with pytest.raises(UserError, match="certify_every"):
        certify.run(config(**more), rounds=2)
