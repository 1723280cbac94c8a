"""The benchmark of the monitor: it measures every part, on the same tokens with and without statistics."""

import pytest

from bebop.bench import monitor
from bebop.config import JobConfig
from bebop.errors import UserError
from bebop.parsing import from_dict
from bebop.rollout.decoding import draft_verify

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


@pytest.mark.parametrize("more", [{"decoding": {"system": "autoregressive"}}, {"rollout": {"engine": "sglang"}}])
def test_nothing_to_measure_is_one_line(more: dict) -> None:
    with pytest.raises(UserError, match="cannot be measured here"):
        monitor.run(from_dict(JobConfig, more), rounds=2)
