"""The benchmark of the monitor: it measures every part, on the same tokens with and without statistics."""

from typing import Any

import numpy as np
import pytest

from bebop.bench import certify, certify_arms, monitor
from bebop.bench.certify import written
from bebop.config.fields import from_dict
from bebop.config.job import JobConfig
from bebop.errors import UserError
from bebop.rollout.decoding import draft_verify
from tests.monitor.test_certified import groups
from tests.tree import ROOT

SMALL = {"trainer": {"groups_per_step": 2, "group_size": 2}, "rollout": {"sampling": {"max_new_tokens": 12}}}


def config(**more: object) -> JobConfig:
    return from_dict(JobConfig, {**SMALL, **more})


@pytest.mark.slow
def test_every_part_has_a_row() -> None:
    original = draft_verify._compare
    rows = {row["part"]: row for row in monitor.run(config(monitor={"probe_every": 5}), rounds=2)}
    assert list(rows) == [
        "statistics of drafts, timed", "statistics of drafts, on against off", "monitor", "bank, each 5 steps",
    ]  # fmt: skip
    assert all(rows[part]["added s"] > 0 for part in rows if "against" not in part)
    assert 0 < rows["statistics of drafts, timed"]["added %"] < 50
    assert draft_verify._compare is original


@pytest.mark.slow
def test_what_is_not_read_has_no_row() -> None:
    assert len(monitor.run(config(monitor={"probe_every": 0}), rounds=2)) == 3


@pytest.mark.parametrize(
    ("bench", "more", "said"),
    [
        (monitor, {"decoding": {"system": "autoregressive"}}, "cannot be measured here"),
        (monitor, {"rollout": {"engine": "sglang"}}, "cannot be measured here"),
        (certify, {"monitor": {"certify_every": 0}}, "certify_every"),
        (certify, {"decoding": {"system": "pad"}}, "certify_every"),
    ],
)
def test_nothing_to_measure_is_one_line(bench: Any, more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        bench.run(from_dict(JobConfig, more), rounds=2)


# ---- The benchmark of the certificate: readings are timed, and nothing is measured where there are none


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


# ---- The statistics of a certificate: their speed, and Token-DiFR beside them


@pytest.mark.slow
def test_the_boxes_are_timed_on_the_same_rows_as_an_earlier_checkout() -> None:
    rows = certify_arms.run_speed(certify_arms.SpeedBench(vocabulary=4200, tokens=16, against=str(ROOT)))
    assert [row["what"] for row in rows] == [
        "black box, all columns", "black box, 4,096 columns", "white box, all columns",
    ]  # fmt: skip
    assert all(row["off"] == 0 and row["ratio"] > 0 and row["s/20,000 tokens"] == 20 * row["ms/token"] for row in rows)
    with pytest.raises(UserError, match="it is no checkout of bebop"):
        certify_arms.run_speed(certify_arms.SpeedBench(vocabulary=64, tokens=16, against="/nowhere"))


@pytest.mark.slow
def test_another_seed_is_a_fault_to_difr_alone_and_a_residual_to_the_certificate_alone() -> None:
    bench = certify_arms.DifrBench(vocabulary=48, tokens=2000, runs=1)
    names = ("none", "none, another seed", "residual is p, drafts verified by rejection")
    rows = {row["fault"]: row for row in certify_arms.run_difr(bench, names)}
    intact, seed, residual = (rows[name] for name in names)
    assert intact["tokens alone"] is intact["with log-probs"] is intact["DiFR, tokens"] is None
    assert seed["tokens alone"] is None and seed["DiFR, tokens"] is not None
    assert residual["tokens alone"] is not None and residual["DiFR, tokens"] is None
